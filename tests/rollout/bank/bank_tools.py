"""Groups whose every value follows from their key, so that what comes back can be compared with what went in."""

from __future__ import annotations

import random

from areal_like.data.rows import Row
from areal_like.rollout.trajectories import Rollout, RolloutGroup, TokenRollout, Turn


def make_group(index: int, environment: str = "sums", *, version: int = 0, tokens: int = 12) -> RolloutGroup:
    """Three members: two turns, one turn, and one that failed. Log-probabilities are exact in float16."""
    draw = random.Random(f"{environment}/{index}")
    first = [draw.randrange(50_000) for _ in range(tokens)]

    def turn(prompt: list[int], count: int) -> Turn:
        drawn = [draw.randrange(50_000) for _ in range(count)]
        versions = sorted(version + draw.randrange(3) for _ in range(count))
        return Turn(prompt, drawn, [-draw.randrange(64) / 8 for _ in drawn], versions, "stop", f"Antwort {index} ✓")

    one = turn(first, tokens)
    two = turn([*one.prompt_ids, *one.token_ids, 7, 8, 9], tokens // 2)
    members = [
        TokenRollout([one, two], float(index % 3), figures={"format": 0.5}),
        TokenRollout([turn(first, tokens)], 0.0),
        TokenRollout([], None, "TimeoutError: the tool did not answer"),
    ]
    row = Row(f"What is {index} + 1?", str(index + 1), {"parts": (index, 1), "by place": {0: "a"}}, index, "toy")
    return RolloutGroup(environment, index, row, members)


def text_group(index: int, environment: str = "chat") -> RolloutGroup:
    prompt = ({"role": "system", "content": "Kurz."}, {"role": "user", "content": f"{index}?"})
    answer = {"role": "assistant", "content": "日本語\n\u2028 \ud800"}
    members = [Rollout([*prompt, answer], 1.0), Rollout([], None, "refused", {"calls": 2.0})]
    return RolloutGroup(environment, index, Row(prompt, ""), members)
