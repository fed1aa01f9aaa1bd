"""What the tests put into processes that hold an engine on a GPU: runs told as plain figures."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from areal_like.algorithms.sft import SFTLoss
from areal_like.alloc import ModelAllocation
from areal_like.config import TrainEngineConfig
from areal_like.data.batch import PackedBatch
from areal_like.engines.megatron.engine import MegatronEngine
from areal_like.engines.megatron.fp8 import readable
from areal_like.runtime.determinism import deterministic_environment


def batch_of(step: int, vocabulary: int = 4096) -> PackedBatch:
    """Sequences that can be learnt: a token mostly follows from the one before. About 2,000 tokens."""
    generator = torch.Generator().manual_seed(step)
    sequences = []
    for n in torch.randint(20, 400, (10,), generator=generator).tolist():
        start = int(torch.randint(0, vocabulary, (1,), generator=generator))
        ids = (start + 7 * torch.arange(n)) % 500
        noise = torch.rand(n, generator=generator) < 0.1
        sequences.append(torch.where(noise, torch.randint(0, vocabulary, (n,), generator=generator), ids))
    masks = [torch.cat([torch.zeros(1), torch.ones(len(s) - 1)]) for s in sequences]
    return PackedBatch.from_sequences(sequences, tokens={"loss_mask": masks})


class GpuHost:
    """One rank with one engine on its GPU."""

    def __init__(self, config: TrainEngineConfig) -> None:
        self.engine = MegatronEngine(
            allocation=ModelAllocation.parse(config.backend), config=config, device="cuda", seed=1, total_steps=None
        )
        self.engine.initialize()

    def train(self, steps: int) -> list[tuple[float, float]]:
        """Loss and gradient norm of each step."""
        figures = [self.engine.train_batch(batch_of(step), SFTLoss()) for step in range(steps)]
        return [(f["loss"], f["grad_norm"]) for f in figures]

    def digest(self) -> str:
        digest = hashlib.sha256()
        for name, tensor in sorted(self._exported().items()):
            digest.update(name.encode() + tensor.contiguous().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    def differing_weights(self, folder: str) -> list[str]:
        """Names of exported tensors that are not, bit for bit, those of a Hugging Face folder."""
        return _differing(self._exported(), _tensors(folder))

    def largest_relative_difference(self, folder: str) -> float:
        """Of the exported matrices to those of the folder, relative to the largest value of each."""
        ours = self._exported()
        return max(
            float((ours[n].float() - t.float()).abs().max() / t.float().abs().max())
            for n, t in _tensors(folder).items()
            if t.ndim == 2
        )

    def differing_main_weights(self, folder: str) -> list[str]:
        """Names whose float32 copies in the optimizer are not exactly the values of a Hugging Face folder."""
        # One rank: its shard of the float32 copies is the whole.
        tensors = self.engine.bridge.export(self.engine.modules, value=lambda p: p.main_param.detach().view(p.shape))
        exported = {n: t.cpu() for n, t in tensors}
        return _differing(exported, {n: t.float() for n, t in _tensors(folder).items()})

    def save(self, folder: str) -> list[str]:
        """Save; which saved tensors are not what the engine streams."""
        self.engine.save(folder)
        return self.differing_weights(folder)

    def load(self, folder: str) -> None:
        self.engine.load(folder)

    def away_and_back(self) -> bool:
        """Whether offload and onload leave every exported bit, and what the next step does, as it was."""
        before = self.digest()
        self.engine.offload()
        self.engine.onload()
        return self.digest() == before

    def resume(self, folder: str) -> tuple[tuple[float, float], tuple[float, float]]:
        """The step after a checkpoint, and that step again after loading the checkpoint."""
        self.engine.save_checkpoint(folder, step=1)
        self.engine.finish_checkpoint()
        first = self.train(1)[0]
        self.train(2)
        self.engine.load_checkpoint(folder)
        return first, self.train(1)[0]

    def attempt(self, method: str, *arguments: object) -> object:
        """What a method of this host returns, or the error that it raises."""
        try:
            return getattr(self, method)(*arguments)
        except Exception as error:
            return f"{type(error).__name__}: {error}"

    def kinds(self) -> dict[str, int]:
        """How many parameters are of which kind of tensor."""
        found: dict[str, int] = {}
        for chunk in self.engine.modules:
            for parameter in chunk.parameters():
                kind = "plain" if readable(parameter).data_ptr() == parameter.data_ptr() else "fp8"
                found[kind] = found.get(kind, 0) + 1
        return found

    def micro_batch_lengths(self) -> list[int]:
        return [m.input_ids.shape[1] for m in self.engine._micro_batches(batch_of(0))]

    def log_probs(self, order: list[int]) -> list[Tensor]:
        """Of each sequence of `batch_of(0)`, packed in another order."""
        batch = batch_of(0)
        outputs = self.engine.forward(batch.select(order)).log_probs
        rows = outputs.split([batch.lengths[i] for i in order])
        return [rows[order.index(i)] for i in range(len(order))]

    def core_attention(self) -> list[str]:
        names = {
            type(m).__name__ for c in self.engine.modules for n, m in c.named_modules() if n.endswith("core_attention")
        }
        return sorted(names)

    def environment(self) -> dict[str, str | None]:
        return {name: os.environ.get(name) for name in deterministic_environment()}

    def _exported(self) -> dict[str, Tensor]:
        return {n: t.clone() for bucket in self._buckets() for n, t in bucket.items()}

    def _buckets(self) -> Iterator[Mapping[str, Tensor]]:
        for bucket in self.engine.weights():
            yield bucket.tensors


def _tensors(folder: str) -> dict[str, Tensor]:
    return {n: t for file in sorted(Path(folder).glob("*.safetensors")) for n, t in load_file(file).items()}


def _differing(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> list[str]:
    return sorted(
        n
        for n in ours.keys() | theirs.keys()
        if n not in ours or n not in theirs or not torch.equal(ours[n], theirs[n].to(ours[n].device))
    )
