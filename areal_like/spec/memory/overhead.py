"""Memory that no tensor of the model accounts for, as named constants.

Inside PyTorch's allocator (counted in `torch.cuda.max_memory_allocated`): workspaces of matrix products and the batch.
Outside it: the CUDA context with the code of all kernels, and NCCL's buffers. The latter two depend on driver and
library versions; they are round figures that err on the large side.
"""

from __future__ import annotations

from areal_like.alloc import ModelAllocation
from areal_like.spec.memory.job import MemoryJob
from areal_like.spec.model import ModelSpec

__all__ = ["COMMUNICATOR", "CUDA_CONTEXT", "batch", "communicators", "dummy_gradients", "workspaces"]

MIB = 2**20
CUDA_CONTEXT = 600 * MIB
"""Of one process on an H100 or H200 with torch, cuDNN and TransformerEngine loaded."""
COMMUNICATOR = 256 * MIB
"""Of one NCCL communicator of several GPUs: channels and proxies."""
GROUPED_STREAMS = 4
"""Streams over which TransformerEngine spreads grouped products, a workspace each."""
BATCH_BYTES = 48
"""A token of a rank's batch on the GPU: ids, positions and labels in int64, masks, advantages and log-probabilities."""


def workspaces(spec: ModelSpec, job: MemoryJob) -> int:
    """TransformerEngine's (32 MiB from Hopper on, else 4; four more for grouped products) and torch's cuBLAS workspaces
    (32 MiB from Hopper on, else 8.125), which torch keeps one of for the forward and one for the backward thread."""
    own = 32 * MIB if job.hopper else 4 * MIB
    torch_own = 32 * MIB if job.hopper else 8 * MIB + MIB // 8
    grouped = GROUPED_STREAMS if spec.is_moe and not job.grouped_products else 0
    engine = own * (1 + grouped) if job.transformer_engine else 0
    return engine + torch_own * (1 if job.optimizer is None else 2)


def dummy_gradients(spec: ModelSpec, allocation: ModelAllocation, job: MemoryJob) -> int:
    """Where products add gradients to the buffer autograd gets a dummy: one for each shape of a weight, kept for good
    (TransformerEngine 2.11 `get_dummy_wgrad`). Grouped products need none."""
    if not job.fuses_gradients:
        return 0
    tp, hidden = allocation.tp, spec.hidden_size
    queries = spec.num_attention_heads * spec.head_dim // tp
    keys = spec.num_key_value_heads * spec.head_dim // tp
    shapes = {(queries + 2 * keys, hidden), (hidden, queries)}
    widths = {spec.intermediate_size // tp} if not spec.is_moe or spec.dense_layers else set()
    if spec.is_moe:
        widths |= {spec.shared_expert_intermediate_size // tp}
        widths |= set() if job.grouped_products else {spec.moe_intermediate_size // allocation.etp}
    for width in widths - {0}:
        shapes |= {(2 * width, hidden), (hidden, width)}
    return sum(rows * columns for rows, columns in shapes) * job.element


def batch(spec: ModelSpec, job: MemoryJob) -> int:
    """The rank's tokens, and the float32 rotary angles of the longest sequence."""
    return BATCH_BYTES * job.micro_tokens * job.micro_batches + 4 * job.seq * spec.head_dim


def communicators(*sizes: int) -> int:
    """NCCL's buffers: a communicator for the world and for each dimension with more than one rank."""
    larger = sum(size > 1 for size in sizes)
    return COMMUNICATOR * (1 + larger) if larger else 0
