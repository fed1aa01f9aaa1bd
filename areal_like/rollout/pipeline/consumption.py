"""In which order finished groups reach the trainer."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Protocol

from areal_like.rollout.trajectories import RolloutGroup


@dataclass(frozen=True)
class Ticket:
    """The place in a batch that a group was started for; a replacement inherits it.

    Attributes:
        batch: number of the batch, as versions are counted.
        slot: place in the batch, from 0; the slots of an environment follow one another.
        environment: its name.
    """

    batch: int
    slot: int
    environment: str


class Collector(Protocol):
    """Holds finished groups until a batch of them is whole."""

    def add(self, ticket: Ticket, group: RolloutGroup) -> None: ...

    def ready(self, batch: int, quotas: dict[str, int]) -> bool:
        """Whether batch number `batch`, which takes `quotas` groups of each environment, is whole."""

    def take(self, batch: int, quotas: dict[str, int]) -> list[RolloutGroup]:
        """Its groups, which leave."""


class InOrder:
    """Consumption B: a batch holds the groups that were started for it, in the order of their problems."""

    def __init__(self) -> None:
        self._batches: dict[int, dict[int, RolloutGroup]] = {}

    def add(self, ticket: Ticket, group: RolloutGroup) -> None:
        self._batches.setdefault(ticket.batch, {})[ticket.slot] = group

    def ready(self, batch: int, quotas: dict[str, int]) -> bool:
        return len(self._batches.get(batch, {})) == sum(quotas.values())

    def take(self, batch: int, quotas: dict[str, int]) -> list[RolloutGroup]:
        slots = self._batches.pop(batch)
        place = {name: i for i, name in enumerate(quotas)}
        return sorted(slots.values(), key=lambda group: (place[group.environment], group.index))


class Balanced:
    """Consumption G: a batch holds the groups that were finished first, but of each environment its quota.

    An environment with short episodes does not crowd out one with long ones; the batch waits for the slow one.
    """

    def __init__(self) -> None:
        self._finished: dict[str, deque[tuple[int, RolloutGroup]]] = {}
        self._count = 0

    def add(self, ticket: Ticket, group: RolloutGroup) -> None:
        self._finished.setdefault(ticket.environment, deque()).append((self._count, group))
        self._count += 1

    def ready(self, batch: int, quotas: dict[str, int]) -> bool:
        return all(len(self._finished.get(name, ())) >= quota for name, quota in quotas.items())

    def take(self, batch: int, quotas: dict[str, int]) -> list[RolloutGroup]:
        taken = [self._finished[name].popleft() for name, quota in quotas.items() for _ in range(quota)]
        return [group for _, group in sorted(taken, key=lambda numbered: numbered[0])]
