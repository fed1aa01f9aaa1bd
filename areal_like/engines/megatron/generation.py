"""Megatron-Core's own model as a generator, in any layout with d1, also where there is no CUDA.

Megatron-Core 0.19.2 has engines for this (`megatron.core.inference`), which need CUDA from the first line of their
controller on: a generator on `torch.cuda.current_device()`, CUDA streams and events, flash attention over paged keys
and values. Here the forward pass of training is run for each token instead, over everything so far, and no keys and
values are kept: the cost of a token grows with all tokens before it. That is for comparing, for a layout that no
rollout engine has, and for small models; not for training runs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from areal_like.alloc import ModelAllocation
from areal_like.config import TrainEngineConfig
from areal_like.data.batch import PackedBatch
from areal_like.engines.base import Completion, GenerationRequest
from areal_like.engines.huggingface.sampling import sample
from areal_like.engines.huggingface.sequences import Sequence
from areal_like.engines.megatron.engine import MegatronEngine

__all__ = ["MegatronGenerator"]


class MegatronGenerator:
    """One rank of it. Every rank is given the same calls with the same requests and draws the same tokens; draws,
    ends and log-probabilities are as those of `HuggingFaceEngine`.

    Args:
        allocation: any layout with d1 (replicas would have to end at the same token).
        config: of the model; its optimizer is not needed (`optimizer: null`).
        device: "cpu" or "cuda".
        seed: of requests that have none.
        tokenizer_path: for stop strings, and for the end token of the tokenizer; empty: neither.

    Raises:
        ValueError: more than one data-parallel replica.
    """

    def __init__(
        self, allocation: ModelAllocation, config: TrainEngineConfig, device: str, seed: int, tokenizer_path: str = ""
    ) -> None:
        if allocation.dp > 1:
            raise ValueError(f"{allocation}: Megatron-Core's own model generates in one replica, d1")
        self.engine = MegatronEngine(allocation=allocation, config=config, device=device, seed=seed)
        self.folder, self.tokenizer_path = Path(config.path), tokenizer_path
        self.seeds = np.random.SeedSequence(seed)
        self.tokenizer: Any = None
        self.held: list[Sequence] = []
        self.version = 0

    def initialize(self) -> None:
        self.engine.initialize()
        if self.tokenizer_path:
            self.tokenizer = AutoTokenizer.from_pretrained(self.tokenizer_path)
        self.end_ids = _end_ids(self.folder, self.tokenizer)

    def advance(self, requests: list[GenerationRequest], tokens: int) -> list[Completion]:
        """Take `requests` up beside those that are held, and continue all until at least one ends, or by so many
        tokens. (An interruption that every rank saw at the same token would be a collective of its own.)

        Raises:
            ValueError: a request that cannot be continued; none was taken up.
        """
        new = [
            Sequence(
                request,
                end_ids=self.end_ids,
                vocabulary=self.engine.spec.vocab_size,
                context=self.engine.spec.max_position_embeddings,
                tokenizer=self.tokenizer,
                seed=seed,
            )
            for request, seed in zip(requests, self.seeds.spawn(len(requests)), strict=True)
        ]
        self.held += new
        for _ in range(tokens):
            if any(sequence.finish_reason for sequence in self.held) or not self.held:
                break
            self._step()
        ended = [sequence.completion() for sequence in self.held if sequence.finish_reason is not None]
        self.held = [sequence for sequence in self.held if sequence.finish_reason is None]
        return ended

    def withdraw(self) -> list[Completion]:
        """The unfinished requests with what they have; none is held afterwards."""
        held, self.held = self.held, []
        return [sequence.completion() for sequence in held]

    def load(self, path: str, version: int) -> None:
        """Other weights, from a Hugging Face folder. RuntimeError while requests are held."""
        if self.held:
            raise RuntimeError(f"load while {len(self.held)} unfinished requests are held: call withdraw() first")
        self.engine.load(path)
        self.version = version

    def close(self) -> None:
        self.engine.close()

    def _step(self) -> None:
        """One token more for all that are held."""
        logits = self.engine.next_logits(PackedBatch.from_sequences([sequence.tokens for sequence in self.held]))
        for sequence, token, log_prob in zip(self.held, *sample(logits, self.held), strict=True):
            sequence.append(token, log_prob, self.version)


def _end_ids(folder: Path, tokenizer: Any) -> frozenset[int]:
    """The tokens that end an answer, as `HuggingFaceEngine` finds them."""
    ends: list[int] = []
    written = (folder / "generation_config.json").is_file()
    for source in (
        GenerationConfig.from_pretrained(folder) if written else None,
        AutoConfig.from_pretrained(folder),
        tokenizer,
    ):
        value = getattr(source, "eos_token_id", None)
        ends += value if isinstance(value, list) else [] if value is None else [value]
    return frozenset(ends)
