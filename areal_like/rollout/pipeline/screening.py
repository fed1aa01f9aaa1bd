"""Which finished groups are worth training on, and when to give up."""

from __future__ import annotations

from collections import Counter

from areal_like.rollout.trajectories import RolloutGroup

__all__ = ["EpisodesFailedError", "Screening"]

SPREAD = 1e-6
"""Rewards that differ by no more are equal."""


class EpisodesFailedError(RuntimeError):
    """No attempt comes to its end, or no group has anything to teach: going on would last for ever."""


class Screening:
    """Judges groups; what it drops, the pipeline replaces by a new problem of the same environment.

    Args:
        drop_equal_rewards: drop groups whose attempts all have the same reward: their advantages are 0 (DAPO's dynamic
            sampling, arXiv 2503.14476, section 3.2).
        patience: groups in a row of which every attempt failed, until the run ends.
        equal_patience: groups in a row that were dropped for whatever reason, until the run ends.
    """

    def __init__(self, *, drop_equal_rewards: bool = False, patience: int = 8, equal_patience: int = 256) -> None:
        self.drop_equal_rewards = drop_equal_rewards
        self.patience, self.equal_patience = patience, equal_patience
        self.dropped: Counter[str] = Counter()
        self.failures: Counter[str] = Counter()
        self._all_failed = 0
        self._dropped_in_a_row = 0
        self._recent: Counter[str] = Counter()

    def judge(self, group: RolloutGroup) -> str | None:
        """Why the group is dropped; None keeps it.

        Raises:
            EpisodesFailedError: `patience` is exhausted; with the commonest reasons.
        """
        for member in group.members:
            if member.failed:
                reason = member.failure.split("\n", 1)[0]
                self.failures[reason] += 1
                self._recent[reason] += 1
        rewards = group.rewards
        if not rewards:
            self._all_failed += 1
            if self._all_failed >= self.patience:
                raise EpisodesFailedError(self._all_failed_message(group))
            return self._drop("every attempt failed")
        self._all_failed = 0
        self._recent.clear()
        if self.drop_equal_rewards and len(group.members) > 1 and max(rewards) - min(rewards) <= SPREAD:
            return self._drop(f"all rewards are {rewards[0]:g}")
        self._dropped_in_a_row = 0
        return None

    def take_counts(self) -> tuple[Counter[str], Counter[str]]:
        """(groups dropped by reason, attempts failed by reason) since the last call."""
        counts = self.dropped, self.failures
        self.dropped, self.failures = Counter(), Counter()
        return counts

    def _drop(self, reason: str) -> str:
        self.dropped[reason] += 1
        self._dropped_in_a_row += 1
        if self._dropped_in_a_row >= self.equal_patience:
            reasons = ", ".join(f"{count} because {why}" for why, count in self.dropped.most_common(3))
            raise EpisodesFailedError(
                f"{self._dropped_in_a_row} groups in a row were dropped ({reasons}): the problems are all too easy "
                "or too hard for this policy; choose others, or set rollout.filter_groups_with_same_reward: false"
            )
        return reason

    def _all_failed_message(self, group: RolloutGroup) -> str:
        total = sum(self._recent.values())
        lines = [f"  {count} of {total}: {why}" for why, count in self._recent.most_common(5)]
        return "\n".join(
            [f"every attempt of {self._all_failed} groups in a row failed, of {group.environment} at last:", *lines]
        )
