"""The environments that are shipped: problems, rewards (values by hand), and episodes with scripted answers."""

# ruff: noqa: RUF001  models write other minus signs than ours

from __future__ import annotations

import ast
import asyncio
import json
import re
import time
from fractions import Fraction

import pytest
from doubles import ScriptedEpisode

from areal_like.data import rewards
from areal_like.data.prompts import conversation
from areal_like.data.rows import Row
from areal_like.rollout.agents.arithmetic import ArithmeticFault, evaluate, numbers_in, shown
from areal_like.rollout.agents.calculator import Calculator, calculator_reward, call_in, use
from areal_like.rollout.agents.countdown import Countdown, countdown_reward
from areal_like.rollout.agents.mathematics import AIME, DAPO, GSM8K, boxed_reward, tagged_reward, value_of_attempt
from areal_like.rollout.agents.reasoning import ReasoningGym

# Arithmetic


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1 + 2 * 3", 7),
        ("(1 + 2) * 3", 9),
        ("7 / 2", Fraction(7, 2)),
        ("1/3*3", 1),
        ("0.1 + 0.2", Fraction(3, 10)),
        ("9.99999999999999999999", Fraction(999999999999999999999, 10**20)),  # more digits than a float has
        ("-2**2", -4),
        ("2^10", 1024),
        ("2**-2", Fraction(1, 4)),
        ("(-1)**(10**60)", 1),
        ("1,234 × 2 ÷ 4 − 1", 616),
        ("[1 + 2] * 3", 9),
        ("--3", 3),
    ],
)
def test_evaluate(text, value):
    assert evaluate(text) == value


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no expression"),
        ("9**9**9", "too large"),
        ("9**9**9**9**9", "too large"),
        ("7**(10**8)", "too large"),  # could be computed, in a minute
        ("(9**99)**99", "too large"),
        ("2**512", "too large"),
        ("0.5**100000000000", "too large"),
        ("1/0", "division by zero"),
        ("0**-1", "division by zero"),
        ("2**0.5", "whole number"),
        ("1+", "not an expression"),
        ("07", "not an expression"),
        ("2(3)", "only numbers"),
        ("1,2", "only numbers"),
        ("7 // 2", "only numbers"),
        ("1e999", "only numbers"),
        ("__import__('os')", "only numbers"),
        ("x + 1", "only numbers"),
        ("1 if 2 else 3", "only numbers"),
        ("(" * 99 + "1" + ")" * 99 + "*" * 9, "."),
        ("1" * 201, "more than 200"),
    ],
)
def test_what_is_not_evaluated_and_that_it_takes_no_time(text, words):
    begin = time.process_time()
    with pytest.raises(ArithmeticFault, match=words):
        evaluate(text)
    assert time.process_time() - begin < 1.0


def test_powers_can_be_left_out():
    assert evaluate("2*3", powers=False) == 6
    with pytest.raises(ArithmeticFault):
        evaluate("2**3", powers=False)
    assert sorted(numbers_in("(25 - 5) * 25")) == [5, 25, 25]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (Fraction(6), "6"),
        (Fraction(-7, 8), "-0.875"),
        (Fraction(1, 3), "0.333333333333"),
        (Fraction(-1, 4), "-0.25"),
        (Fraction(10**20), "100000000000000000000"),
        (Fraction(1, 10**12), "0.000000000001"),
    ],
)
def test_shown(value, text):
    assert shown(value) == text


# Mathematics

EIGHTEEN = Row("How many?", "18", {}, 3, "test")


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        (r"She has \boxed{18}.", 1),
        (r"\boxed{17}", 0),
        (r"\boxed{17}, no: \boxed{18}", 1),
        (r"\boxed{18}, no: \boxed{17}", 0),
        ("The answer is 18", 0),  # right, not in the format
        ("<answer>18</answer>", 0),  # another format
        (r"\boxed{18", 0),  # cut off
        (r"\boxed{}", 0),
        (r"\boxed{\text{}}", 0),
        (r"\boxed{\boxed{18}}", 1),
        (r"\boxed{\frac{36}{2}}", 1),
        (r"\boxed{\text{18}}", 1),
        (r"\boxed{18.000}", 1),
        (r"\boxed{1,8}", 0),
        (r"\boxed{−18}", 0),
        (r"\boxed{$18$}", 1),
        (r"\boxed{9^{9^{9}}}", 0),
        ("", 0),
        ("\\boxed{" * 3000, 0),
        (r"\boxed{" + "9" * 5000 + "}", 0),
    ],
)
def test_boxed_reward(completion, expected, monkeypatch):
    monkeypatch.setattr(rewards._judge(), "timeout", 1.0)
    assert boxed_reward("", completion, EIGHTEEN) == expected


