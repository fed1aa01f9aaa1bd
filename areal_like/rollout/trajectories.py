"""What flows through the rollout side: calls of the model, episodes, groups.

A turn is one call of the model. An episode is all turns that one attempt at a problem took, with what it was worth; as
tokens it is a `TokenRollout`, as text alone a `Rollout`. A group is all attempts at one problem.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain

from areal_like.data.rows import Message, Row

__all__ = ["Episodes", "Rollout", "RolloutGroup", "TokenRollout", "Turn"]


@dataclass
class Turn:
    """One call of the model.

    Attributes:
        prompt_ids: everything that the model saw.
        token_ids: what it drew.
        log_probs: of each drawn token, under the distribution it was drawn from.
        versions: of the policy that drew each token.
        finish_reason: stop or length.
        text: of the drawn tokens, special tokens left out.
    """

    prompt_ids: list[int]
    token_ids: list[int]
    log_probs: list[float]
    versions: list[int]
    finish_reason: str
    text: str = ""


@dataclass
class Rollout:
    """One attempt at a problem, as text: from an engine that says nothing of tokens. It cannot be trained on.

    Attributes:
        messages: the conversation, the model's turns among it.
        reward: of the whole attempt; None for one that failed.
        failure: why there is no reward; empty for an attempt that came to its end.
        figures: further numbers of the attempt by name, for the statistics of the run (format, tool calls).
    """

    messages: list[Message]
    reward: float | None = None
    failure: str = ""
    figures: dict[str, float] = field(default_factory=dict)

    @property
    def failed(self) -> bool:
        return self.reward is None


@dataclass
class TokenRollout:
    """One attempt at a problem, as the tokens that the model saw and drew.

    Attributes:
        turns: calls of the model, in their order.
        reward, failure, figures: as of `Rollout`.
    """

    turns: list[Turn]
    reward: float | None = None
    failure: str = ""
    figures: dict[str, float] = field(default_factory=dict)

    @property
    def failed(self) -> bool:
        return self.reward is None

    @property
    def truncated(self) -> bool:
        """Whether the length limit ended its last turn."""
        return bool(self.turns) and self.turns[-1].finish_reason == "length"

    @property
    def drawn(self) -> int:
        """Tokens that the model drew."""
        return sum(len(turn.token_ids) for turn in self.turns)

    @property
    def versions(self) -> tuple[int, int] | None:
        """The oldest and the newest policy that drew a token; None when none was drawn."""
        found = list(chain.from_iterable(turn.versions for turn in self.turns))
        return (min(found), max(found)) if found else None


type Episodes = Sequence[TokenRollout] | Sequence[Rollout]


@dataclass
class RolloutGroup:
    """All attempts at one problem.

    Attributes:
        environment: the name of the environment that posed it.
        index: the number of the problem in the order of that environment; a run poses each number once.
        row: the problem.
        members: the attempts, in the order of their numbers; all of one kind.
    """

    environment: str
    index: int
    row: Row
    members: list[TokenRollout] | list[Rollout]

    @property
    def key(self) -> tuple[str, int]:
        """What a group is known by, over restarts of a run."""
        return self.environment, self.index

    @property
    def rewards(self) -> list[float]:
        """Of the attempts that did not fail."""
        return [member.reward for member in self.members if member.reward is not None]
