"""The random states of a rank in a checkpoint: torch's, CUDA's, and those of Megatron-Core's tracker."""

from __future__ import annotations

from typing import Any

from megatron.core.dist_checkpointing import ShardedObject

from areal_like.engines.megatron.process_groups import ModelGroups
from areal_like.engines.megatron.random_states import RandomStates

__all__ = ["go_on", "sharded_random", "start_anew"]


def sharded_random(groups: ModelGroups, states: RandomStates | None = None) -> ShardedObject:
    """The states of this rank, or room for them; one entry for each rank of the layout."""
    data: dict[str, Any] | None = None
    if states is not None:
        with states:
            data = states.capture()
    return ShardedObject("random", data, (groups.mesh.world_size,), (groups.rank,))


def go_on(states: RandomStates, saved: dict[str, Any]) -> bool:
    """Go on where a rank in the same place stood; False when it ran on another kind of device."""
    if ("cuda" in saved) != (states.device.type == "cuda"):
        return False
    states.own = saved
    return True


def start_anew(states: RandomStates, groups: ModelGroups, seed: int, step: int) -> None:
    """Under another layout the states of the ranks mean nothing: new ones that repeat no earlier number."""
    with states:
        states.seed(seed + 1_000_003 * step, groups)
