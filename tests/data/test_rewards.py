"""Rewards: what is right by hand, what upstream's scorers get wrong, time limits, threads, and functions that fail."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import reasoning_gym

from areal_like.config import TrainDatasetConfig
from areal_like.data import rewards
from areal_like.data.datasets import load_rows
from areal_like.data.judge import Judge
from areal_like.data.rewards import RewardError, get_reward, math_reward, reasoning_gym_reward, score
from areal_like.data.rows import DataError, Row

GSM8K = Row("How many?", "18", {"solution": "9 * 2 = 18 #### 18"}, 3, "openai/gsm8k")


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        (r"She makes 9 * 2 = \boxed{18} dollars.", 1.0),
        (r"\boxed{18.00}", 1.0),
        (r"\boxed{\$18}", 1.0),
        (r"\boxed{18 \text{ dollars}}", 1.0),  # by math-verify
        (r"\boxed{\frac{36}{2}}", 1.0),
        (r"\boxed{18 dollars}", 1.0),
        (r"\boxed{17} not 18", 0.0),
        (r"\boxed{}", 0.0),
        (r"\boxed{x}", 0.0),
        ("18 apples and 3 pears, so 18", 1.0),
        ("18 apples and 3 pears", 0.0),
        ("#### 18", 1.0),
        ("The answer is $18.", 1.0),
        ("180", 0.0),
        ("-18", 0.0),
        ("", 0.0),
        ("eighteen", 0.0),
    ],
)
def test_math_reward(completion, expected):
    assert math_reward("", completion, GSM8K) == expected


def test_math_reward_of_formulas():
    row = Row("Solve.", r"\frac{\sqrt{3}}{2}", {}, 0, "math")
    assert math_reward("", r"thus $\boxed{\frac{3}{2\sqrt{3}}}$", row) == 1.0
    assert math_reward("", r"thus $\boxed{\frac{1}{2}}$", row) == 0.0
    assert math_reward("", r"we get $\sqrt{3}/2$", row) == 1.0


def test_an_expression_that_never_ends_is_wrong_after_the_limit_and_the_next_is_judged():
    worker = Judge(timeout=1.0)
    try:
        assert worker.equal("1", "$1$")
        begin = time.monotonic()
        assert worker.equal("1", "$9^{9^{9^{9}}}+1$") == 0.0
        assert time.monotonic() - begin < 5
        assert worker.equal("1/2", "$0.5$")
    finally:
        worker.close()
    assert worker._process is None


def test_in_threads():
    """math-verify's own limit uses signals and raises outside of the main thread."""
    results: list[float] = []
    completions = [r"\boxed{\frac{36}{2}}", r"\boxed{\frac{35}{2}}"] * 4
    threads = [threading.Thread(target=lambda c=c: results.append(math_reward("", c, GSM8K))) for c in completions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == [0.0] * 4 + [1.0] * 4


def task_score(row: Row, answer: str) -> float:
    """What the package itself says."""
    task = reasoning_gym.create_dataset(row.dataset.split("/")[1], **json.loads(row.metadata["parameters"]))
    return task.score_answer(answer, task[row.index])


def chain_sum(**parameters) -> list[Row]:
    chosen = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1, "size": 40, **parameters}
    return list(load_rows(TrainDatasetConfig(path="reasoning_gym/chain_sum", kwargs=chosen), seed=5))


def test_chain_sum_reward_is_exact():
    row = next(r for r in chain_sum() if r.answer == "3")
    assert task_score(row, "13") == 0.5  # what the package gives to a wrong number that contains the right one
    for text, expected in [
        ("3", 1),
        ("3.", 1),
        ("The answer is 3.", 1),
        ("9 - 6 = 3", 1),
        ("03", 1),
        ("13", 0),
        ("-3", 0),
        ("3 or 4", 0),
        ("three", 0),
        ("9" * 300, 0),
        ("", 0),
    ]:
        assert reasoning_gym_reward("", text, row) == expected, text


def test_negative_answers():
    row = next(r for r in chain_sum() if r.answer.startswith("-"))
    assert reasoning_gym_reward("", f"{row.metadata['expression']} = {row.answer}", row) == 1.0
    assert reasoning_gym_reward("", row.answer.lstrip("-"), row) == 0.0


