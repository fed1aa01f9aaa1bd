"""`calculator`: sums that are hard in the head, and a tool that does them; an episode has several turns.

The model writes `<calc>EXPRESSION</calc>` and is answered `<result>VALUE</result>` or `<result>error: ...</result>`;
it ends with `<answer>VALUE</answer>`.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from fractions import Fraction
from typing import Annotated

from pydantic import Field

from areal_like.data.answers import last_tagged, to_number
from areal_like.data.rows import Message, Row
from areal_like.rollout.agents.arithmetic import ArithmeticFault, evaluate, shown
from areal_like.rollout.agents.base import Episode, GroupedRolloutGenerator
from areal_like.rollout.trajectories import Rollout, TokenRollout

__all__ = ["Calculator", "calculator_reward", "call_in", "use"]

OPEN, CLOSE = "<calc>", "</calc>"
_PROMPT = """\
What is {expression}?
You have a calculator: write {open}EXPRESSION{close} with numbers, + - * / ** and brackets, and stop; its result is \
the next message. You may use it up to {uses} times. When you know the value, write <answer>VALUE</answer>."""


def calculator_reward(prompt: str, completion: str, row: Row) -> float:
    """1 when the last `<answer>` tag holds the value of `row.answer`, as a number or a fraction; else 0."""
    answer = last_tagged(completion)
    value = to_number(answer) if answer else None
    return float(value is not None and value == to_number(row.answer))


def call_in(text: str) -> str | None:
    """The expression that a turn asks the calculator for: the first call in it; None when it makes none.

    The end tag may be missing at the end of the text: a server leaves out the stop string that ended it.
    """
    _, begun, rest = text.partition(OPEN)
    return rest.partition(CLOSE)[0].strip() if begun else None


def use(expression: str) -> tuple[str, bool]:
    """What the calculator answers, and whether that is a value."""
    try:
        return f"<result>{shown(evaluate(expression))}</result>", True
    except ArithmeticFault as fault:
        return f"<result>error: {fault}</result>", False


class Calculator(GroupedRolloutGenerator):
    """Chains of operations on numbers of several digits. Figures: `turns`, `tool_calls`, `tool_errors`, `answered`."""

    def __init__(
        self,
        terms: Annotated[int, Field(ge=2, le=12, description="numbers of a question")] = 3,
        digits: Annotated[int, Field(ge=1, le=9, description="digits of a number, at most")] = 3,
        max_turns: Annotated[int, Field(ge=1, le=32, description="calls of the model in an episode, at most")] = 4,
        format_reward: Annotated[
            float, Field(ge=0.0, le=1.0, description="for a wrong value inside of the tags")
        ] = 0.0,
        seed: int = 0,
    ) -> None:
        self.terms, self.digits, self.max_turns = terms, digits, max_turns
        self.format_reward, self.seed = format_reward, seed

    def problem(self, index: int) -> Row:
        """See `RolloutGenerator.problem`."""
        draw = random.Random(f"calculator/{self.seed}/{index}")
        expression = str(draw.randint(1, 10**self.digits - 1))
        for _ in range(self.terms - 1):
            expression += f" {draw.choice('+-*')} {draw.randint(1, 10**self.digits - 1)}"
        uses = self.max_turns - 1
        asked = _PROMPT.format(expression=expression, open=OPEN, close=CLOSE, uses=uses)
        answer: Fraction = evaluate(expression)
        prompt = ({"role": "user", "content": asked},)
        return Row(prompt, str(answer), {"expression": expression}, index, "calculator")

    async def run(self, episode: Episode) -> float:
        """Answer calls of the tool until there is none, then judge what was said last.

        A right answer is worth 1, a wrong one inside of the tags `format_reward`; so are episodes that have used up
        their turns without an answer: 0.
        """
        said: list[str] = []
        while len(said) < self.max_turns:
            answer = await episode.chat(_conversation(episode.row, said), stop=(CLOSE,))
            said.append(answer.text)
            if call_in(answer.text) is None or answer.finish_reason == "length":
                break
        calls = [call for text in said if (call := call_in(text)) is not None]
        answered = call_in(said[-1]) is None and bool(last_tagged(said[-1]))
        episode.figures |= {
            "turns": float(len(said)),
            "tool_calls": float(len(calls)),
            "tool_errors": float(sum(not use(call)[1] for call in calls)),
            "answered": float(answered),
        }
        if not answered:
            return 0.0
        right = await episode.score(calculator_reward, said[-1]) == 1.0
        return 1.0 if right else self.format_reward

    def transcript(self, row: Row, rollout: TokenRollout | Rollout) -> list[Message]:
        """See `Agent.transcript`: the calculator says the same to the same call."""
        if isinstance(rollout, Rollout):
            return list(rollout.messages)
        said = [turn.text for turn in rollout.turns]
        return [*_conversation(row, said[:-1]), {"role": "assistant", "content": said[-1]}]


def _conversation(row: Row, said: Sequence[str]) -> list[Message]:
    """What the model is shown after it said this, each time calling the tool."""
    assert not isinstance(row.prompt, str)
    messages: list[Message] = list(row.prompt)
    for text in said:
        result, _ = use(call_in(text) or "")
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": result}]
    return messages
