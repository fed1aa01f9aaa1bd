"""What an engine is: two protocols, and the types that cross them.

A `TrainEngine` is one rank of a distributed model. Every rank of the allocation runs the same calls in the same order;
the caller hands each rank the sequences of its data-parallel index. A role (actor, critic, reference) is an algorithm
over such an engine, never a subclass of one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from areal_like.data.batch import PackedBatch

__all__ = [
    "Completion",
    "GenerationRequest",
    "InferenceEngine",
    "Loss",
    "PackedBatch",
    "PackedTensors",
    "SamplingParams",
    "TensorPlace",
    "TokenOutputs",
    "TrainEngine",
    "WeightBucket",
]


@dataclass
class TokenOutputs:
    """What the model says about each token of a batch; float32, aligned as `data.batch` says.

    Attributes:
        log_probs: `[tokens]`, log-probability of each token given its predecessors; 0 at the first of a sequence.
        entropy: `[tokens]`, entropy in nats of the distribution each token was drawn from; None unless asked for.
        values: `[tokens]`, of a value model alone: the value of the state in which each token was drawn (that of its
            predecessors); 0 at the first of a sequence. Such a model has no distribution: `log_probs` is then empty.
    """

    log_probs: Tensor
    entropy: Tensor | None = None
    values: Tensor | None = None


class Loss(Protocol):
    """A loss over tokens, picklable, without parallelism in it: it sees whole sequences of one micro-batch.

    The engine divides the summed loss by the summed `weight` of the *global* batch (all micro-batches and data-parallel
    ranks), so the result does not depend on the layout.
    """

    @property
    def temperature(self) -> float:
        """Logits are divided by it before the softmax."""

    @property
    def needs_entropy(self) -> bool:
        """Whether `TokenOutputs.entropy` has to be there."""

    def weight(self, batch: PackedBatch) -> Tensor:
        """The number that this batch adds to the denominator (usually its loss tokens); a scalar."""

    def __call__(self, outputs: TokenOutputs, batch: PackedBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """The summed loss (a scalar with gradient) and figures, sums that the engine divides by the weight too."""


@dataclass(frozen=True)
class TensorPlace:
    """Where one tensor lies in the buffer of a bucket.

    Attributes:
        offset: of its first byte; a multiple of `PackedTensors.ALIGNMENT`. Its elements follow one another.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int

    @cached_property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    @cached_property
    def stride(self) -> tuple[int, ...]:
        """In elements, as `Tensor.stride`."""
        return tuple(prod(self.shape[dim + 1 :]) for dim in range(len(self.shape)))


class PackedTensors(Mapping[str, Tensor]):
    """Tensors by name that are views of one buffer; a view is made when it is asked for.

    What goes to another process is the buffer's bytes and the layout, never the views.

    Args:
        buffer: uint8 `[bytes]`, on any device; its size is a multiple of `ALIGNMENT`.
        layout: the places, in the order of the names.
    """

    ALIGNMENT = 256
    """Bytes: enough for vector loads and for the copy engines of GPUs; what allocators of GPU memory give too."""

    def __init__(self, buffer: Tensor, layout: Iterable[TensorPlace]) -> None:
        self.buffer, self.layout = buffer, tuple(layout)
        self._elements: dict[torch.dtype, Tensor] = {}

    @cached_property
    def _places(self) -> dict[str, TensorPlace]:
        return {place.name: place for place in self.layout}

    def __getitem__(self, name: str) -> Tensor:
        place = self._places[name]
        elements = self._elements.get(place.dtype)
        if elements is None:
            elements = self._elements[place.dtype] = self.buffer.view(place.dtype)
        # One operation: a slice and its view cost three times as much, and a stream makes thousands.
        first = elements.storage_offset() + place.offset // place.dtype.itemsize
        return elements.as_strided(place.shape, place.stride, first)

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self.layout)

    def __reduce__(self) -> tuple[type[PackedTensors], tuple[Tensor, tuple[TensorPlace, ...]]]:
        return PackedTensors, (self.buffer, self.layout)


@dataclass(frozen=True)
class WeightBucket:
    """Some weights, whole tensors.

    The tensors are valid until the stream is asked for its next bucket, which may overwrite them: who keeps one clones
    it. On a GPU, work that was enqueued on the current CUDA stream before that still sees them; another stream (or
    another process) has to be done with them first.

    Attributes:
        tensors: by their Hugging Face names, or those of an adapter under PEFT's names
            (`base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight`); `PackedTensors` where one buffer holds
            them.
        adapter_scaling: None for weights; for an adapter, the factor of B A that is added to its weight.
    """

    tensors: Mapping[str, Tensor]
    adapter_scaling: float | None = None


