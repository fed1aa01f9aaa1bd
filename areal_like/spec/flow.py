"""How much generation is under way: granularities, the lag, and the slots that follow from both.

A unit of work is a rollout (R, one attempt at a problem), a group (G, all attempts at it) or a batch (B, all groups of
an update). Generation is submitted to the engine in units of one granularity, and consumed by the trainer in units of
another. With P groups a batch, G attempts a group and a lag of L batches (Megatron-RL, `megatron/rl`; where its README
and its source differ, docs/off_policy.md says what holds here):

    slots             = max(1, round((L + 1) * units of a batch))        half to even, as Python rounds
    rollouts at work  = slots * rollouts of a unit
    max_effective_lag = floor(replicas * max_requests / G) / P - 1       what the engine can serve, in whole groups
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

__all__ = ["FlowControl", "Granularity", "lag_of_requests", "max_effective_lag", "refusal"]


class Granularity(StrEnum):
    """From the finest to the coarsest."""

    ROLLOUT = "R"
    GROUP = "G"
    BATCH = "B"

    @property
    def rank(self) -> int:
        return "RGB".index(self.value)


def refusal(submission: Granularity, consumption: Granularity) -> str | None:
    """Why this pair cannot be had; None for B/B, G/G, G/B, R/G and R/B."""
    if consumption is Granularity.ROLLOUT:
        return "an advantage compares the attempts of a group: nothing finer than a group can be trained on"
    if consumption.rank < submission.rank:
        return (
            f"slots are given out by whole batches, and taking single groups out of them ({submission}/{consumption}) "
            "would hold a batch's slots for groups that are long consumed"
        )
    return None


def lag_of_requests(requests: int, groups: int, attempts: int) -> float:
    """The lag at which `requests` rollouts are under way: N / (P G) - 1."""
    return requests / (groups * attempts) - 1


def max_effective_lag(replicas: int, max_requests: int, groups: int, attempts: int) -> float:
    """The lag at which an engine is exactly full; below 0 when it cannot serve a batch at once.

    Args:
        replicas: data-parallel replicas of the engine.
        max_requests: requests that one of them serves at once.
    """
    return (replicas * max_requests // attempts) / groups - 1


@dataclass(frozen=True)
class FlowControl:
    """How generation is admitted and consumed.

    Attributes:
        groups: of a batch (P).
        attempts: rollouts of a group (G).
        lag: batches that are under way beyond the one that the trainer waits for (L), at least -1.
        max_ahead: a second bound, on what may be *started*: groups of batch b only when the installed version is at
            least b - max_ahead. None for none.
        max_waiting: a third, on what is finished: no group is started while so many wait for the trainer. None for
            none.

    Raises:
        ValueError: a pair or number that cannot be had, with the reason.
    """

    groups: int
    attempts: int
    submission: Granularity = Granularity.BATCH
    consumption: Granularity = Granularity.BATCH
    lag: float = 0.0
    max_ahead: int | None = None
    max_waiting: int | None = None

    def __post_init__(self) -> None:
        if reason := refusal(self.submission, self.consumption):
            raise ValueError(f"{self.submission}/{self.consumption}: {reason}")
        if not self.lag >= -1:
            raise ValueError(f"the lag is {self.lag}; it is at least -1: one unit at a time")
        if self.groups < 1 or self.attempts < 1:
            raise ValueError(f"a batch of {self.groups} groups of {self.attempts} attempts; both are at least 1")
        if self.max_waiting is not None and self.max_waiting < self.groups:
            raise ValueError(
                f"{self.max_waiting} finished groups may wait, but an update takes {self.groups}: it would never come"
            )

    @property
    def unit(self) -> int:
        """Rollouts of a unit of submission."""
        return {"R": 1, "G": self.attempts, "B": self.groups * self.attempts}[self.submission]

    @property
    def units_per_batch(self) -> int:
        return self.groups * self.attempts // self.unit

    @property
    def slots(self) -> int:
        """Units under way at once."""
        return max(1, round((self.lag + 1) * self.units_per_batch))

    @property
    def rollouts(self) -> int:
        """Rollouts under way at once."""
        return self.slots * self.unit

    @property
    def mode(self) -> str:
        return f"{self.submission}/{self.consumption}"

    def oversubscribes(self, engine_lag: float) -> bool:
        """Whether more is under way than an engine of `max_effective_lag` `engine_lag` serves at once."""
        return self.lag > engine_lag + 1e-6 / self.groups

    def __str__(self) -> str:
        name = {"R": "rollout", "G": "group", "B": "batch"}[self.submission]
        plural = name if self.slots == 1 else {"batch": "batches"}.get(name, name + "s")
        bounds = []
        if self.max_ahead is not None:
            bounds.append(f"no group is started more than {self.max_ahead} versions ahead")
        if self.max_waiting is not None:
            bounds.append(f"at most {self.max_waiting} finished groups wait")
        return (
            f"generation {self.mode}: {self.slots} {plural} in flight ({self.rollouts} rollouts), lag {self.lag:g}"
            + "".join(f"; {bound}" for bound in bounds)
        )
