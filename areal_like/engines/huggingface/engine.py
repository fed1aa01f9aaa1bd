"""`HuggingFaceEngine`: an `InferenceEngine` inside its worker process."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from areal_like.alloc import ModelAllocation
from areal_like.engines.base import Completion, GenerationRequest, WeightBucket
from areal_like.engines.huggingface import attention
from areal_like.engines.huggingface.adapters import AdapterUpdates
from areal_like.engines.huggingface.decoding import Decoder, Limits
from areal_like.engines.huggingface.sequences import Sequence
from areal_like.engines.huggingface.weights import WeightUpdates

ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM")


class HuggingFaceEngine:
    """One replica: the whole model on one device. The replicas of `huggingface:d2` know nothing of each other.

    Draws: token i of a request takes number i of the request's own stream of uniform numbers, and picks by inverting
    the cumulative distribution. A request with a seed therefore gives the same tokens whatever it is batched with and
    however often it is interrupted, as far as the floating-point logits do not depend on the batch (a number that falls
    within their rounding of the border between two tokens can tip over). Requests without a seed take theirs from the
    engine's `seed` and the rank, in the order in which they come.

    Args:
        allocation: of the rollout; its only letter is d.
        config: the rollout section; nothing in it concerns a replica, whose limits are in `limits`.
        model_path: a Hugging Face folder; the dtype is the folder's.
        tokenizer_path: needed for stop strings, and for the end token of the tokenizer when the model has another;
            empty: neither.
        device: "cpu" or "cuda" (the current one).
        seed: of requests that have none.
    """

    def __init__(
        self,
        allocation: ModelAllocation,
        config: Any,
        model_path: str,
        tokenizer_path: str = "",
        device: str = "cpu",
        seed: int = 0,
    ) -> None:
        self.model_path, self.tokenizer_path = Path(model_path), tokenizer_path
        self.device = torch.device(device)
        self.seeds = np.random.SeedSequence([seed, int(os.environ.get("RANK", "0"))])
        self.limits: Limits | None = None
        """What to keep within; None: 256 sequences, and a part of the memory that is free when a call begins."""
        self.version = 0
        self.model: PreTrainedModel | None = None
        self.tokenizer: PreTrainedTokenizerBase | None = None
        self.decoder: Decoder | None = None
        """Holds the requests, from one `advance` to the next."""

    def initialize(self) -> None:
        """Load the model.

        Raises:
            FileNotFoundError: no model folder there.
            ValueError: an architecture or attention that this engine does not have; the message says which it has.
        """
        if not (self.model_path / "config.json").is_file():
            raise FileNotFoundError(f"{self.model_path} is not a Hugging Face model folder: it has no config.json")
        config = AutoConfig.from_pretrained(self.model_path)
        architecture = (config.architectures or ["no architecture"])[0]
        if architecture not in ARCHITECTURES:
            known = ", ".join(ARCHITECTURES)
            raise ValueError(f"{self.model_path} is a {architecture}; the huggingface engine has {known}")
        if getattr(config, "sliding_window", None) is not None:
            raise ValueError(f"{self.model_path} uses sliding-window attention, which the huggingface engine lacks")
        attention.register()
        model: Any = AutoModelForCausalLM.from_pretrained(
            self.model_path, config=config, dtype="auto", attn_implementation=attention.ATTENTION
        )
        model.to(self.device).eval().requires_grad_(False)
        self.model = model
        if self.tokenizer_path:
            self.tokenizer = AutoTokenizer.from_pretrained(self.tokenizer_path)
        self.end_ids = _end_ids(self.model, self.tokenizer)
        self.updates = WeightUpdates(self.model)
        self.adapters = AdapterUpdates(self.updates)

    def advance(
        self, requests: list[GenerationRequest], interrupted: Callable[[], bool] | None = None
    ) -> list[Completion]:
        """Take `requests` up beside those that are held, and continue all until at least one ends or `interrupted`,
        asked after every forward, says yes; what has ended, in that order.

        There may be any number of requests: those beyond the limits wait. Those that begin with the same tokens share
        one prefill, also with one that is in the middle of its answer. Otherwise as `generate`.
        """
        model = self._loaded()
        self.updates.check_usable()
        sequences = self._sequences(requests, model)
        if self.decoder is None:
            self.decoder = Decoder(model, self.limits or _limits(self.device), self.version)
        try:
            self.decoder.add(sequences)
            ended = self.decoder.advance(interrupted)
        except BaseException:
            self._drop()
            raise
        if not self.decoder.busy:
            self._drop()
        return [sequence.completion() for sequence in ended]

    def withdraw(self) -> list[Completion]:
        """Give up what is held: the unfinished requests with the tokens they have. Keys and values are dropped."""
        unfinished = self.decoder.unfinished if self.decoder is not None else []
        self._drop()
        return [sequence.completion() for sequence in unfinished]

    def generate(
        self, requests: list[GenerationRequest], interrupted: Callable[[], bool] | None = None
    ) -> list[Completion]:
        """Continue every request to its end; results in the order of `requests`.

        `max_new_tokens` and `min_new_tokens` count from the prompt on, what an earlier call generated included. The end
        token, or the token that completed a stop string, is the last of a completion.

        Raises:
            ValueError: a request that cannot be continued; its id is named and nothing has been generated.
            RuntimeError: an update of the weights is incomplete, or requests are held.
            FloatingPointError: the model gives logits that are not finite. What was held is lost.
        """
        self._check_empty("generate")
        model = self._loaded()
        self.updates.check_usable()
        sequences = self._sequences(requests, model)
        self.decoder = Decoder(model, self.limits or _limits(self.device), self.version)
        try:
            self.decoder.add(sequences)
            while self.decoder.busy and not (interrupted is not None and interrupted()):
                self.decoder.advance(interrupted)
        finally:
            self._drop()
        return [sequence.completion() for sequence in sequences]

    def update_weights(self, bucket: WeightBucket) -> None:
        """Replace the weights of one bucket, cast to the model's dtype, or merge its adapters into the weights.

        An update is all of weights or all of adapters. See `WeightUpdates` for what an error leaves.

        Raises:
            ValueError: an unknown or repeated name, another shape, a tied weight that differs, weights and adapters in
                one update; the engine does not generate until a complete update has come.
            RuntimeError: requests are held.
        """
        self._check_empty("update_weights")
        self._loaded()
        if bucket.adapter_scaling is not None:
            if self.updates.received:
                raise ValueError("adapters came in the middle of an update of weights")
            self.adapters.take(bucket)
            return
        if self.adapters.open:
            raise ValueError("weights came in the middle of an update of adapters")
        self.adapters.forget()
        self.updates.take(bucket)

    def finish_update(self, version: int) -> None:
        """Tokens carry `version` from now on. ValueError when a weight, or a part of an adapter, never came."""
        self._check_empty("finish_update")
        self._loaded()
        (self.adapters if self.adapters.open else self.updates).finish()
        self.version = version

    def close(self) -> None:
        """Give the memory back; the engine cannot be used afterwards."""
        self.model = None
        if hasattr(self, "updates"):
            del self.updates, self.adapters  # they hold the weights too
        self._drop()

    def _sequences(self, requests: list[GenerationRequest], model: PreTrainedModel) -> list[Sequence]:
        return [
            Sequence(
                request,
                end_ids=self.end_ids,
                vocabulary=model.config.vocab_size,
                context=model.config.max_position_embeddings,
                tokenizer=self.tokenizer,
                seed=seed,
            )
            for request, seed in zip(requests, self.seeds.spawn(len(requests)), strict=True)
        ]

    def _check_empty(self, method: str) -> None:
        if self.decoder is not None:
            count = len(self.decoder.unfinished)
            raise RuntimeError(f"{method} while the engine holds {count} unfinished requests: call withdraw() first")

    def _drop(self) -> None:
        """Let go of keys and values: they go back to the GPU, which a trainer may share."""
        self.decoder = None
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _loaded(self) -> PreTrainedModel:
        if self.model is None:
            raise RuntimeError("the engine has no model: call initialize() first")
        return self.model


def _end_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> frozenset[int]:
    """The tokens that end an answer: the model's (one or several) and the tokenizer's."""
    ends: list[int] = []
    for value in (
        model.generation_config.eos_token_id,
        model.config.eos_token_id,
        getattr(tokenizer, "eos_token_id", None),
    ):
        ends += value if isinstance(value, list) else [] if value is None else [value]
    return frozenset(ends)


def _limits(device: torch.device) -> Limits:
    """Half of the free memory of a GPU, or a quarter of the unused memory of the host, for keys and values."""
    if device.type == "cuda":
        free = (
            torch.cuda.mem_get_info(device)[0]
            + torch.cuda.memory_reserved(device)
            - torch.cuda.memory_allocated(device)
        )
        return Limits(cache_bytes=free // 2, prefill_tokens=16384)
    unused = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    return Limits(cache_bytes=max(2**28, unused // 4))
