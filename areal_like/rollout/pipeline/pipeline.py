"""`RolloutPipeline`: groups are started in the order of batches, finish as they may, and are consumed as asked.

    start       slots, and the bounds on running ahead; a group that a bank has restored goes straight to the end
    attempt     each attempt of a group runs its environment's episode
    settle      the group is complete: dropped and replaced, or made durable and offered
    take        the trainer takes a batch; `installed` says which policy generates from now on

What a unit holds is released when it is complete: a rollout when its episode ends, a group when its last episode does.
A batch is released when a policy has been installed that trained on it, which makes B/B exactly `lag` versions stale.

Everything runs on one event loop and reads time from its clock, so that a benchmark may run it on a virtual one.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from areal_like.data.rows import Row
from areal_like.rollout.agents.base import Attempt, GroupedRolloutGenerator
from areal_like.rollout.pipeline.consumption import Balanced, Collector, InOrder, Ticket
from areal_like.rollout.pipeline.laws import FlowMeter
from areal_like.rollout.pipeline.screening import Screening
from areal_like.rollout.pipeline.slots import Slots
from areal_like.rollout.trajectories import Rollout, RolloutGroup, TokenRollout
from areal_like.spec.flow import FlowControl, Granularity

__all__ = ["Batch", "RolloutPipeline", "Share", "Store"]


@dataclass
class Share:
    """An environment's part of every batch, and how far its problems are.

    Attributes:
        agent: the environment.
        groups: of each batch.
        position: every problem below this number has been trained on or dropped, or is being attempted.
        settled: numbers at or above `position` of which the same is true, by an earlier life of the run.
    """

    agent: GroupedRolloutGenerator
    groups: int
    position: int = 0
    settled: set[int] = field(default_factory=set)

    def next_index(self) -> int:
        """The number of the next problem."""
        while self.position in self.settled:
            self.settled.discard(self.position)
            self.position += 1
        self.position += 1
        return self.position - 1


@dataclass
class Batch:
    """What an update trains on.

    Attributes:
        number: counted as versions are.
        groups: in the order of consumption.
        figures: of the pipeline.
        notes: in words, which groups were replaced and which attempts failed since the batch before, and why.
    """

    number: int
    groups: list[RolloutGroup]
    figures: dict[str, float]
    notes: list[str] = field(default_factory=list)


class Store(Protocol):
    """Where finished groups are made durable before they are offered; `rollout.bank` is one."""

    async def append(self, group: RolloutGroup) -> None:
        """Return when the group would survive a SIGKILL."""


@dataclass
class _Group:
    ticket: Ticket
    index: int
    row: Row
    members: list[TokenRollout | Rollout | None]
    complete: asyncio.Event = field(default_factory=asyncio.Event)


class RolloutPipeline:
    """Made and used inside one event loop.

    Args:
        shares: environments; the groups of a batch are laid out in their order.
        control: granularities and bounds.
        attempt: makes one attempt, see `agents.attempts.Attempts`; what it raises ends the run.
        screening: judges finished groups.
        first: number of the first batch: the version that generates it.
        total: batches of the whole run, `first` included in the count: the last one is number `total - 1`.
        groups_in: groups of a batch, where the last one of an epoch is smaller; of one environment only.
        restored: finished groups of an earlier life of the run.
        store: see `Store`.
        on_dropped: told (environment, number of the problem) of what will never be trained on.
    """

    def __init__(
        self,
        shares: Sequence[Share],
        control: FlowControl,
        attempt: Attempt,
        *,
        screening: Screening | None = None,
        first: int = 0,
        total: int | None = None,
        groups_in: Callable[[int], int] | None = None,
        restored: Iterable[RolloutGroup] = (),
        store: Store | None = None,
        on_dropped: Callable[[str, int], None] = lambda environment, index: None,
    ) -> None:
        if sum(share.groups for share in shares) != control.groups:
            raise ValueError(
                f"the shares are {[share.groups for share in shares]}, a batch has {control.groups} groups"
            )
        if groups_in is not None and len(shares) > 1:
            raise ValueError("batches of different sizes need a single environment")
        self.control = control
        self.version = first
        self.screening = screening or Screening()
        self._shares = {share.agent.name: share for share in shares}
        self._attempt_at, self._groups_in, self._store = attempt, groups_in, store
        self._on_dropped = on_dropped
        self._total = total
        self._restored: dict[str, deque[RolloutGroup]] = {}
        for group in restored:
            self._restored.setdefault(group.environment, deque()).append(group)
        clock = asyncio.get_running_loop().time
        self._clock = clock
        self._slots = Slots(control.slots, clock)
        self.meter = FlowMeter(control, clock)
        self._collector: Collector = InOrder() if control.consumption is Granularity.BATCH else Balanced()
        self._waiting = 0  # finished groups that the trainer has not taken
        self._next = first
        self._to_release = 0  # batches that were consumed since a policy was installed
        self._changed = asyncio.Condition()
        self._error: BaseException | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False
        self._waking: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to generate."""
        self._spawn(self._start_groups())

    async def take(self) -> Batch | None:
        """The next batch, once it is whole; None when the run has had its last.

        Raises:
            EpisodesFailedError: `Screening` has lost its patience.
            BaseException: whatever else stopped the pipeline.
        """
        if self._total is not None and self._next >= self._total:
            return None
        quotas = self._quotas(self._next)
        async with self._changed:
            await self._changed.wait_for(lambda: self._error or self._collector.ready(self._next, quotas))
            if self._error is not None:
                raise self._error
            groups = self._collector.take(self._next, quotas)
            self._waiting -= len(groups)
            self._to_release += 1
            self._next += 1
            self._changed.notify_all()
        self.meter.consumed(groups)
        dropped, failures = self.screening.take_counts()
        notes = [
            *_reasons("groups were replaced", dropped),
            *_reasons("attempts failed", failures),
        ]
        return Batch(self._next - 1, groups, self._figures(groups, dropped.total(), failures.total()), notes)

    async def installed(self, version: int) -> None:
        """Tokens are drawn by the policy `version` from now on."""
        async with self._changed:
            self.version = version
            released, self._to_release = self._to_release, 0
            if self.control.submission is Granularity.BATCH:
                for _ in range(released):
                    self._slots.release()
            self._changed.notify_all()

    async def close(self) -> None:
        """Cancel whatever is under way."""
        self._closed = True
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._waking is not None:
            await self._waking

    # Start

    async def _start_groups(self) -> None:
        number = self.version
        while self._total is None or number < self._total:
            if self.control.submission is Granularity.BATCH:
                await self._slots.acquire()
            for ticket in self._tickets(number):
                await self._start_group(ticket)
            number += 1

    async def _start_group(self, ticket: Ticket) -> None:
        if restored := self._restored.get(ticket.environment):
            await self._offer(ticket, restored.popleft())
            return
        async with self._changed:
            await self._changed.wait_for(lambda: self._may_start(ticket))
        if self.control.submission is Granularity.GROUP:
            await self._slots.acquire()
        await self._attempt_all(ticket)

    def _may_start(self, ticket: Ticket) -> bool:
        control = self.control
        if control.max_ahead is not None and ticket.batch > self.version + control.max_ahead:
            return False
        return control.max_waiting is None or self._waiting < control.max_waiting

    async def _attempt_all(self, ticket: Ticket) -> None:
        """Start every attempt at the environment's next problem, and what follows when all have ended."""
        share = self._shares[ticket.environment]
        index = share.next_index()
        group = _Group(ticket, index, share.agent.problem(index), [None] * self.control.attempts)
        for attempt in range(self.control.attempts):
            if self.control.submission is Granularity.ROLLOUT:
                await self._slots.acquire()
            self._spawn(self._attempt(group, attempt))
        self._spawn(self._settle(group))

    def _tickets(self, number: int) -> list[Ticket]:
        owners = [name for name, quota in self._quotas(number).items() for _ in range(quota)]
        return [Ticket(number, slot, owner) for slot, owner in enumerate(owners)]

    def _quotas(self, number: int) -> dict[str, int]:
        """Groups of each environment in a batch."""
        if self._groups_in is not None:
            return {name: self._groups_in(number) for name in self._shares}
        return {name: share.groups for name, share in self._shares.items()}

    # Attempt

    async def _attempt(self, group: _Group, attempt: int) -> None:
        agent = self._shares[group.ticket.environment].agent
        began = self._clock()
        self.meter.started()
        try:
            group.members[attempt] = await self._attempt_at(agent, group.row, group.index, attempt)
        finally:
            self.meter.ended((agent.name, group.index), self._clock() - began)
            if self.control.submission is Granularity.ROLLOUT:
                self._slots.release()
        if all(member is not None for member in group.members):
            group.complete.set()

    # Settle

    async def _settle(self, group: _Group) -> None:
        await group.complete.wait()
        agent = self._shares[group.ticket.environment].agent
        members: list[Any] = list(group.members)
        finished = RolloutGroup(agent.name, group.index, group.row, members)
        if self.screening.judge(finished) is not None:
            self.meter.dropped(finished.key)
            self._on_dropped(*finished.key)
            await self._attempt_all(group.ticket)  # with the slot of the group, if it holds one
            return
        if self.control.submission is Granularity.GROUP:
            self._slots.release()
        if self._store is not None:
            await self._store.append(finished)
        await self._offer(group.ticket, finished)

    async def _offer(self, ticket: Ticket, group: RolloutGroup) -> None:
        async with self._changed:
            self._collector.add(ticket, group)
            self._waiting += 1
            self._changed.notify_all()

    # What holds it together

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if task.cancelled() or task.exception() is None or self._error is not None or self._closed:
            return
        self._error = task.exception()
        for other in self._tasks:
            other.cancel()
        self._waking = asyncio.get_running_loop().create_task(self._wake())

    async def _wake(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    def _figures(self, groups: Sequence[RolloutGroup], dropped: int, failed: int) -> dict[str, float]:
        return {
            **self.meter.figures(groups, self._next - 1),
            "flow/waiting_groups": float(self._waiting),
            "flow/slots_held": float(self._slots.held),
            "flow/blocked_seconds": self._slots.take_blocked(),
            "flow/dropped_groups": float(dropped),
            "flow/failed_attempts": float(failed),
            **_by_environment(groups),
        }


def _reasons(what: str, counts: Counter[str]) -> list[str]:
    """The commonest of the reasons, in one line; none when there are none."""
    if not counts:
        return []
    common = "; ".join(f"{count} x {reason}" for reason, count in counts.most_common(3))
    return [f"{counts.total()} {what}: {common}"]


def _by_environment(groups: Sequence[RolloutGroup]) -> dict[str, float]:
    """`reward/NAME`, the mean of each environment, where there are several."""
    sums: dict[str, list[float]] = {}
    for group in groups:
        sums.setdefault(group.environment, []).extend(group.rewards)
    if len(sums) < 2:
        return {}
    return {f"reward/{name}": sum(rewards) / len(rewards) for name, rewards in sums.items() if rewards}