@pytest.mark.parametrize(
    ("completion", "answer", "expected"),
    [
        ("<answer> 18 </answer>", "18", 1),
        ("<answer>18</answer> I mean <answer>17</answer>", "18", 0),
        (r"\boxed{18}", "18", 0),
        ("<answer>18", "18", 0),
        ("<answer></answer>", "18", 0),
        ("<answer>−3</answer>", "-3", 1),  # a minus sign of unicode
        (r"<answer>\frac{1}{2}</answer>", "0.5", 1),
        (r"<answer>\sqrt{12}</answer>", r"2\sqrt{3}", 1),
        (r"<answer>3.46</answer>", r"2\sqrt{3}", 0),
    ],
)
def test_tagged_reward(completion, answer, expected):
    assert tagged_reward("", completion, Row("q", answer)) == expected


@pytest.mark.parametrize(
    ("right", "in_format", "ended", "expected"),
    [
        (True, True, True, 1.0),
        (False, True, True, 0.5),
        (True, True, False, 0.5),
        (False, True, False, 0.5),
        (False, False, True, 0.0),
        (False, False, False, 0.0),
    ],
)
def test_what_an_attempt_is_worth(right, in_format, ended, expected):
    assert value_of_attempt(right, in_format, ended, 0.5) == expected


@pytest.fixture
def dataset(tmp_path):
    rows = [{"question": f"What is {i} + {i}?", "answer": f"{i} + {i} = {2 * i}\n#### {2 * i}"} for i in range(4)]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return str(tmp_path)


@pytest.mark.parametrize(
    ("texts", "finish", "options", "expected", "figures"),
    [
        ([r"\boxed{4}"], "stop", {}, 1.0, (1, 1, 1)),
        ([r"\boxed{5}"], "stop", {}, 0.5, (1, 0, 1)),
        ([r"\boxed{4} and so on"], "length", {}, 0.5, (1, 1, 0)),
        (["4"], "stop", {}, 0.0, (0, 0, 1)),
        (["<answer>4</answer>"], "stop", {}, 0.0, (0, 0, 1)),
        (["<answer>4</answer>"], "stop", {"answer_format": "tagged"}, 1.0, (1, 1, 1)),
        ([r"\boxed{5}"], "stop", {"format_reward": 0.0}, 0.0, (1, 0, 1)),
    ],
)
def test_an_episode_of_gsm8k(dataset, texts, finish, options, expected, figures):
    agent = GSM8K(dataset, **{"format_reward": 0.5, "shuffle": False, **options})
    row = agent.problem(2)
    episode = ScriptedEpisode(row, texts, finish=finish)
    assert asyncio.run(agent.run(episode)) == expected
    assert tuple(episode.figures[name] for name in ("in_format", "right", "ended")) == figures
    (asked,) = episode.asked
    assert asked[0]["content"].startswith("What is 2 + 2?\n") and len(asked) == 1
    assert ("boxed" in asked[0]["content"]) == (agent.answer_format == "boxed")
    assert conversation(row) == asked  # the question is not put a second time


def test_columns_of_published_datasets(tmp_path):
    """DAPO-Math-17k has a conversation and a nested answer; AIME_2024 writes its columns with a capital."""
    dapo = {"prompt": [{"role": "user", "content": "1 + 1?"}], "reward_model": {"ground_truth": "2"}, "ability": "MATH"}
    aime = {"ID": "2024-I-1", "Problem": "2 + 2?", "Solution": "It is 4.", "Answer": 4}
    clean = {"prompt": "3 + 3?", "solution": "6", "data_source": "math_dapo"}  # DAPO-Math-17k-Processed
    math = {"problem": "4 + 4?", "solution": r"So \boxed{\frac{16}{2}}.", "level": 1}
    for name, record in (("dapo", dapo), ("aime", aime), ("clean", clean), ("math", math)):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(record))
    trained, measured = DAPO(str(tmp_path / "dapo.jsonl")), AIME(str(tmp_path / "aime.jsonl"))
    assert trained.problem(5).answer == "2" and measured.problem(0).answer == "4" and measured.distinct == 1
    assert DAPO(str(tmp_path / "clean.jsonl")).problem(0).answer == "6"
    assert DAPO(str(tmp_path / "math.jsonl")).problem(0).answer == r"\frac{16}{2}"
    assert trained.problem(0).prompt[0]["content"].startswith("1 + 1?\nPlease")
    assert measured.problem(0).prompt[0]["content"].startswith("2 + 2?\nPlease")


