"""Memory of a layout as far as the planner needs it: a quick lower bound that drops most, and the full prediction."""

from __future__ import annotations

from areal_like.alloc import ModelAllocation
from areal_like.preflight.enumeration import Layout
from areal_like.preflight.hardware import Hardware
from areal_like.preflight.stages import stage_terms
from areal_like.preflight.step_job import StepJob
from areal_like.spec import ModelSpec
from areal_like.spec.memory import MemoryJob, predict

__all__ = ["least_memory", "peak_memory"]

HELD = 2 + 4
"""Bytes a rank keeps for each of its parameters: bf16 parameter, float32 gradient."""
SHARD = 12
"""Bytes for each parameter whose optimizer state it keeps: float32 master copy and two moments."""
CAUTION = 0.95
"""The bound is lowered by what its sums neglect or round up."""


def least_memory(spec: ModelSpec, layout: Layout, job: StepJob) -> float:
    """A bound from below, in bytes, on the peak of the fullest rank.

    It counts parameters, gradients, optimizer state, the largest of the activations that the backward pass needs, and
    one bf16 slab of logits.
    """
    terms = stage_terms(spec, job.sequence_length, layout.pp, layout.vpp)
    micro_batches, tokens = job.micro_batches(layout), job.tokens(layout)
    local = tokens / (layout.tp * layout.cp)
    expert_replicas = layout.dp * layout.cp * layout.tp // (layout.ep * layout.etp)
    # What a layer saves: its inputs and norms; gate, up and product of the MLP, or of the experts with their rows.
    row = 2 * local * spec.hidden_size
    dense = 4 * row + 2 * local * 3 * spec.intermediate_size
    routed = spec.experts_per_token * (layout.etp * row + 2 * local * 3 * spec.moe_intermediate_size)
    fullest = 0.0
    for rank, stage in enumerate(terms):
        cut, experts = stage.parameters(layout)
        held = (cut + experts) * HELD + (cut / (layout.dp * layout.cp) + experts / expert_replicas) * SHARD
        in_flight = min(micro_batches, layout.pp - rank)
        mixed = stage.moe_layers * (4 * row + routed) + (stage.layers - stage.moe_layers) * dense
        held += in_flight * (stage.layers * row if job.recompute else mixed)
        held += mixed / stage.layers if job.recompute else 0.0
        slab = 2 * tokens / layout.cp * spec.vocab_size / layout.tp if stage.head else 0.0
        fullest = max(fullest, held, held - mixed / stage.layers + slab if job.recompute else held + slab)
    return CAUTION * fullest


def peak_memory(spec: ModelSpec, allocation: ModelAllocation, job: StepJob, hardware: Hardware) -> int:
    """Bytes of the fullest GPU of the trainer at its fullest moment, by `spec.memory`."""
    return predict(
        spec,
        allocation,
        MemoryJob(
            micro_tokens=job.largest_micro_batch(allocation),
            seq=job.sequence_length,
            micro_batches=job.micro_batches(allocation),
            recompute="full" if job.recompute else "none",
            hopper=hardware.name != "A100",
            gpus_per_node=hardware.gpus_per_node,
        ),
    ).peak