@runtime_checkable
class TrainEngine(Protocol):
    def initialize(self) -> None:
        """Create process groups, build and load the model, create the optimizer."""

    def train_batch(self, batch: PackedBatch, loss: Loss) -> dict[str, float]:
        """One optimizer step on this rank's sequences.

        Returns the same figures on every rank: `loss`, `grad_norm`, `learning_rate`, `micro_batches`, and what the loss
        reported, each averaged over the loss weight of the global batch.
        """

    def forward(self, batch: PackedBatch, *, temperature: float = 1.0, entropy: bool = False) -> TokenOutputs:
        """Log-probabilities (and entropy) of every token of `batch`, in its order, without gradient, on every rank."""

    def weights(self, *, on_device: bool = False) -> Iterator[WeightBucket]:
        """All weights as Hugging Face tensors, in buckets of bounded size, with adapters merged into them.

        Collective; yields on rank 0 only. The model must not be trained, loaded or offloaded until the stream ends.

        Args:
            on_device: buckets in memory of the engine's own device, each one buffer (`PackedTensors`), instead of host
                memory.
        """

    def adapter_weights(self) -> Iterator[WeightBucket]:
        """The adapters alone, as `weights`, under PEFT's names. RuntimeError when the model has none."""

    def load(self, path: str | Path) -> None:
        """Load the weights of a Hugging Face folder."""

    def save(self, path: str | Path) -> None:
        """Write a Hugging Face folder; it appears under `path` whole or not at all."""

    def save_adapter(self, path: str | Path) -> None:
        """Write the adapters as a PEFT folder, whole or not at all. RuntimeError when the model has none."""

    def offload(self, *, parameters: bool = True, gradients: bool = True, optimizer: bool = True) -> dict[str, int]:
        """Free device memory: parameters and optimizer states wait in host memory, gradients are dropped (no step needs
        those of the step before). What is away already, or does not exist, is passed over. Collective.

        Returns:
            Bytes that this rank freed, by part.
        """

    def onload(self, *, parameters: bool = True, gradients: bool = True, optimizer: bool = True) -> None:
        """Bring back what is away, bit by bit; gradients as zeros. A call that needs what is away raises instead of
        bringing it back: who shares the device decides when."""

    def save_checkpoint(self, folder: str | Path, *, step: int) -> None:
        """Write what is needed to go on (weights, optimizer, random numbers, schedule); `step` is the caller's number.

        With asynchronous saving the folder appears when `finish_checkpoint` completes it; this, another save, and
        `close` do. OSError on every rank when any of them could not write; no part of the folder is left then.
        """

    def finish_checkpoint(self, *, wait: bool = True) -> bool:
        """Complete a checkpoint that is being written; without `wait` only if all of its files are. Whether none is
        left. OSError as `save_checkpoint`."""

    def load_checkpoint(self, folder: str | Path) -> int:
        """Go on where a checkpoint was written, under any layout; its step. ValueError: it is torn, or of another
        model."""

    def close(self) -> None: ...


@dataclass(frozen=True)
class SamplingParams:
    """How to draw tokens. Every field is honoured.

    temperature 0 (or greedy) takes the most likely token; top_p in (0, 1]; top_k 0 means no limit.
    """

    max_new_tokens: int
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    greedy: bool = False
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    seed: int | None = None

    def with_arguments(self, arguments: Mapping[str, Any]) -> SamplingParams:
        """These, with some fields replaced. TypeError names what is no field."""
        known = [f.name for f in fields(self)]
        if unknown := sorted(arguments.keys() - set(known)):
            raise TypeError(f"no sampling argument {', '.join(unknown)}; there are {', '.join(known)}")
        return replace(self, **arguments)


@dataclass
class GenerationRequest:
    """One sequence to continue.

    `generated`, `log_probs` and `versions` hold what an interrupted call already produced: generation goes on after it.
    """

    prompt_ids: list[int]
    sampling: SamplingParams
    request_id: int = 0
    generated: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)


@dataclass
class Completion:
    """The tokens drawn for one request, with the log-probability each was drawn with (temperature and truncation as
    sampled: log-probabilities are of the temperature-scaled distribution before top-p and top-k) and the version of the
    policy that drew it. `finish_reason`: stop, length or interrupted."""

    request_id: int
    token_ids: list[int]
    log_probs: list[float]
    versions: list[int]
    finish_reason: str


@runtime_checkable
class InferenceEngine(Protocol):
    """One replica of a model that generates.

    Training calls `advance` again and again: the engine holds requests from one call to the next, so that a new one
    takes the place of one that has ended while the others go on. `withdraw` empties it, before its weights change.
    """

    def initialize(self) -> None: ...

    def advance(
        self, requests: list[GenerationRequest], interrupted: Callable[[], bool] | None = None
    ) -> list[Completion]:
        """Take `requests` up beside those that the engine holds, and continue all until at least one ends.

        Args:
            requests: new ones; whatever is wrong with one of them is a ValueError before any is taken up.
            interrupted: asked after every token of each: when it says yes, the call returns, perhaps with nothing.

        Returns:
            What has ended (stop or length), in the order in which it did. The rest stays with the engine.
        """

    def withdraw(self) -> list[Completion]:
        """Give up the requests that the engine holds: what each has, "interrupted". Keys and values are dropped."""

    def generate(
        self, requests: list[GenerationRequest], interrupted: Callable[[], bool] | None = None
    ) -> list[Completion]:
        """Continue every request to its end; in the order of `requests`. `interrupted` is asked before each token: when
        it says yes, unfinished requests come back with what they have and `finish_reason` "interrupted". RuntimeError
        while the engine holds requests."""

    def update_weights(self, bucket: WeightBucket) -> None:
        """Replace some weights, or their adapters. Unknown names, missing shapes: ValueError naming the tensor.
        RuntimeError while the engine holds requests: their keys and values are of the old weights."""

    def finish_update(self, version: int) -> None:
        """All buckets of an update have come: tokens carry `version` from now on. ValueError: a weight is missing."""

    def close(self) -> None: ...