# Countdown

PUZZLE = Row("", "", {"numbers": [25, 5, 5, 3], "target": 128})


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        ("<answer>25 * 5 + 5 - 3</answer>", 0),  # 127
        ("<answer>5 * 25 + 3 * 5</answer>", 0),  # 140
        ("<answer>25 * 5 + 3 + 5 - 5</answer>", 0),  # 128, but one 5 too many
        ("<answer>25 * 5 + 3</answer>", 0),  # 128, but one 5 too few
        ("<answer>(25 + 5/5) * 3 + 50</answer>", 0),
        ("<answer>25**2</answer>", 0),
        ("<answer>128</answer>", 0),
        ("<answer></answer>", 0),
        ("<answer>25 * (5 + 5) / 3", 0),
        ("<answer>9**9**9</answer>", 0),
        ("", 0),
    ],
)
def test_countdown_reward_of_wrong_ones(completion, expected):
    assert countdown_reward("", completion, PUZZLE) == expected


@pytest.mark.parametrize(
    ("numbers", "target", "text", "expected"),
    [
        ([25, 5, 5, 3], 127, "<answer>25 * 5 + 5 - 3</answer>", 1),
        ([25, 5, 5, 3], 127, "<answer>25 × 5 + (5 − 3) = 127</answer>", 1),
        ([25, 5, 5, 3], 127, "<answer>25 * 5 + 5 - 3 = 128</answer>", 0),
        ([25, 5, 5, 3], 127, "25 * 5 + 5 - 3", 0),
        ([8, 3, 8, 3], 24, "<answer>8 / (3 - 8 / 3)</answer>", 1),  # through thirds
        ([2, 3], 8, "<answer>2 ** 3</answer>", 0),  # no operator of the game
        ([25, 5], 30, "<answer>25 + 5.0</answer>", 1),
        ([2, 5, 5], 10, "<answer>25 - 5 * 5</answer>", 0),  # digits may not be joined
    ],
)
def test_countdown_reward(numbers, target, text, expected):
    assert countdown_reward("", text, Row("", "", {"numbers": numbers, "target": target})) == expected


@pytest.mark.parametrize("options", [{}, {"numbers": 3, "largest": 9, "largest_target": 50}, {"numbers": 2}])
def test_every_puzzle_has_a_solution(options):
    """Checked with Python's own parser and evaluator, not with ours."""
    agent = Countdown(seed=4, **options)
    prompts = set()
    for index in range(300):
        row = agent.problem(index)
        assert row == agent.problem(index)
        prompts.add(row.prompt[0]["content"])
        tree = ast.parse(row.answer, mode="eval")
        used = sorted(node.value for node in ast.walk(tree) if isinstance(node, ast.Constant))
        assert used == sorted(row.metadata["numbers"]) and len(used) == agent.numbers
        assert eval(row.answer) == row.metadata["target"] and 1 <= row.metadata["target"] <= agent.largest_target
        shown = [int(n) for n in re.findall(r"\d+", row.prompt[0]["content"].split("You may")[0])]
        assert shown == [*row.metadata["numbers"], row.metadata["target"]]
        assert countdown_reward("", f"<answer>{row.answer}</answer>", row) == 1.0
    assert len(prompts) > 280 or options.get("largest") == 9
    assert Countdown(seed=5, **options).problem(0) != agent.problem(0)


@pytest.mark.parametrize(("text", "expected"), [("right", 1.0), ("<answer>1+1</answer>", 0.1), ("no", 0.0)])
def test_an_episode_of_countdown(text, expected):
    agent = Countdown(format_reward=0.1)
    row = agent.problem(7)
    text = f"<answer>{row.answer}</answer>" if text == "right" else text
    assert asyncio.run(agent.run(ScriptedEpisode(row, [text]))) == pytest.approx(expected)


# reasoning-gym


