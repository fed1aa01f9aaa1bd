"""What an evaluation found, and the figures made of it."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

from areal_like.rollout.trajectories import RolloutGroup

__all__ = ["EvaluationResponse", "pass_at_k"]


def pass_at_k(n: int, c: int, k: int) -> float:
    """The chance that at least one of k attempts is right, estimated without bias from n of which c are right.

    1 - C(n - c, k) / C(n, k): Chen et al. 2021, arXiv 2107.03374, equation 1. (1 - (1 - c/n)^k is biased downward.)

    Raises:
        ValueError: not 0 <= c <= n, or not 1 <= k <= n.
    """
    if not (0 <= c <= n and 1 <= k <= n):
        raise ValueError(f"pass@{k} of {c} right ones among {n}: 0 <= right <= attempts and 1 <= k <= attempts")
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


@dataclass(frozen=True)
class EvaluationResponse:
    """The attempts of one evaluation.

    Attributes:
        environment: its name.
        groups: the problems with all attempts, in their order.
        passing: the least reward of a right attempt.
    """

    environment: str
    groups: list[RolloutGroup]
    passing: float = 1.0

    def metrics(self) -> dict[str, float]:
        """Figures by name.

        `reward_mean` over attempts; `best_mean` over problems, of the best attempt; `pass@k` for k = 1, 2, 4, ... and
        the number of attempts; `problems`, `attempts`, `failed` (attempts). Attempts that failed are neither right nor
        wrong: they count in `failed` alone, and a problem with fewer than k others is left out of pass@k. A figure
        about nothing is left out.
        """
        rewards = [group.rewards for group in self.groups]
        judged = [reward for group in rewards for reward in group]
        attempts = sum(len(group.members) for group in self.groups)
        found = {
            "problems": float(len(self.groups)),
            "attempts": float(attempts),
            "failed": float(attempts - len(judged)),
        }
        if judged:
            found["reward_mean"] = math.fsum(judged) / len(judged)
            best = [max(group) for group in rewards if group]
            found["best_mean"] = math.fsum(best) / len(best)
        for k in _ks(max((len(group.members) for group in self.groups), default=0)):
            chances = [pass_at_k(len(r), sum(x >= self.passing for x in r), k) for r in rewards if len(r) >= k]
            if chances:
                found[f"pass@{k}"] = math.fsum(chances) / len(chances)
        return found

    def failures(self) -> Counter[str]:
        """Why attempts failed, and how many for each reason."""
        return Counter(member.failure for group in self.groups for member in group.members if member.failed)


def _ks(samples: int) -> list[int]:
    """1, 2, 4, ... and the number itself."""
    powers = [1 << i for i in range(samples.bit_length()) if 1 << i <= samples]
    return powers if not powers or powers[-1] == samples else [*powers, samples]
