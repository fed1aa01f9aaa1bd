"""Rewards: `reward(prompt, completion, row) -> float`, found by name.

A package adds one by the entry-point group `areal_like.rewards` (`name = "module:function"` in its own metadata). A
YAML names a reward and cannot point at code.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable
from importlib.metadata import entry_points

from areal_like.alloc.diagnostics import closest
from areal_like.data.answers import last_number, marked_answer, to_number
from areal_like.data.judge import Judge
from areal_like.data.reasoning import PREFIX
from areal_like.data.rows import Asker, Row

Reward = Callable[[str, str, Row], float]

ENTRY_POINTS = "areal_like.rewards"
_TAIL = 400  # characters of a completion that are searched for a formula: the answer is at the end


class RewardError(Exception):
    """A reward function raised, or did not return a finite number."""


def math_reward(prompt: str, completion: str, row: Row) -> float:
    r"""1 when the answer equals `row.answer`, else 0; for GSM8K and MATH.

    The answer is what the text marks as such (`\boxed{}`, `####`, "answer is"), else its last number. Plain numbers are
    compared exactly; anything else by math-verify, under a time limit.
    """
    marked = marked_answer(completion)
    gold = to_number(row.answer)
    if gold is not None:
        number = to_number(marked) if marked is not None else None
        if number is None and (marked is None or "\\" not in marked):
            written = last_number(completion if marked is None else marked)
            if written is None:
                return 0.0
            number = to_number(written)
        if number is not None:
            return float(number == gold)
    if marked is not None:
        return same_value(row.answer, marked)
    return _judge().equal(row.answer, completion[-_TAIL:])


def same_value(gold: str, answer: str) -> float:
    """1 when a formula states the same value as another, says math-verify, within 5 seconds; else 0."""
    return _judge().equal(gold, f"${answer}$"[-_TAIL:])


def reasoning_gym_reward(prompt: str, completion: str, row: Row) -> float:
    """The score of the row's own task, in [0, 1]; 0 when its scorer fails at the text, or takes longer than 5 seconds.

    What is scored is what the text marks as its answer, else the whole text; where the right answer is a number, the
    last number in it. Numbers get no part of the credit: the package's scorers give 0.5 for "13" where 3 is right,
    because the one is written inside the other, and `gsm_symbolic`'s does not see a sign. A number that is not equal
    counts only when the task itself gives it full marks (some accept rounding), and never with the other sign.

    Raises:
        ValueError: the row is not of a reasoning_gym task.
    """
    if not row.dataset.startswith(PREFIX):
        raise ValueError(f"row {row.index} is of {row.dataset!r}, which is no {PREFIX}TASK")
    marked = marked_answer(completion)
    answer = completion.strip() if marked is None else marked
    gold = to_number(row.answer)
    if gold is None:
        return _task_score(row, answer)
    number = to_number(last_number(answer) or "")
    if number is None:
        return 0.0
    if number == gold:
        return 1.0
    same_sign = (number < 0) == (gold < 0)
    return float(same_sign and _task_score(row, last_number(answer) or "") >= 1.0)


def _task_score(row: Row, answer: str) -> float:
    return _judge().task_score(row.dataset.removeprefix(PREFIX), row.metadata["parameters"], row.index, answer)


_BUILT_IN: dict[str, Reward] = {"math": math_reward, "gsm8k": math_reward, "reasoning_gym": reasoning_gym_reward}


def reward_names() -> tuple[str, ...]:
    """All rewards there are, built in or of installed packages."""
    return tuple(sorted({*_BUILT_IN, *(point.name for point in entry_points(group=ENTRY_POINTS))}))


def get_reward(name: str, *, asker: Asker | None = None) -> Reward:
    """The reward of this name.

    Raises:
        DataError: there is none.
    """
    if name in _BUILT_IN:
        return _BUILT_IN[name]
    for point in entry_points(group=ENTRY_POINTS):
        if point.name == name:
            found: Reward = point.load()
            return found
    near = closest(name, reward_names())
    raise (asker or Asker()).error(
        "AL566",
        f"there is no reward {name!r}",
        f"there are {', '.join(reward_names())}; a package adds one by the entry-point group {ENTRY_POINTS}",
        key="reward",
        alternatives=(near,) if near else (),
    )


def default_reward(dataset: str | None) -> str:
    """The name of the reward that a dataset's path asks for: the task's own scorer, else comparing the final answer."""
    return "reasoning_gym" if dataset is not None and dataset.startswith(PREFIX) else "math"


def score(reward: Reward, prompt: str, completion: str, row: Row) -> float:
    """Call a reward function, and see that it gave a number.

    Raises:
        RewardError: it raised (the cause is attached) or returned something else; it names function and row.
    """
    name = getattr(reward, "__qualname__", None) or type(reward).__name__
    where = (
        f"the reward {getattr(reward, '__module__', '?')}.{name} of row {row.index} of {row.dataset or 'the dataset'}"
    )
    try:
        value = reward(prompt, completion, row)
    except Exception as error:
        raise RewardError(f"{where} raised {type(error).__name__}: {error}") from error
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise RewardError(f"{where} returned {value!r}, which is not a number") from None
    if not math.isfinite(number):
        raise RewardError(f"{where} returned {number}, which is not a finite number")
    return number


def _judge() -> Judge:
    return _judge_of(os.getpid())  # a forked process must not share its parent's pipe


@functools.cache
def _judge_of(process: int) -> Judge:
    return Judge()