def test_any_task():
    agent = ReasoningGym("chain_sum", {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}, seed=3)
    assert agent.distinct == 10_000
    assert agent.problem(10_003) == agent.problem(3) != agent.problem(4)
    row = agent.problem(3)
    assert eval(row.metadata["expression"]) == int(row.answer)
    episode = ScriptedEpisode(row, [f"It is {row.answer}."])
    assert asyncio.run(agent.run(episode)) == 1.0
    assert episode.asked == [
        [{"role": "user", "content": f"What is {row.metadata['expression']}? Answer with the number only."}]
    ]
    assert asyncio.run(agent.run(ScriptedEpisode(row, [f"It is {int(row.answer) + 10}."]))) == 0.0
    assert ReasoningGym("word_sorting", {"size": 3}).distinct == 3


# Calculator


@pytest.mark.parametrize(
    ("text", "call"),
    [
        ("<calc>1+1</calc>", "1+1"),
        ("Let me see: <calc> 1+1 </calc> and <calc>2</calc>", "1+1"),
        ("<calc>1+1", "1+1"),  # a server leaves out the stop string
        ("1+1</calc>", None),
        ("<answer>2</answer>", None),
        ("", None),
    ],
)
def test_calls_of_the_tool(text, call):
    assert call_in(text) == call


def test_the_tool():
    assert use("1,000 * 3") == ("<result>3000</result>", True)
    assert use("9**9**9") == ("<result>error: the number is too large</result>", False)
    assert use("") == ("<result>error: there is no expression</result>", False)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<answer>-12</answer>", 1),
        ("<answer>−12.0</answer>", 1),
        ("<answer>12</answer>", 0),
        ("-12", 0),
        ("<answer>10 - 22</answer>", 0),
        ("<answer></answer>", 0),
        ("", 0),
    ],
)
def test_calculator_reward(text, expected):
    assert calculator_reward("", text, Row("", "-12")) == expected


def test_questions_are_right_and_stay_the_same():
    agent = Calculator(terms=4, digits=2, seed=1)
    rows = [agent.problem(i) for i in range(200)]
    assert rows == [Calculator(terms=4, digits=2, seed=1).problem(i) for i in range(200)]
    for row in rows:
        assert eval(row.metadata["expression"]) == int(row.answer)  # Python's own arithmetic
        assert row.metadata["expression"] in row.prompt[0]["content"]
        assert all(1 <= int(n) <= 99 for n in re.findall(r"\d+", row.metadata["expression"]))
    assert len({row.metadata["expression"] for row in rows}) == 200


def episode_of(texts, *, finish="stop", **options):
    agent = Calculator(seed=2, **options)
    row = agent.problem(0)
    texts = [text.replace("RIGHT", row.answer) for text in texts]
    episode = ScriptedEpisode(row, texts, finish=finish)
    return asyncio.run(agent.run(episode)), episode


def test_several_turns():
    reward, episode = episode_of(["<calc>6*7</calc>", "then <calc>1/0</calc>", "so <answer>RIGHT</answer>"])
    assert reward == 1.0
    assert episode.figures == {"turns": 3, "tool_calls": 2, "tool_errors": 1, "answered": 1}
    assert episode.sampling == [{"stop": ("</calc>",)}] * 3
    first, second, third = episode.asked
    assert second[:1] == first and third[:3] == second  # each goes on from the one before
    assert second[1:] == [
        {"role": "assistant", "content": "<calc>6*7</calc>"},
        {"role": "user", "content": "<result>42</result>"},
    ]
    assert third[4]["content"] == "<result>error: division by zero</result>"


@pytest.mark.parametrize(
    ("texts", "finish", "expected", "turns"),
    [
        (["<answer>RIGHT</answer>"], "stop", 1.0, 1),
        (["<answer>0.5</answer>"], "stop", 0.1, 1),
        (["I do not know"], "stop", 0.0, 1),
        (["<calc>1</calc>"] * 3, "stop", 0.0, 3),  # the turns are used up
        (["<calc>1</calc>", "<answer>RIGHT</answer> <calc>2"], "length", 0.0, 2),  # still calling
        (["<calc>1+"], "length", 0.0, 1),
    ],
)
def test_ends_of_an_episode(texts, finish, expected, turns):
    reward, episode = episode_of(texts, finish=finish, max_turns=3, format_reward=0.1)
    assert reward == expected and episode.figures["turns"] == turns == len(episode.turns)
