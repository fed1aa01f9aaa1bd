"""Weights, gradients and optimizer state: what lives as long as the model.

    weights     b a parameter                   b = 4 in float32, else 2; they are views of one buffer
    gradients   4 a parameter                   (b when `grad_reduce_in_fp32` is off); one buffer, not sharded
    optimizer   12 a parameter / dp             16 bits with Adam: float32 copy 4, first and second moment 4 + 4
                 8 a parameter / dp             float32 with Adam: the parameter itself is the float32 copy
                 4 a parameter                  16 bits with SGD (no momentum, not sharded); 0 in float32

dp is d x c for everything but experts in groups of their own (`shards.has_expert_buffer`), which have dp = edp. Source:
Megatron-Core 0.19 `_ParamAndGradBuffer`, `DistributedOptimizer`; the sizes are those of ZeRO stage 1 (arXiv 1910.02054,
section 3) except that gradients stay whole in one float32 buffer. Padding of the buffers (at most 63 elements a
parameter) is left out here; `shards.buffers` has it.
"""

from __future__ import annotations

from areal_like.alloc import ModelAllocation
from areal_like.spec.memory.job import MemoryJob
from areal_like.spec.model import ModelSpec
from areal_like.spec.shards import StageCounts, has_expert_buffer

__all__ = ["gradients", "load_transient", "main_gradients", "optimizer", "weights"]


def weights(counts: StageCounts, job: MemoryJob) -> int:
    """Bytes of a rank's parameters."""
    return counts.total * job.element


def gradients(counts: StageCounts, job: MemoryJob) -> int:
    """Bytes of a rank's gradient buffer; 0 for a model that is not trained."""
    if job.optimizer is None:
        return 0
    return counts.total * (4 if job.grad_reduce_in_fp32 else job.element)


def optimizer(spec: ModelSpec, allocation: ModelAllocation, counts: StageCounts, job: MemoryJob) -> int:
    """Bytes of a rank's optimizer state, on the data-parallel rank that has the most."""
    if job.optimizer is None:
        return 0
    main_copy = 4 if job.dtype != "float32" else 0
    each = main_copy + (8 if job.optimizer == "adam" else 0)
    return _shard(spec, allocation, counts, job) * each


def main_gradients(spec: ModelSpec, allocation: ModelAllocation, counts: StageCounts, job: MemoryJob) -> int:
    """Bytes of the float32 gradients that a step makes from a 16-bit buffer; 0 where the buffer is float32."""
    if job.optimizer is None or job.grad_reduce_in_fp32 or job.dtype == "float32":
        return 0
    return _shard(spec, allocation, counts, job) * 4


def load_transient(counts: StageCounts, job: MemoryJob) -> int:
    """Bytes of the parameters as they were built, until the buffer takes their place."""
    return 0 if job.optimizer is None else weights(counts, job)


def _shard(spec: ModelSpec, allocation: ModelAllocation, counts: StageCounts, job: MemoryJob) -> int:
    """Elements whose state this rank keeps."""
    if not job.distributed_optimizer or job.optimizer == "sgd":  # Megatron shards no optimizer without state
        return counts.total
    dp = allocation.dp * allocation.cp
    if not has_expert_buffer(spec, allocation):
        return -(-counts.total // dp)
    return -(-(counts.total - counts.expert) // dp) + -(-counts.expert // allocation.edp)
