"""Layouts of a rollout engine beside a trainer, and the ways to share GPUs between the two."""

from __future__ import annotations

from dataclasses import dataclass

from areal_like.alloc import ModelAllocation, get_backend
from areal_like.preflight.enumeration import Layout, divisors
from areal_like.preflight.generation_cost import GenerationCost, generation_cost
from areal_like.preflight.hardware import Hardware
from areal_like.preflight.legality import check_layout
from areal_like.spec import ModelSpec

__all__ = ["RolloutPlan", "rollout_plans", "shares"]

MOST_SHARES = 8
"""A cluster is cut into at most this many equal parts."""


@dataclass(frozen=True)
class RolloutPlan:
    """The rollout side of a plan."""

    allocation: ModelAllocation
    cost: GenerationCost


def shares(gpus: int, gpus_per_node: int) -> list[tuple[int, int]]:
    """(GPUs that train, GPUs that generate), in whole nodes when there are several."""
    unit = gpus_per_node if gpus >= 2 * gpus_per_node and gpus % gpus_per_node == 0 else 1
    parts = gpus // unit
    step = -(-parts // MOST_SHARES)
    return [(part * unit, gpus - part * unit) for part in range(step, parts, step)]


def rollout_plans(
    spec: ModelSpec, gpus: int, hardware: Hardware, *, backend: str, sequences: int, sequence_length: int
) -> list[RolloutPlan]:
    """Legal layouts of `gpus` ranks that hold the weights and at least one sequence, fastest first."""
    letters = get_backend(backend).letters
    found = []
    for p in divisors(gpus) if "p" in letters else (1,):
        for t in divisors(gpus // p) if "t" in letters else (1,):
            if p > spec.num_layers or t > hardware.gpus_per_node or (p > 1 and t < hardware.gpus_per_node):
                continue  # stages only where a node is too small: each adds latency and no bandwidth
            allocation = Layout(gpus // (t * p), t, p, 1, 1, 1, 1).allocation(backend)
            if any(d.severity == "error" for d in check_layout(allocation, spec)):
                continue
            cost = generation_cost(spec, allocation, hardware, sequences=sequences, sequence_length=sequence_length)
            if cost is not None:
                found.append(RolloutPlan(allocation, cost))
    return sorted(found, key=lambda plan: (plan.cost.seconds, plan.allocation.tp))
