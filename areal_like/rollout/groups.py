"""What flows through the rollout side: a prompt, the answers drawn for it, and what they are worth."""

from __future__ import annotations

from dataclasses import dataclass, field

from areal_like.data.rows import Row


@dataclass(frozen=True)
class Prompt:
    """One row of a dataset, ready to be continued.

    Attributes:
        index: its place in the order of the run, from 0.
        prompt_ids: the tokens that the model sees.
        row: the row of the dataset, handed to the reward function.
    """

    index: int
    prompt_ids: list[int]
    row: Row


@dataclass
class Answer:
    """One continuation of a prompt.

    Attributes:
        token_ids: drawn tokens.
        log_probs: of each drawn token, under the distribution it was drawn from.
        versions: of the policy that drew each token.
        finish_reason: stop or length.
        reward: None until it is computed.
    """

    token_ids: list[int]
    log_probs: list[float]
    versions: list[int]
    finish_reason: str
    text: str = ""
    reward: float | None = None

    @property
    def rewarded(self) -> float:
        """The reward. ValueError while there is none."""
        if self.reward is None:
            raise ValueError("the answer has no reward yet")
        return self.reward


@dataclass
class RolloutGroup:
    """A prompt with its answers; `answers[i]` is None until sample `i` has ended."""

    prompt: Prompt
    answers: list[Answer | None] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        return all(answer is not None for answer in self.answers)

    def finished(self) -> list[Answer]:
        """All answers. ValueError when one is missing."""
        answers = [answer for answer in self.answers if answer is not None]
        if len(answers) != len(self.answers):
            raise ValueError(f"group {self.prompt.index} has {len(answers)} of {len(self.answers)} answers")
        return answers
