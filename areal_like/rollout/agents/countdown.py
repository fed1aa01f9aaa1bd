"""`countdown`: make a number of other numbers, each used once, with + - * / and brackets."""

from __future__ import annotations

import random
from collections import Counter
from fractions import Fraction
from typing import Annotated

from pydantic import Field

from areal_like.data.answers import last_tagged
from areal_like.data.rows import Row
from areal_like.rollout.agents.arithmetic import ArithmeticFault, evaluate, numbers_in
from areal_like.rollout.agents.base import Episode, GroupedRolloutGenerator

__all__ = ["Countdown", "countdown_reward"]

_TRIES = 1000
_PROMPT = """\
Using all of the numbers {numbers}, write an expression that equals {target}. You may use + - * / and brackets; each \
number must be used exactly once.
Think step by step, and put the expression alone between <answer> and </answer>, for example <answer>(1 + 2) / 3\
</answer>."""


def countdown_reward(prompt: str, completion: str, row: Row) -> float:
    """1 when the expression in the last `<answer>` tag equals the target and uses each number of the row exactly once;
    else 0. Computed in fractions: 1/3*3 is 1. `EXPRESSION = TARGET` counts as the expression."""
    answer = last_tagged(completion)
    if not answer:
        return 0.0
    target = Fraction(row.metadata["target"])
    try:
        expression, _, stated = answer.partition("=")
        if stated and evaluate(stated) != target:
            return 0.0
        if Counter(numbers_in(expression)) != Counter(map(Fraction, row.metadata["numbers"])):
            return 0.0
        return float(evaluate(expression, powers=False) == target)
    except ArithmeticFault:
        return 0.0


class Countdown(GroupedRolloutGenerator):
    """Puzzles that have a solution, without end."""

    def __init__(
        self,
        numbers: Annotated[int, Field(ge=2, le=8, description="numbers of a puzzle")] = 4,
        largest: Annotated[int, Field(ge=2, le=10_000, description="largest number of a puzzle")] = 100,
        largest_target: Annotated[int, Field(ge=2, le=1_000_000, description="largest number to be made")] = 1000,
        format_reward: Annotated[
            float, Field(ge=0.0, le=1.0, description="for a wrong expression inside of the tags")
        ] = 0.0,
        seed: int = 0,
    ) -> None:
        self.numbers, self.largest, self.largest_target = numbers, largest, largest_target
        self.format_reward, self.seed = format_reward, seed
        self.problem(0)

    def problem(self, index: int) -> Row:
        """See `RolloutGenerator.problem`.

        Raises:
            ValueError: no puzzle of this kind was found.
        """
        draw = random.Random(f"countdown/{self.seed}/{index}")
        for _ in range(_TRIES):
            numbers = [draw.randint(1, self.largest) for _ in range(self.numbers)]
            value, solution = _combined(numbers, draw)
            if value.denominator == 1 and 1 <= value <= self.largest_target and value not in numbers:
                target = int(value)
                draw.shuffle(numbers)
                asked = _PROMPT.format(numbers=", ".join(map(str, numbers)), target=target)
                metadata = {"numbers": numbers, "target": target}
                return Row(({"role": "user", "content": asked},), solution, metadata, index, "countdown")
        raise ValueError(
            f"found no puzzle of {self.numbers} numbers up to {self.largest} that make a number up to "
            f"{self.largest_target}: make largest_target larger"
        )

    async def run(self, episode: Episode) -> float:
        """Ask once. A right answer is worth 1, a wrong one inside of the tags `format_reward`, anything else 0."""
        assert not isinstance(episode.row.prompt, str)
        answer = await episode.chat(episode.row.prompt)
        in_format = bool(last_tagged(answer.text))
        right = in_format and await episode.score(countdown_reward, answer.text) == 1.0
        episode.figures |= {"in_format": float(in_format), "right": float(right)}
        return 1.0 if right else self.format_reward * in_format


def _combined(numbers: list[int], draw: random.Random) -> tuple[Fraction, str]:
    """Join two of the terms by an operator until one is left: its value, and how it was made."""
    terms = [(Fraction(number), str(number)) for number in numbers]
    while len(terms) > 1:
        (left, left_text), (right, right_text) = (terms.pop(draw.randrange(len(terms))) for _ in range(2))
        operator = draw.choice("+-*/")
        if operator == "/" and (right == 0 or (left / right).denominator != 1):
            operator = "-"  # only divisions that come out even
        value = {
            "+": lambda a, b: a + b,
            "-": lambda a, b: a - b,
            "*": lambda a, b: a * b,
            "/": lambda a, b: a / b,
        }[operator](left, right)
        terms.append((value, f"({left_text} {operator} {right_text})"))
    value, text = terms[0]
    return value, text[1:-1]
