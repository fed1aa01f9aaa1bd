"""Weights on their way out, to the rollout engine and into a folder (`engines/megatron/{weights,bridges/mbridge}.py`).

A rank that holds whole tensors copies them to the host as they are. Otherwise it exports one parameter at a time: its
shards are gathered over tensor ranks and put together, twice the whole tensor. One expert is put together over expert
tensor ranks and gathered over the e expert ranks: (e + 1) whole experts and, where it was split, one more. A
bucket of 256 MiB is filled on the host.
"""

from __future__ import annotations

from areal_like.alloc import ModelAllocation
from areal_like.spec.memory.job import MemoryJob
from areal_like.spec.memory.trained import largest_adapter
from areal_like.spec.model import ModelSpec

__all__ = ["BUCKET", "SHARD", "export_buffers", "largest_tensor"]

BUCKET = 256 * 2**20
"""As `engines.megatron.weights.BUCKET_BYTES`; a test compares them."""
SHARD = 4 * 2**30
"""As `engines.megatron.weights.SHARD_BYTES`: a file of a saved folder."""


def export_buffers(spec: ModelSpec, allocation: ModelAllocation, job: MemoryJob) -> int:
    """Bytes on the GPU beside the weights while they are exported, at the most."""
    if job.lora is not None:  # adapters alone travel
        return 2 * largest_adapter(spec, job) if allocation.tp * allocation.etp > 1 else 0
    tensors = [0]
    if allocation.tp > 1:
        tensors.append(2 * largest_tensor(spec, job))
    expert = 2 * spec.moe_intermediate_size * spec.hidden_size * job.element
    if spec.is_moe and allocation.ep * allocation.etp > 1:
        copies = (allocation.ep + 1 if allocation.ep > 1 else 1) + (allocation.etp > 1)
        tensors.append(copies * expert)
    return max(tensors)


def largest_tensor(spec: ModelSpec, job: MemoryJob) -> int:
    """Bytes of the largest whole tensor other than experts."""
    padded_embedding = spec.vocab_size * spec.hidden_size
    gate_up = 0 if spec.is_moe else 2 * spec.intermediate_size * spec.hidden_size
    return max(padded_embedding, gate_up) * job.element
