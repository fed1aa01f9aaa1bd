"""Calls to several ranks of a rollout group of which some may die meanwhile: weights, and what replicas still have."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from areal_like.engines.base import WeightBucket
from areal_like.runtime.local import PendingCall, WorkerError, WorkerGroup

__all__ = ["answer_unless_dead", "install", "submit_unless_dead"]


def submit_unless_dead(group: WorkerGroup, rank: int, method: str, *args: Any) -> PendingCall | None:
    """A call to one rank; None when it has died."""
    try:
        return group.submit_one(rank, method, *args)
    except WorkerError:
        if group.is_dead(rank):
            return None
        raise


def answer_unless_dead(group: WorkerGroup, rank: int, call: PendingCall | None) -> Any:
    """The answer of one rank; None when it has died."""
    try:
        return None if call is None else call.result()[0]
    except WorkerError:
        if group.is_dead(rank):
            return None
        raise


def install(group: WorkerGroup, ranks: Iterable[int], buckets: Iterable[WeightBucket], version: int) -> list[int]:
    """Install weights in some ranks, bucket by bucket: one bucket loads as the next one comes.

    A rank that dies in between does not hold up the others.

    Returns:
        The ranks that have the weights now.

    Raises:
        WorkerError: none of them is left, or a rank failed without dying (its group is gone then).
    """
    living = list(ranks)
    loading: PendingCall | None = None
    for bucket in buckets:
        _wait(group, living, loading)
        loading = _submit(group, living, "update_weights", bucket)
    _wait(group, living, loading)
    _wait(group, living, _submit(group, living, "finish_update", version))
    return living


def _submit(group: WorkerGroup, living: list[int], method: str, argument: Any) -> PendingCall:
    while True:
        try:
            return group.submit_to(living, method, argument)
        except WorkerError:
            _bury(group, living)


def _wait(group: WorkerGroup, living: list[int], call: PendingCall | None) -> None:
    try:
        if call is not None:
            call.result()
    except WorkerError:
        _bury(group, living)


def _bury(group: WorkerGroup, living: list[int]) -> None:
    """Take the dead out of `living`; in the handler of an error, which is raised again if that does not explain it."""
    dead = [rank for rank in living if group.is_dead(rank)]
    if not dead or len(dead) == len(living):
        raise
    living[:] = [rank for rank in living if rank not in dead]
