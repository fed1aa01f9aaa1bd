"""Every communicator is used once at the start.

NCCL makes a communicator when its group is first used, which takes from a tenth of a second to many seconds, and it is
then that a broken link shows. Here that is before the weights are read, with the group and its ranks in the message,
instead of somewhere in the first step.
"""

from __future__ import annotations

import datetime
import time
from typing import Any

import torch
import torch.distributed as dist

from areal_like.engines.megatron.process_groups import ModelGroups

__all__ = ["CommunicationError", "distinct_groups", "warm_up", "warm_up_neighbours"]

PATIENCE = datetime.timedelta(minutes=5)
"""For the slowest rank to arrive: all have just created the same groups."""


class CommunicationError(RuntimeError):
    """Ranks of a group cannot talk to each other."""


def distinct_groups(groups: ModelGroups) -> dict[str, dist.ProcessGroup]:
    """The groups of this rank, each once, under the names that Megatron-Core has for it ("tp, expt_tp")."""
    found: dict[dist.ProcessGroup, list[str]] = {}
    for name, group in vars(groups.collection).items():
        if isinstance(group, dist.ProcessGroup):
            found.setdefault(group, []).append(name)
    return {", ".join(names): group for group, names in found.items()}


def warm_up(groups: ModelGroups, device: torch.device, *, patience: datetime.timedelta = PATIENCE) -> float:
    """Sum a one over every group, on the device and on the host (objects travel that way). Collective.

    Groups of one rank are not left out: NCCL has a communicator for them too.

    Returns:
        Seconds that it took.

    Raises:
        CommunicationError: naming the group.
    """
    started = time.perf_counter()
    for names, group in distinct_groups(groups).items():
        for place in {device, torch.device("cpu")}:
            _sum_of_ones(names, group, place, patience)
    return time.perf_counter() - started


def warm_up_neighbours(communicator: Any, groups: ModelGroups, device: torch.device, dtype: torch.dtype) -> None:
    """Pass this rank's stage on to both neighbours, as Megatron's `P2PCommunicator` passes activations on. Collective.

    Raises:
        CommunicationError: naming the neighbour.
    """
    pp = groups.collection.pp
    stage, stages = pp.rank(), pp.size()
    own = torch.full((1, 1, 1), float(stage), device=device, dtype=dtype)
    try:
        before = communicator.send_forward_recv_forward(own, True, own.shape)
        after = communicator.send_backward_recv_backward(own, True, own.shape)
    except Exception as error:
        raise CommunicationError(
            f"pipeline stage {stage} cannot reach its neighbours ({_members(pp)}): {error}"
        ) from error
    for received, neighbour in ((before, (stage - 1) % stages), (after, (stage + 1) % stages)):
        if float(received) != neighbour:
            rank = dist.get_global_rank(pp, neighbour)
            raise CommunicationError(f"stage {stage} received {float(received)} from stage {neighbour} (rank {rank})")


def _sum_of_ones(names: str, group: dist.ProcessGroup, place: torch.device, patience: datetime.timedelta) -> None:
    one = torch.ones(1, device=place)
    try:
        work: Any = dist.all_reduce(one, group=group, async_op=True)
        work.wait(patience)
        total = float(one)
    except Exception as error:
        raise CommunicationError(
            f"the group {names} does not communicate on {place.type} ({_members(group)}): {error}"
        ) from error
    if total != group.size():
        raise CommunicationError(
            f"the group {names} ({_members(group)}) sums {group.size()} ones to {total} on {place.type}"
        )


def _members(group: dist.ProcessGroup) -> str:
    return "ranks " + ", ".join(map(str, dist.get_process_group_ranks(group)))
