"""What each rank holds of gradients and optimizer states: buffers laid out as Megatron-Core does it. Exact integers.

The distributed optimizer lays a rank's parameters end to end in buckets, last parameter first, and gives each
data-parallel rank an equal slice (Megatron-Core 0.19, `DistributedOptimizer._compute_per_buffer_param_layout`).
Each module of a rank (one, or with virtual stages v) has buffers of its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from areal_like.alloc import ModelAllocation
from areal_like.spec.model import ModelSpec
from areal_like.spec.shards import ParameterShard, Split, chunk_parameters, has_expert_buffer

__all__ = ["Buffer", "buffers", "optimizer_elements"]

_ALIGNMENT = 64
"""Elements: where a parameter may start in a bucket of the distributed optimizer."""
_BUCKET_END = 128
"""Elements: a bucket ends at a multiple of this and of the data-parallel size."""


@dataclass(frozen=True)
class Buffer:
    """Parameters that are reduced together.

    Attributes:
        expert: reduced over the expert-data-parallel ranks instead of the data-parallel (and context) ones.
        shards: data-parallel ranks that share the optimizer's work.
        buckets: (start, end) in elements, padding included.
        spans: (start, end) of each parameter.
    """

    expert: bool
    shards: int
    buckets: tuple[tuple[int, int], ...]
    spans: tuple[tuple[int, int], ...]

    @property
    def elements(self) -> int:
        """Size of the parameter and of the gradient buffer, padding included."""
        return self.buckets[-1][1] if self.buckets else 0

    def owned(self, index: int) -> int:
        """Elements of parameters whose optimizer state data-parallel rank `index` keeps."""
        total = 0
        for start, end in self.buckets:
            size = (end - start) // self.shards
            low, high = start + index * size, start + (index + 1) * size
            total += sum(max(0, min(high, b) - max(low, a)) for a, b in self.spans)
        return total


def buffers(
    spec: ModelSpec,
    allocation: ModelAllocation,
    rank: int,
    *,
    distributed: bool = True,
    bucket_size: int | None = None,
    layout: Split = None,
) -> tuple[Buffer, ...]:
    """The buffers of a rank's parameters and gradients.

    Args:
        distributed: the optimizer shards its state (buckets are padded then).
        bucket_size: elements after which a bucket ends; None (no overlap): one bucket. Only the first module of
            the first stage has several.
    """
    on_first_stage = allocation.mesh().coordinates(rank).pp == 0
    apart = has_expert_buffer(spec, allocation)
    groups = [(False, allocation.dp * allocation.cp), (True, allocation.edp)] if apart else []
    found = []
    for number, parameters in enumerate(chunk_parameters(spec, allocation, rank, layout)):
        limit = bucket_size if on_first_stage and number == 0 else None
        for expert, shards in groups or [(False, allocation.dp * allocation.cp)]:
            members = [p for p in parameters if not apart or (p.kind == "expert") == expert]
            if members:
                found.append(_lay_out(members, expert, shards if distributed else 1, distributed, limit))
    return tuple(found)


def optimizer_elements(
    spec: ModelSpec,
    allocation: ModelAllocation,
    rank: int,
    *,
    distributed: bool = True,
    bucket_size: int | None = None,
    layout: Split = None,
) -> int:
    """Elements whose optimizer state a rank keeps: of each of Adam's moments, and of the float32 copy of 16 bits."""
    mesh = allocation.mesh()
    total = 0
    for buffer in buffers(spec, allocation, rank, distributed=distributed, bucket_size=bucket_size, layout=layout):
        index = mesh.group("edp" if buffer.expert else "dp-cp", rank).index(rank) if distributed else 0
        total += buffer.owned(index)
    return total


def _lay_out(
    parameters: Sequence[ParameterShard], expert: bool, shards: int, padded: bool, bucket_size: int | None
) -> Buffer:
    """Last parameter first; a bucket ends when it is full, and around a shared embedding."""
    divisor = math.lcm(shards, _BUCKET_END) if padded else 1
    alignment = _ALIGNMENT if padded else 1
    buckets: list[tuple[int, int]] = []
    spans: list[tuple[int, int]] = []
    at = bucket_start = 0
    is_open = False

    def close(end: int) -> int:
        end = _round_up(end, divisor)
        buckets.append((bucket_start, end))
        return end

    for parameter in reversed(parameters):
        at = _round_up(at, alignment)
        alone = parameter.shared and padded
        if alone and is_open:
            at = bucket_start = close(at)
        spans.append((at, at + parameter.elements))
        at += parameter.elements
        is_open = True
        if alone or (bucket_size is not None and at - bucket_start >= bucket_size):
            at = bucket_start = close(at)
            is_open = False
    if is_open:
        close(at)
    return Buffer(expert, shards, tuple(buckets), tuple(spans))


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
