"""The pipeline with a simulated engine and trainer, on a virtual clock: hours of rollouts in seconds.

The pipeline is the real one. An engine serves so many requests at once, each for as long as its length says, whatever
else it serves; a trainer takes batches and installs versions. `benchmarks/overlap.py` compares the laws of `laws` with
what happens here.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from areal_like.data.rows import Row
from areal_like.rollout.agents.base import GroupedRolloutGenerator
from areal_like.rollout.pipeline.laws import predicted_staleness, predicted_utilisation
from areal_like.rollout.pipeline.pipeline import RolloutPipeline, Share
from areal_like.rollout.trajectories import TokenRollout, Turn
from areal_like.spec.flow import FlowControl, Granularity

__all__ = ["Simulated", "VirtualLoop", "log_normal", "simulate"]


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock jumps to the next timer instead of waiting for it."""

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0
        selector: Any = getattr(self, "_selector")  # noqa: B009  asyncio has no public way to it
        poll = selector.select

        def jump(timeout: float | None) -> Any:
            if timeout is None:
                raise RuntimeError("everything waits for something that will never come")
            self._now += timeout
            return poll(0)

        selector.select = jump

    def time(self) -> float:
        return self._now


def log_normal(mean: float, sigma: float, seed: int) -> Callable[[], float]:
    """Draws of a log-normal distribution; `sigma` of its logarithm, 1 is a long tail."""
    generator = random.Random(seed)
    return lambda: mean * generator.lognormvariate(-sigma * sigma / 2, sigma)


@dataclass
class Simulated:
    """What a simulated run showed after its warm-up.

    Attributes:
        control: of the run.
        utilisation: rollouts that the engine served over its capacity, in the mean over time.
        staleness: versions between first tokens and the update that trained on them, of each rollout.
        waited: finished groups that the trainer had not taken, the most there were.
        taus: see `laws`.
        batch_seconds: virtual seconds between two batches, in the mean.
    """

    control: FlowControl
    utilisation: float
    staleness: list[int] = field(default_factory=list)
    waited: int = 0
    taus: dict[Granularity, float] = field(default_factory=dict)
    batch_seconds: float = 0.0

    @property
    def mean_staleness(self) -> float:
        return fmean(self.staleness)

    @property
    def utilisation_law(self) -> float:
        return predicted_utilisation(self.control, self.taus)

    @property
    def staleness_law(self) -> float:
        return predicted_staleness(self.control, self.taus)


class _Engine:
    """Serves `capacity` requests at once."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.version = capacity, 0
        self._free = asyncio.Semaphore(capacity)
        self._clock = asyncio.get_running_loop().time
        self._busy, self._since, self._area = 0, self._clock(), 0.0

    async def serve(self, seconds: float) -> Turn:
        async with self._free:
            first = self.version
            self._count(+1)
            await asyncio.sleep(seconds)
            self._count(-1)
        return Turn([0], [0, 0], [0.0, 0.0], [first, self.version], "stop")

    def area(self) -> float:
        """Requests times seconds so far."""
        self._count(0)
        return self._area

    def _count(self, change: int) -> None:
        now = self._clock()
        self._area += self._busy * (now - self._since)
        self._busy, self._since = self._busy + change, now


class _Environment(GroupedRolloutGenerator):
    """Problems that differ in the lengths of their attempts alone."""

    def __init__(self, name: str, engine: _Engine, length: Callable[[], float]) -> None:
        self.name, self._engine, self._length = name, engine, length

    def problem(self, index: int) -> Row:
        return Row("", "", index=index)

    async def run(self, episode: Any = None) -> TokenRollout:
        return TokenRollout([await self._engine.serve(self._length())], reward=0.0)


def simulate(
    control: FlowControl,
    lengths: Sequence[Callable[[], float]],
    *,
    train_seconds: float = 0.0,
    capacity: int | None = None,
    batches: int = 60,
    warm_up: int = 20,
) -> Simulated:
    """Run the pipeline in virtual time.

    Args:
        control: how generation is admitted and consumed.
        lengths: of each environment, draws of an episode's seconds; batches are shared out evenly.
        train_seconds: of an update.
        capacity: requests that the engine serves at once; as many as are under way when None.
        batches: that are trained on, after `warm_up` of them that are not counted.
    """

    async def run() -> Simulated:
        engine = _Engine(capacity or control.rollouts)
        share, rest = divmod(control.groups, len(lengths))
        agents = [_Environment(f"environment {i}", engine, length) for i, length in enumerate(lengths)]
        shares = [Share(agent, share + (i < rest)) for i, agent in enumerate(agents)]
        pipeline = RolloutPipeline(shares, control, _attempt)
        pipeline.start()
        clock = asyncio.get_running_loop().time
        found = Simulated(control, 0.0)
        began, area = 0.0, 0.0
        for number in range(warm_up + batches):
            if number == warm_up:
                began, area = clock(), engine.area()
            batch = await pipeline.take()
            assert batch is not None
            if number >= warm_up:
                members = [member for group in batch.groups for member in group.members]
                found.staleness += [number - m.turns[0].versions[0] for m in members if isinstance(m, TokenRollout)]
                found.waited = max(found.waited, int(batch.figures["flow/waiting_groups"]))
            await asyncio.sleep(train_seconds)
            engine.version = number + 1
            await pipeline.installed(number + 1)
        elapsed = clock() - began
        found.utilisation = (engine.area() - area) / (elapsed * engine.capacity)
        found.batch_seconds = elapsed / batches
        found.taus = pipeline.meter.taus()
        await pipeline.close()
        return found

    loop = VirtualLoop()
    try:
        return loop.run_until_complete(run())
    finally:
        loop.close()


async def _attempt(agent: Any, row: Row, index: int, number: int) -> TokenRollout:
    """The environment of a simulation asks its engine itself."""
    found: TokenRollout = await agent.run()
    return found
