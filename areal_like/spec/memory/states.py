"""Weights, gradients and optimizer state: what lives as long as the model.

    weights     b a parameter                   b = 2 in bfloat16 and float16, 4 in float32; views of one buffer
                + 2 a parameter of a product    FP8: two copies for the products (rows and columns), kept over the step;
                                                with `fp8_config.param` they take the place of the b bytes
    gradients   4 a trained parameter           (b when `grad_reduce_in_fp32` is off); one buffer, not sharded
    optimizer   12 a trained parameter / dp     b = 2 with Adam: float32 copy 4, first and second moment 4 + 4
                10 a trained parameter / dp     the same with `use_precision_aware_optimizer`: 2 beside the parameter
                                                instead of the copy; a moment in bfloat16 saves 2 more
                 8 a trained parameter / dp     b = 4 with Adam: the parameter itself is the float32 copy
                 4 a trained parameter          b = 2 with SGD (no momentum, not sharded); 0 in float32

With adapters only they are trained (`trained.py`): the model's own parameters have neither gradient nor state, and b is
`lora_dtype`. dp is d x c for everything but experts in groups of their own (`shards.has_expert_buffer`), which have
dp = edp. Source: Megatron-Core 0.19 `_ParamAndGradBuffer`, `DistributedOptimizer`; TransformerEngine 2.11
`get_weight_workspace`. The sizes are those of ZeRO stage 1 (arXiv 1910.02054, section 3) except that gradients stay
whole in one float32 buffer. Padding of the buffers (at most 63 elements a parameter) is left out here; `spec.buffers`
has it.
"""

from __future__ import annotations

from areal_like.alloc import ModelAllocation
from areal_like.spec.memory.job import MOMENT_BYTES, MemoryJob
from areal_like.spec.memory.trained import Trained
from areal_like.spec.model import ModelSpec
from areal_like.spec.shards import StageCounts, has_expert_buffer

__all__ = [
    "fp8_copies",
    "gradients",
    "load_transient",
    "main_copy",
    "main_gradients",
    "moments_in_float32",
    "optimizer",
    "weights",
]

FP8_COPIES = 2
"""Bytes of a weight in FP8: once by rows, once by columns, since FP8 products take their second matrix transposed."""


def weights(spec: ModelSpec, counts: StageCounts, job: MemoryJob, held: Trained) -> int:
    """Bytes of a rank's parameters, adapters included."""
    adapters = 0 if job.lora is None else held.total * held.element
    in_fp8 = _in_products(spec, counts) if job.fp8_param else 0
    return (counts.total - in_fp8) * job.element + in_fp8 * FP8_COPIES + adapters


def fp8_copies(spec: ModelSpec, counts: StageCounts, job: MemoryJob) -> int:
    """Bytes of the FP8 copies of weights that are themselves not FP8."""
    return 0 if job.fp8 is None or job.fp8_param else _in_products(spec, counts) * FP8_COPIES


def gradients(held: Trained, job: MemoryJob) -> int:
    """Bytes of a rank's gradient buffer."""
    return held.total * (4 if job.grad_reduce_in_fp32 else held.element)


def optimizer(spec: ModelSpec, allocation: ModelAllocation, held: Trained, job: MemoryJob) -> int:
    """Bytes of a rank's optimizer state, on the data-parallel rank that has the most."""
    moments = MOMENT_BYTES[job.exp_avg] + MOMENT_BYTES[job.exp_avg_sq] if job.optimizer == "adam" else 0
    return main_copy(spec, allocation, held, job) + _shard(spec, allocation, held, job) * moments


def main_copy(spec: ModelSpec, allocation: ModelAllocation, held: Trained, job: MemoryJob) -> int:
    """Bytes of the float32 copies that the optimizer updates, or of what it keeps of them beside the parameters."""
    return 0 if held.element == 4 else _shard(spec, allocation, held, job) * (2 if job.precision_aware else 4)


def main_gradients(spec: ModelSpec, allocation: ModelAllocation, held: Trained, job: MemoryJob) -> int:
    """Bytes of the float32 gradients that a step makes from a 16-bit buffer; 0 where the buffer is float32 or the
    optimizer reads it as it is."""
    as_it_is = job.grad_reduce_in_fp32 or held.element == 4 or job.precision_aware
    return 0 if as_it_is else _shard(spec, allocation, held, job) * 4


def moments_in_float32(spec: ModelSpec, allocation: ModelAllocation, held: Trained, job: MemoryJob) -> int:
    """Bytes of the float32 copies of 16-bit moments that a step works on, all of one group of parameters at once
    (FusedAdam); experts in groups of their own are a group."""
    reduced = sum(4 for dtype in (job.exp_avg, job.exp_avg_sq) if dtype != "float32") if job.optimizer == "adam" else 0
    if not has_expert_buffer(spec, allocation):
        return _shard(spec, allocation, held, job) * reduced
    rest = -(-(held.total - held.expert) // (allocation.dp * allocation.cp))
    return max(rest, -(-held.expert // allocation.edp)) * reduced


def load_transient(held: Trained) -> int:
    """Bytes of the trained parameters as they were built, until the buffer takes their place."""
    return held.total * held.element


def _in_products(spec: ModelSpec, counts: StageCounts) -> int:
    """Numbers of the matrices in layers, which FP8 products take; norms and routers, some thousandths, count too."""
    return counts.dense + counts.expert


def _shard(spec: ModelSpec, allocation: ModelAllocation, held: Trained, job: MemoryJob) -> int:
    """Elements whose state this rank keeps."""
    if not job.distributed_optimizer or job.optimizer == "sgd":  # Megatron shards no optimizer without state
        return held.total
    dp = allocation.dp * allocation.cp
    if not has_expert_buffer(spec, allocation):
        return -(-held.total // dp)
    return -(-(held.total - held.expert) // dp) + -(-held.expert // allocation.edp)
