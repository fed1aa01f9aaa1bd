"""What an environment is, and what it is given for one attempt.

An environment knows an `Episode` and nothing else: which engine answers, which policy, how many attempts run at once
and what becomes of the reward are the business of others.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol

from areal_like.data.rewards import Reward
from areal_like.data.rows import Message, Row
from areal_like.rollout.inference.base import Generation
from areal_like.rollout.trajectories import Rollout, TokenRollout, Turn

__all__ = ["Agent", "Episode", "GroupedRolloutGenerator"]


class Episode(Protocol):
    """One attempt at a problem, as its environment sees it. Every call of the model is recorded in `turns`.

    Attributes:
        row: the problem.
        attempt: the number of the attempt within its group, from 0.
        turns: calls so far, with tokens; empty for a model that says nothing of tokens.
        figures: the environment may put numbers here for the statistics of the run.
    """

    row: Row
    attempt: int
    turns: list[Turn]
    figures: dict[str, float]

    async def generate(self, prompt: str | Sequence[int], **sampling: Any) -> Generation:
        """Continue a text as it is (no chat template), or token ids."""

    async def chat(self, messages: str | Sequence[Message], **sampling: Any) -> Generation:
        """Answer a conversation; text is one user message.

        When `messages` goes on from an earlier call of this episode, the tokens that the model saw and drew then are
        kept, and only what is new is encoded: turns then are prefixes of one another.
        """

    async def score(self, reward: Reward, completion: str) -> float:
        """Call a reward function on the row, in a process of its own with a time limit and retries.

        Raises:
            RewardError: it failed each time; let it pass, and the attempt counts as failed.
        """


class Agent:
    """Whoever poses problems and judges attempts.

    Attributes:
        name: unique in a run; groups carry it.
    """

    name: str = ""


class GroupedRolloutGenerator(Agent, ABC):
    """An environment whose problems are attempted several times; what the pipeline consumes."""

    @abstractmethod
    def problem(self, index: int) -> Row:
        """Problem number `index` of this run, from 0 without end. The same number gives the same problem, always."""

    @abstractmethod
    async def run(self, episode: Episode) -> float | TokenRollout | Rollout:
        """Make one attempt: ask the model, return the reward (of the turns that the episode recorded), or a rollout
        put together by hand. What it raises makes this attempt a failed one, and is reported."""