def test_gsm_symbolic_sees_the_sign():
    row = load_rows(TrainDatasetConfig(path="reasoning_gym/gsm_symbolic", kwargs={"size": 1}), seed=1)[0]
    assert task_score(row, f"-{row.answer}") == 1.0  # upstream's pattern drops the sign
    assert reasoning_gym_reward("", f"So it is -{row.answer}", row) == 0.0
    assert reasoning_gym_reward("", f"So it is {row.answer}.", row) == 1.0
    assert reasoning_gym_reward("", "So it is 987654", row) == 0.0  # and gives 0.01 to any number


@pytest.mark.parametrize(
    "task", ["course_schedule", "word_sorting", "countdown", "decimal_arithmetic", "rubiks_cube", "gcd"]
)
def test_tasks_of_every_kind_are_scored_by_their_own_scorer(task):
    rows = load_rows(TrainDatasetConfig(path=f"reasoning_gym/{task}", kwargs={"size": 3}), seed=2)
    for row in rows:
        right = row.answer or row.metadata.get("example_correct_answer", "")
        assert reasoning_gym_reward("", f"<answer>{right}</answer>", row) == 1.0
        assert reasoning_gym_reward("", "nonsense", row) < 0.2


def test_text_that_hangs_or_breaks_a_scorer_gets_nothing(monkeypatch):
    monkeypatch.setattr(rewards._judge(), "timeout", 1.0)
    row = load_rows(TrainDatasetConfig(path="reasoning_gym/countdown", kwargs={"size": 1}), seed=2)[0]
    begin = time.monotonic()
    assert reasoning_gym_reward("", "9**9**9**9", row) == 0.0  # SymPy would compute it
    assert time.monotonic() - begin < 8
    assert reasoning_gym_reward("", row.answer, row) == 1.0
    row = load_rows(TrainDatasetConfig(path="reasoning_gym/boxnet", kwargs={"size": 1}), seed=2)[0]
    with pytest.raises(TypeError):
        task_score(row, "1")
    assert reasoning_gym_reward("", "1", row) == 0.0


def test_the_judge_ends_with_its_parent():
    code = (
        "import os, signal; from areal_like.data.judge import Judge; j = Judge(); j.equal('1', '1');"
        "print(j._process.pid, flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    child = int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout)
    deadline = time.monotonic() + 10
    while Path(f"/proc/{child}").exists() and "Z" not in Path(f"/proc/{child}/stat").read_text().split(") ")[1][:1]:
        assert time.monotonic() < deadline, "the judge outlives its parent"
        time.sleep(0.05)


def test_a_judge_that_cannot_start_says_why(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(RuntimeError, match="did not start"):
        Judge().equal("1", "1")


def test_reasoning_gym_reward_needs_such_a_row():
    with pytest.raises(ValueError, match="openai/gsm8k"):
        reasoning_gym_reward("", "18", GSM8K)


def test_rewards_by_name():
    assert get_reward("gsm8k") is math_reward
    assert rewards.default_reward("reasoning_gym/gcd") == "reasoning_gym"
    assert rewards.default_reward("./my.jsonl") == "math"
    with pytest.raises(DataError, match=r"no reward 'gsm8'(.|\n)*try: gsm8k"):
        get_reward("gsm8")
    with pytest.raises(DataError, match="no reward 'os:system'"):
        get_reward("os:system")


class _Point:
    name = "mine"

    def load(self):
        return math_reward


def test_rewards_of_other_packages(monkeypatch):
    monkeypatch.setattr(rewards, "entry_points", lambda group: [_Point()] if group == "areal_like.rewards" else [])
    assert get_reward("mine") is math_reward
    assert "mine" in rewards.reward_names()


def broken(prompt, completion, row):
    raise KeyError("gold")


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (broken, r"broken of row 3 of openai/gsm8k raised KeyError: 'gold'"),
        (lambda p, c, r: None, "returned None, which is not a number"),
        (lambda p, c, r: "good", "returned 'good'"),
        (lambda p, c, r: float("nan"), "returned nan, which is not a finite number"),
    ],
)
def test_a_reward_that_fails_is_named(function, message):
    with pytest.raises(RewardError, match=message):
        score(function, "", "", GSM8K)


def test_scores_are_floats():
    assert score(lambda p, c, r: True, "", "", GSM8K) == 1.0
