"""Pairs for preference training, made of groups."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass

from areal_like.data.rows import Message
from areal_like.rollout.agents.base import Attempt, ContrastiveRolloutGenerator, GroupedRolloutGenerator
from areal_like.rollout.trajectories import RolloutGroup

__all__ = ["BestAgainstWorst", "Pair"]


@dataclass(frozen=True)
class Pair:
    """Two attempts at one problem.

    Attributes:
        environment, index: of the group.
        chosen, rejected: whole conversations; they begin alike.
        rewards: of the chosen one and of the rejected one.
    """

    environment: str
    index: int
    chosen: list[Message]
    rejected: list[Message]
    rewards: tuple[float, float]

    @property
    def prompt(self) -> list[Message]:
        """What both conversations begin with."""
        shared = []
        for one, other in zip(self.chosen, self.rejected, strict=False):
            if one != other:
                break
            shared.append(one)
        return shared


class BestAgainstWorst(ContrastiveRolloutGenerator):
    """The best attempt of a group against its worst; of equal ones the earlier.

    Args:
        environment: makes the groups.
        size: attempts of a group.
        margin: rewards that differ by no more are a tie; a tie gives no pair.

    Attributes:
        skipped: groups that gave no pair, by reason: tie, fewer than two attempts that did not fail, same words.
    """

    def __init__(self, environment: GroupedRolloutGenerator, *, size: int = 8, margin: float = 0.0) -> None:
        if size < 2 or margin < 0:
            raise ValueError(f"a pair needs a group of at least 2 and a margin of at least 0, not {size} and {margin}")
        self.environment, self.size, self.margin = environment, size, margin
        self.skipped: Counter[str] = Counter()

    async def pairs(self, attempt: Attempt, count: int, *, first: int = 0) -> list[Pair]:
        """Make `count` groups, and the pair of each that has one."""
        indices = range(first, first + count)
        groups = await asyncio.gather(*(self.environment.group(attempt, index, self.size) for index in indices))
        return [pair for group in groups if (pair := self.pair(group)) is not None]

    def pair(self, group: RolloutGroup) -> Pair | None:
        """The pair of a finished group, wherever it comes from (a pipeline, a bank); None is counted in `skipped`.

        Raises:
            ValueError: the environment cannot say what its conversations were; see `Agent.transcript`.
        """
        found = self._pair(group)
        if isinstance(found, Pair):
            return found
        self.skipped[found] += 1
        return None

    def _pair(self, group: RolloutGroup) -> Pair | str:
        """The pair, or why there is none."""
        judged = [(member.reward, member) for member in group.members if member.reward is not None]
        if len(judged) < 2:
            return "fewer than two attempts that did not fail"
        best = max(judged, key=lambda entry: entry[0])
        worst = min(judged, key=lambda entry: entry[0])
        if best[0] - worst[0] <= self.margin:
            return "tie"
        chosen = self.environment.transcript(group.row, best[1])
        rejected = self.environment.transcript(group.row, worst[1])
        if chosen == rejected:  # a reward that depends on more than the words
            return "same words"
        return Pair(group.environment, group.index, chosen, rejected, (best[0], worst[0]))
