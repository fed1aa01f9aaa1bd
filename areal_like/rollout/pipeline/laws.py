"""What the pipeline measures about itself, beside what theory says.

With the tail factor tau of a unit, the expected longest of its rollouts over the expected rollout,

    1 = tau_R <= tau_G <= tau_B
    utilisation               U = 1 / tau_submit                               of an engine as large as the slots
    first-token staleness     S = (tau_consume / tau_submit) (1 + L)           versions; at B/B exactly L

(Megatron-RL's README; no code there computes them.) Both hold where the engine sets the pace. Where the trainer does,
finished groups wait, utilisation falls and staleness grows by what waits: `waiting` shows it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from statistics import fmean

from areal_like.rollout.trajectories import RolloutGroup, TokenRollout
from areal_like.spec.flow import FlowControl, Granularity

__all__ = ["FlowMeter", "predicted_staleness", "predicted_utilisation"]

WINDOW = 16
"""Batches that tau is estimated from."""


def predicted_utilisation(control: FlowControl, taus: dict[Granularity, float]) -> float:
    return 1 / taus[control.submission]


def predicted_staleness(control: FlowControl, taus: dict[Granularity, float]) -> float:
    """Versions between the drawing of a first token and the update that trains on it, in the mean."""
    if control.mode == "B/B":
        return float(control.slots - 1)
    return taus[control.consumption] / taus[control.submission] * (1 + control.lag)


@dataclass
class _Busy:
    """The integral over time of a number that changes."""

    now: float
    value: float = 0.0
    area: float = 0.0

    def to(self, time: float, value: float) -> None:
        self.area += self.value * (time - self.now)
        self.now, self.value = time, value


class FlowMeter:
    """Durations of rollouts, the engine's idle time, and ages of tokens.

    Args:
        clock: seconds.
    """

    def __init__(self, control: FlowControl, clock: Callable[[], float]) -> None:
        self._control, self._clock = control, clock
        self._running = _Busy(clock())
        self._since = self._running.now
        self._durations: dict[tuple[str, int], list[float]] = {}
        self._batches: deque[list[list[float]]] = deque(maxlen=WINDOW)

    def started(self) -> None:
        """A rollout begins."""
        self._running.to(self._clock(), self._running.value + 1)

    def ended(self, key: tuple[str, int], seconds: float) -> None:
        """A rollout of the group `key` has taken `seconds`."""
        self._running.to(self._clock(), self._running.value - 1)
        self._durations.setdefault(key, []).append(seconds)

    def dropped(self, key: tuple[str, int]) -> None:
        self._durations.pop(key, None)

    def consumed(self, groups: Iterable[RolloutGroup]) -> None:
        """A batch is handed to the trainer."""
        known = [durations for group in groups if (durations := self._durations.pop(group.key, None))]
        if known:  # what a bank has restored was timed in another life
            self._batches.append(known)

    def taus(self) -> dict[Granularity, float]:
        """The tail factor of each granularity over the last batches; 1 where nothing is known."""
        groups = [durations for batch in self._batches for durations in batch]
        rollouts = [seconds for durations in groups for seconds in durations]
        mean = fmean(rollouts) if rollouts else 0.0
        if mean == 0.0:
            return dict.fromkeys(Granularity, 1.0)
        return {
            Granularity.ROLLOUT: 1.0,
            Granularity.GROUP: fmean(map(max, groups)) / mean,
            Granularity.BATCH: fmean(max(map(max, batch)) for batch in self._batches) / mean,
        }

    def take_utilisation(self) -> float:
        """Rollouts at work over the slots for them, in the mean since the last call."""
        now = self._clock()
        self._running.to(now, self._running.value)
        area, self._running.area = self._running.area, 0.0
        elapsed, self._since = now - self._since, now
        return area / (elapsed * self._control.rollouts) if elapsed > 0 else 0.0

    def figures(self, groups: Iterable[RolloutGroup], version: int) -> dict[str, float]:
        """Of the batch that is trained on as the step from `version` on, and of the time since the last call."""
        ages = [
            version - member.turns[0].versions[0]
            for group in groups
            for member in group.members
            if isinstance(member, TokenRollout) and member.turns and member.turns[0].versions
        ]
        taus = self.taus()
        return {
            "flow/tau_group": taus[Granularity.GROUP],
            "flow/tau_batch": taus[Granularity.BATCH],
            "flow/utilisation": self.take_utilisation(),
            "flow/utilisation_law": predicted_utilisation(self._control, taus),
            "flow/first_token_staleness": fmean(ages) if ages else 0.0,
            "flow/first_token_staleness_law": predicted_staleness(self._control, taus),
        }
