"""The rollout engine: its weights, and keys and values of the sequences in generation.

    a token of keys and values   2 L ceil(g/t) n b / p        g key-value heads (repeated where t exceeds them)
                                 L (latent + rotary) b / p    latent attention, whole on every tensor rank
                                 a layer with a sliding window keeps no more than it; one of linear attention, nothing
    weights                      all parameters b / (t p)     norms counted as if they were split too

The embedded engine gives keys and values at most half of the memory that is free when a call begins
(`engines/huggingface/engine.py`), and keeps the sequences that do not fit waiting. So a cache that is smaller than all
sequences together slows generation down; it fails only where not even one sequence of the longest length fits.
"""

from __future__ import annotations

from areal_like.alloc import ModelAllocation
from areal_like.spec.memory.job import MemoryJob
from areal_like.spec.model import ModelSpec

__all__ = ["kv_cache", "rollout_weights", "sequence_bytes"]

SHARE_OF_FREE = 2
"""The cache takes at most one part in this many of what is free."""


def sequence_bytes(spec: ModelSpec, rollout: ModelAllocation, job: MemoryJob) -> int:
    """Bytes of the keys and values of the longest sequence on one GPU of the rollout engine."""
    latent = spec.latent_attention
    if latent is not None:
        each = latent.kv_lora_rank + latent.qk_rope_head_dim
    else:
        each = 2 * max(1, -(-spec.num_key_value_heads // rollout.tp)) * spec.head_dim
    sliding = len(spec.sliding_layers)
    whole = spec.num_layers - sliding - len(spec.linear_layers)
    tokens = whole * job.seq + sliding * min(job.seq, spec.sliding_window or job.seq)
    return -(-tokens * each * job.element // rollout.pp)


def rollout_weights(spec: ModelSpec, rollout: ModelAllocation, job: MemoryJob) -> int:
    """Bytes of the rollout engine's weights on one GPU."""
    return -(-spec.parameters() * job.element // (rollout.tp * rollout.pp))


def kv_cache(spec: ModelSpec, rollout: ModelAllocation, job: MemoryJob, occupied: int) -> int:
    """Bytes of keys and values: of all sequences, or as many as the engine's share of free memory holds, at least one.

    Args:
        occupied: bytes of the GPU that are taken when generation begins.
    """
    one = sequence_bytes(spec, rollout, job)
    wanted = one * job.rollout_sequences
    if job.gpu_memory is None:
        return wanted
    return max(one, min(wanted, (job.gpu_memory - occupied) // SHARE_OF_FREE))
