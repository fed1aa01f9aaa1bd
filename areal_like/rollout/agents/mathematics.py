r"""`gsm8k`, `dapo` and `aime`: questions whose answer is a value, to be given in an agreed format.

    the answer is       and the model ended by itself    and the length limit cut it off
    right, in format    1                                format_reward
    wrong, in format    format_reward                    format_reward
    not in format       0                                0

In format means: the last `\boxed{...}` of the text is complete (`answer_format: boxed`), or the last `<answer>` tag is
closed (`answer_format: tagged`). What stands outside of it is not looked at, the right value included. `format_reward`
replaces the 0 of a wrong answer; it is not added to the 1 of a right one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Literal

from pydantic import Field

from areal_like.data.answers import last_boxed, last_tagged, to_number
from areal_like.data.rewards import Reward, same_value
from areal_like.data.rows import Row
from areal_like.rollout.agents.base import Episode, EvaluationAgent, GroupedRolloutGenerator
from areal_like.rollout.agents.rows import RowsAgent, rows_of

__all__ = ["AIME", "DAPO", "GSM8K", "boxed_reward", "tagged_reward", "value_of_attempt"]

type AnswerFormat = Literal["boxed", "tagged"]

INSTRUCTIONS: dict[AnswerFormat, str] = {
    "boxed": "Please reason step by step, and put your final answer within \\boxed{}.",
    "tagged": "Please reason step by step, and put your final answer between <answer> and </answer>.",
}


def boxed_reward(prompt: str, completion: str, row: Row) -> float:
    r"""1 when the last complete `\boxed{...}` states the value of `row.answer`, else 0."""
    return _is_right(last_boxed(completion), row)


def tagged_reward(prompt: str, completion: str, row: Row) -> float:
    """1 when the last complete `<answer>...</answer>` states the value of `row.answer`, else 0."""
    return _is_right(last_tagged(completion), row)


def _is_right(answer: str | None, row: Row) -> float:
    if not answer:
        return 0.0
    gold, value = to_number(row.answer), to_number(answer)
    if gold is not None and value is not None:
        return float(gold == value)
    return same_value(row.answer, answer)  # by math-verify, with a time limit


def value_of_attempt(right: bool, in_format: bool, ended: bool, format_reward: float) -> float:
    """The table at the top of this module."""
    if not in_format:
        return 0.0
    return 1.0 if right and ended else format_reward


_REWARDS: dict[AnswerFormat, Reward] = {"boxed": boxed_reward, "tagged": tagged_reward}
_FIND = {"boxed": last_boxed, "tagged": last_tagged}

Format = Annotated[AnswerFormat, Field(description="boxed: `\\boxed{}`; tagged: `<answer>` and `</answer>`")]
FormatReward = Annotated[
    float, Field(ge=0.0, le=1.0, description="for an answer in the format that is wrong, or right but cut off")
]
DatasetPath = Annotated[str, Field(min_length=1, description="local file or folder, or a name on the Hub")]
DatasetName = Annotated[str | None, Field(description="configuration of a dataset on the Hub that has several")]
Split = Annotated[str, Field(min_length=1, description="split of the dataset")]


class _Mathematics(RowsAgent):
    """What the three have in common."""

    def __init__(
        self, rows: Sequence[Row], *, shuffle: bool, seed: int, answer_format: AnswerFormat, format_reward: float
    ) -> None:
        super().__init__(rows, shuffle=shuffle, seed=seed)
        self.answer_format, self.format_reward = answer_format, format_reward

    def problem(self, index: int) -> Row:
        """The row, with the question put and the format asked for."""
        row = super().problem(index)
        given = [{"role": "user", "content": row.prompt}] if isinstance(row.prompt, str) else row.prompt
        asked = [dict(message) for message in given]
        asked[-1]["content"] += "\n" + INSTRUCTIONS[self.answer_format]
        return replace(row, prompt=tuple(asked))

    async def run(self, episode: Episode) -> float:
        """Ask once, and judge."""
        assert not isinstance(episode.row.prompt, str)
        answer = await episode.chat(episode.row.prompt)
        in_format = bool(_FIND[self.answer_format](answer.text))
        right = in_format and await episode.score(_REWARDS[self.answer_format], answer.text) == 1.0
        ended = answer.finish_reason != "length"
        episode.figures |= {"in_format": float(in_format), "right": float(right), "ended": float(ended)}
        return value_of_attempt(right, in_format, ended, self.format_reward)


class GSM8K(_Mathematics, GroupedRolloutGenerator):
    """Word problems of primary school (Cobbe et al. 2021, arXiv 2110.14168)."""

    def __init__(
        self,
        path: DatasetPath = "openai/gsm8k",
        name: DatasetName = None,
        split: Split = "train",
        answer_format: Format = "boxed",
        format_reward: FormatReward = 0.0,
        shuffle: bool = True,
        seed: int = 0,
    ) -> None:
        rows = rows_of(path, name=name, split=split)
        super().__init__(rows, shuffle=shuffle, seed=seed, answer_format=answer_format, format_reward=format_reward)


class DAPO(_Mathematics, GroupedRolloutGenerator):
    """Competition problems with a final value (Yu et al. 2025, arXiv 2503.14476); any dataset of this kind."""

    def __init__(
        self,
        path: DatasetPath = "open-r1/DAPO-Math-17k-Processed",
        name: DatasetName = None,
        split: Split = "train",
        answer_format: Format = "boxed",
        format_reward: FormatReward = 0.0,
        shuffle: bool = True,
        seed: int = 0,
    ) -> None:
        rows = rows_of(path, name=name, split=split)
        super().__init__(rows, shuffle=shuffle, seed=seed, answer_format=answer_format, format_reward=format_reward)


class AIME(_Mathematics, EvaluationAgent):
    """Problems of the American Invitational Mathematics Examination; for evaluation, and refused for training."""

    def __init__(
        self,
        path: DatasetPath = "Maxwell-Jia/AIME_2024",
        name: DatasetName = None,
        split: Split = "train",
        answer_format: Format = "boxed",
        format_reward: FormatReward = 0.0,
    ) -> None:
        rows = rows_of(path, name=name, split=split)
        super().__init__(rows, shuffle=False, seed=0, answer_format=answer_format, format_reward=format_reward)
