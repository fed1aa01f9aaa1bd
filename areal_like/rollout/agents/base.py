"""What an environment is, and what it is given for one attempt.

An environment knows an `Episode` and nothing else: which engine answers, which policy, how many attempts run at once
and what becomes of the reward are the business of others.

    Agent                        makes one attempt at a problem and judges it            run(episode)
      RolloutGenerator           and poses problems                                      problem(index)
        TokenizedRolloutGenerator    and puts the tokens of an attempt together itself
        EvaluationAgent              and can be measured on them                         evaluate(...)
          GroupedRolloutGenerator    and may be trained on: each problem several times   group(...)
    ContrastiveRolloutGenerator  makes pairs of a better and a worse conversation        pairs(...)

Who writes an environment writes `problem` and `run` of a `GroupedRolloutGenerator`; single rollouts, groups and
evaluation come with it, and `agents.contrastive` makes pairs of its groups.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Protocol

from areal_like.data.prompts import conversation
from areal_like.data.rewards import Reward
from areal_like.data.rows import Message, Row
from areal_like.rollout.agents.evaluation import EvaluationResponse
from areal_like.rollout.inference.base import Capability, Generation
from areal_like.rollout.trajectories import Rollout, RolloutGroup, TokenRollout, Turn

__all__ = [
    "Agent",
    "Attempt",
    "ContrastivePair",
    "ContrastiveRolloutGenerator",
    "Episode",
    "EvaluationAgent",
    "GroupedRolloutGenerator",
    "RolloutGenerator",
    "TokenizedRolloutGenerator",
]


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

    def rollout(self, reward: float) -> TokenRollout | Rollout:
        """What was recorded so far, with what it is worth; what becomes of the number that `Agent.run` returns.

        Raises:
            ValueError: the model was never asked, or the reward is no finite number.
        """


class Agent(ABC):
    """Whoever makes and judges attempts.

    Attributes:
        name: unique in a run; groups carry it.
        needs: what a model has to give so that the agent can work at all; to be checked before start with
            `inference.base.require`.
    """

    name: str = ""
    needs: ClassVar[frozenset[Capability]] = frozenset({Capability.RAW})

    @abstractmethod
    async def run(self, episode: Episode) -> float | TokenRollout | Rollout:
        """Make one attempt: ask the model, return the reward (of the turns that the episode recorded), or a rollout
        put together by hand. What it raises makes this attempt a failed one, and is reported."""

    def transcript(self, row: Row, rollout: TokenRollout | Rollout) -> list[Message]:
        """The conversation of an attempt, as text.

        Of an attempt with tokens it is `conversation(row)` and the one answer. Override it where `run` asks something
        else, or more than once: only the environment knows what it said.

        Raises:
            ValueError: the attempt has several turns, and the environment does not say what stood between them.
        """
        if isinstance(rollout, Rollout):
            return list(rollout.messages)
        if len(rollout.turns) != 1:
            raise ValueError(
                f"an attempt of {self.name or type(self).__name__} has {len(rollout.turns)} turns: override "
                "`transcript`, as the environment `calculator` does, to say what stood between them"
            )
        return [*conversation(row), {"role": "assistant", "content": rollout.turns[0].text}]


class Attempt(Protocol):
    """Makes one attempt for an agent with some model; `agents.attempts.Attempts` is one.

    An attempt that fails is a rollout without a reward. What is raised here is no fault of the environment, and ends
    what is going on.
    """

    async def __call__(self, agent: Agent, row: Row, index: int, number: int) -> TokenRollout | Rollout:
        """Attempt `number` at problem `index`, which is `row`."""


class RolloutGenerator(Agent):
    """Poses problems without end."""

    @abstractmethod
    def problem(self, index: int) -> Row:
        """Problem number `index` of this run, from 0 without end. The same number gives the same problem, always."""

    async def rollouts(self, attempt: Attempt, count: int, *, first: int = 0) -> list[TokenRollout | Rollout]:
        """One attempt at each of `count` problems, in their order."""
        indices = range(first, first + count)
        return list(await asyncio.gather(*(attempt(self, self.problem(index), index, 0) for index in indices)))


class TokenizedRolloutGenerator(RolloutGenerator):
    """Puts the tokens of each attempt together itself, for example because other code than `Episode` recorded them."""

    needs: ClassVar[frozenset[Capability]] = frozenset({Capability.TOKENS, Capability.LOG_PROBS})

    @abstractmethod
    async def run(self, episode: Episode) -> float | TokenRollout:
        """See `Agent.run`; text alone will not do."""


class EvaluationAgent(RolloutGenerator):
    """Can be measured.

    Attributes:
        distinct: problems until they repeat; None when they never do.
        passing: the least reward of an attempt that counts as right, for pass@k.
    """

    distinct: int | None = None
    passing: float = 1.0

    async def group(self, attempt: Attempt, index: int, size: int) -> RolloutGroup:
        """All attempts at one problem."""
        row = self.problem(index)
        members = await asyncio.gather(*(attempt(self, row, index, number) for number in range(size)))
        return RolloutGroup(self.name, index, row, _of_one_kind(members))

    async def evaluate(
        self, attempt: Attempt, *, prompts: int | None = None, samples: int = 1, first: int = 0
    ) -> EvaluationResponse:
        """Attempt problems `first` to `first + prompts`, `samples` times each.

        Args:
            prompts: all there are when None; never more than there are.

        Raises:
            ValueError: the problems are without end and `prompts` is None, or a number is below 1.
        """
        if prompts is None:
            if self.distinct is None:
                raise ValueError(f"the problems of {self.name or type(self).__name__} are without end: say how many")
            prompts = self.distinct - first
        elif self.distinct is not None:
            prompts = min(prompts, self.distinct - first)
        if prompts < 1 or samples < 1:
            raise ValueError(f"an evaluation needs at least one problem and one sample, not {prompts} and {samples}")
        groups = await asyncio.gather(*(self.group(attempt, first + i, samples) for i in range(prompts)))
        return EvaluationResponse(self.name, list(groups), self.passing)


class GroupedRolloutGenerator(EvaluationAgent):
    """An environment that may be trained on: its problems are attempted several times; what the pipeline consumes."""


class ContrastivePair(Protocol):
    """A better and a worse conversation about one problem; what preference training (DPO) takes."""

    @property
    def chosen(self) -> list[Message]: ...

    @property
    def rejected(self) -> list[Message]: ...


class ContrastiveRolloutGenerator(ABC):
    """Makes pairs of a better and a worse conversation; `agents.contrastive.BestAgainstWorst` is one."""

    @abstractmethod
    async def pairs(self, attempt: Attempt, count: int, *, first: int = 0) -> Sequence[ContrastivePair]:
        """Pairs from `count` problems: at most as many, for a problem may give none."""


def _of_one_kind(members: Sequence[TokenRollout | Rollout]) -> list[TokenRollout] | list[Rollout]:
    """A failed attempt without a turn has neither tokens nor text: it becomes what the others are."""
    texts = [member for member in members if isinstance(member, Rollout)]
    tokens = [member for member in members if isinstance(member, TokenRollout)]
    if not texts:
        return tokens
    if any(member.turns for member in tokens):
        raise TypeError("some attempts of a group have tokens and some have text alone; an environment makes one kind")
    return [
        member if isinstance(member, Rollout) else Rollout([], member.reward, member.failure, member.figures)
        for member in members
    ]
