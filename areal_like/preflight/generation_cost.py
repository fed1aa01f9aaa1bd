"""How long generation takes under a rollout layout, roughly: enough to share GPUs between trainer and rollout.

Decoding reads all weights and the keys and values of every sequence for each token (Pope et al. 2022, "Efficiently
Scaling Transformer Inference", section 2); long prompts and the engine's own overheads are not modelled, and no engine
has been measured beside it.
"""

from __future__ import annotations

from dataclasses import dataclass

from areal_like.alloc import ModelAllocation
from areal_like.preflight.cost import ACTIVATION, COLLECTIVE_LATENCY, LINK_EFFICIENCY, MATMUL_EFFICIENCY
from areal_like.preflight.hardware import GIB, Hardware
from areal_like.spec import ModelSpec
from areal_like.spec.memory import MemoryJob
from areal_like.spec.memory.kv_cache import rollout_weights, sequence_bytes

__all__ = ["GenerationCost", "generation_cost"]

READ_EFFICIENCY = 0.7
"""Share of the memory bandwidth that decoding kernels reach. An assumption."""
MEMORY_SHARE = {"huggingface": 0.5}
"""Part of the memory free of weights that a backend gives to keys and values, where it is not OTHER_SHARE."""
OTHER_SHARE = 0.9
"""SGLang's and vLLM's default is about this."""
WORKSPACE = 3 * GIB
"""Bytes of it for activations and captured graphs. An assumption."""


@dataclass(frozen=True)
class GenerationCost:
    """Generation of all sequences of a step.

    Attributes:
        seconds: for all.
        concurrent: sequences that one replica generates at once, as many as the cache holds.
        weights: bytes of weights on a GPU.
        cache: bytes of keys and values on a GPU when `concurrent` sequences have their full length.
    """

    seconds: float
    concurrent: int
    weights: float
    cache: float


def generation_cost(
    spec: ModelSpec, allocation: ModelAllocation, hardware: Hardware, *, sequences: int, sequence_length: int
) -> GenerationCost | None:
    """Cost of generating `sequences` of `sequence_length` tokens; None when not one fits into memory."""
    job = MemoryJob(micro_tokens=sequence_length, seq=sequence_length)
    weights, cache = rollout_weights(spec, allocation, job), sequence_bytes(spec, allocation, job)
    share = MEMORY_SHARE.get(allocation.backend, OTHER_SHARE)
    room = share * (hardware.memory - weights) - WORKSPACE
    each = -(-sequences // allocation.dp)
    concurrent = min(each, int(room // cache))
    if concurrent < 1:
        return None
    # Every stage of a pipeline reads its part of the cache for each token; on average sequences are half done.
    step = _decode_step(spec, allocation, hardware, concurrent, cache * allocation.pp / 2)
    waves = each / concurrent
    return GenerationCost(step * sequence_length * waves, concurrent, weights, concurrent * cache)


def _decode_step(spec: ModelSpec, sizes: ModelAllocation, hardware: Hardware, concurrent: int, cache: float) -> float:
    """Seconds in which `concurrent` sequences advance one token; `cache` is the bytes read for each of them."""
    routed = sum(spec.layer_breakdown(layer).experts for layer in range(spec.num_layers))
    touched = 1 - (1 - spec.experts_per_token / spec.num_experts) ** concurrent if spec.is_moe else 1.0
    read = (spec.parameters() - routed * (1 - touched)) * ACTIVATION / sizes.tp + concurrent * cache
    reading = read / (hardware.memory_bandwidth * READ_EFFICIENCY)
    flops = sum(spec.layer_flops(layer=layer) for layer in range(spec.num_layers)) + spec.head_flops()
    computing = concurrent * flops / sizes.tp / (hardware.flops * MATMUL_EFFICIENCY)
    if sizes.tp == 1:
        return max(reading, computing)
    link = hardware.node_bandwidth if sizes.tp <= hardware.gpus_per_node else hardware.network_bandwidth
    sent = 2 * (sizes.tp - 1) / sizes.tp * concurrent * spec.hidden_size * ACTIVATION / (link * LINK_EFFICIENCY)
    return max(reading, computing) + 2 * spec.num_layers * (COLLECTIVE_LATENCY + sent)
