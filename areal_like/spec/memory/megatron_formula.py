"""What Megatron-LM's own formula says, to stand beside ours: `megatron/training/theoretical_memory_usage.py`.

Written down from what it computes; nothing of Megatron is imported. It looks at the fullest rank of the first stage.

    parameters   (block / p + V h [+ V h when untied and p = 1]) / t
                 block: per layer 2 h^2 (1 + g/a) (a n / h) + 2 h (1.5 f E + 1), and the final norm
    bytes        18 a parameter, or 6 + 12 / d with the distributed optimizer
    activations  with sequence parallelism and selective recompute (arXiv 2205.05198, table 2):
                 T h (18 + 4 f/h) L + 8 T p + T h p, x min(1, micro-batches / p) when p > 1,
                 + 4 T h (1 + V/h) when p = 1, all / t
                 otherwise: T h (10 + 24/t) L + 8 T p + T h p, x as above, + 2 (T V/t + T h) when p = 1, all x 1.05

E is the number of experts, not divided by e. Experts' activations, full recompute, context parallelism, uneven
stages and float32 temporaries are not in it.
"""

from __future__ import annotations

from areal_like.alloc import ModelAllocation
from areal_like.spec.memory.job import MemoryJob
from areal_like.spec.model import ModelSpec

__all__ = ["megatron_estimate"]


def megatron_estimate(spec: ModelSpec, allocation: ModelAllocation, job: MemoryJob) -> int:
    """Bytes of weights, optimizer and activations by Megatron-LM's formula."""
    return round(_states(spec, allocation, job) + _activations(spec, allocation, job))


def _states(spec: ModelSpec, allocation: ModelAllocation, job: MemoryJob) -> float:
    h, heads = spec.hidden_size, spec.num_attention_heads
    attention = 2 * h * h * (1 + spec.num_key_value_heads / heads) * (spec.head_dim * heads / h)
    width = spec.moe_intermediate_size * spec.num_experts if spec.is_moe else spec.intermediate_size
    block = spec.num_layers * (attention + 2 * h * (1.5 * width + 1)) + h
    table = h * _padded_vocabulary(spec, allocation)
    parameters = block / allocation.pp + table
    if not spec.tied_embeddings and allocation.pp == 1:
        parameters += table
    each = 6 + 12 / allocation.dp if job.distributed_optimizer else 18
    return parameters / allocation.tp * each


def _activations(spec: ModelSpec, allocation: ModelAllocation, job: MemoryJob) -> float:
    tokens, h, pp, tp = job.micro_tokens, spec.hidden_size, allocation.pp, allocation.tp
    vocabulary = _padded_vocabulary(spec, allocation)
    by_paper = job.recompute == "selective" and tp > 1
    layer = tokens * h * (18 + 4 * spec.intermediate_size / h if by_paper else 10 + 24 / tp)
    total = layer * spec.num_layers + 8 * tokens * pp + tokens * h * pp
    if allocation.vpp > 1:
        total *= 1 + (pp - 1) / (pp * allocation.vpp)
    elif pp > 1:
        total *= min(1, job.micro_batches / pp)
    if by_paper:
        return (total + (4 * tokens * h * (1 + vocabulary / h) if pp == 1 else 0)) / tp
    return (total + (2 * (tokens * vocabulary / tp + tokens * h) if pp == 1 else 0)) * 1.05


def _padded_vocabulary(spec: ModelSpec, allocation: ModelAllocation) -> int:
    return -(-spec.vocab_size // allocation.tp) * allocation.tp
