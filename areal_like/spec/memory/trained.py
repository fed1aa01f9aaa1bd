"""Which of a rank's numbers are trained: all of the model, or adapters beside a model that stays as it is."""

from __future__ import annotations

from typing import NamedTuple

from areal_like.alloc import ModelAllocation
from areal_like.spec.lora import adapter_elements, adapter_matrices
from areal_like.spec.memory.job import MemoryJob
from areal_like.spec.model import ModelSpec
from areal_like.spec.shards import RankClass

__all__ = ["Trained", "largest_adapter", "trained"]


class Trained(NamedTuple):
    """Numbers of a rank that have gradients, `expert` those of experts, and bytes of each."""

    total: int
    expert: int
    element: int


def trained(spec: ModelSpec, allocation: ModelAllocation, ranks: RankClass, job: MemoryJob) -> Trained:
    """What gradients and optimizer are for; nothing for a model without optimizer."""
    if job.optimizer is None:
        return Trained(0, 0, job.element)
    if job.lora is None:
        return Trained(ranks.counts.total, ranks.counts.expert, job.element)
    layers = [layer for part in ranks.layers for layer in part]
    found = adapter_elements(spec, allocation, job.lora.targets, job.lora.rank, layers)
    return Trained(found.total, found.experts, job.lora.element)


def largest_adapter(spec: ModelSpec, job: MemoryJob) -> int:
    """Bytes of A and B of the largest whole adapter."""
    assert job.lora is not None
    matrices = adapter_matrices(spec, job.lora.targets, layers=(0, spec.typical_layer))
    return max(matrix.inputs + matrix.outputs for matrix in matrices) * job.lora.rank * job.lora.element
