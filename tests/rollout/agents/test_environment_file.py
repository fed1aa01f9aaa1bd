"""Environment files: what is read, what is refused and where it points; shares of a batch."""

from __future__ import annotations

import re
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_like.config import ConfigError
from areal_like.rollout.agents.calculator import Calculator
from areal_like.rollout.agents.countdown import Countdown
from areal_like.rollout.agents.environment_file import Environments, load_environments
from areal_like.rollout.agents.shares import shares

ROOT = Path(__file__).parents[3]
ENVIRONMENTS = ROOT / "examples" / "math" / "environments"


def load(tmp_path: Path, text: str, seed: int = 1) -> Environments:
    file = tmp_path / "environments.yaml"
    file.write_text(text, encoding="utf-8")
    return load_environments(file, seed=seed)


def refused(tmp_path: Path, text: str) -> list[tuple[str, int, int, str]]:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text)
    for d in caught.value.diagnostics:
        assert d.file == str(tmp_path / "environments.yaml") and d.message
        assert d.help or d.code == "AL802", "it says what to do"
    return [(d.code, d.line, d.column, d.key) for d in caught.value.diagnostics]


TWO = """\
- agent_type: calculator
  agent_args: {digits: 2}
  weight: 3
- agent_type: countdown
  weight: 1.0
- name: unseen
  agent_type: calculator
  evaluation_only: true
- name: never
  agent_type: countdown
  agent_args: {seed: 5}
  weight: 0
"""


def test_a_file(tmp_path: Path) -> None:
    found = load(tmp_path, TWO)
    training = found.training(8)
    assert [(share.agent.name, share.groups) for share in training] == [("calculator", 6), ("countdown", 2)]
    assert isinstance(training[0].agent, Calculator) and training[0].agent.digits == 2
    assert isinstance(training[1].agent, Countdown) and training[1].agent.seed == 1
    assert [agent.name for agent in found.evaluation] == ["unseen", "never"]
    assert found.evaluation[0].seed == 10**9 + 1 and found.evaluation[1].seed == 5
    assert found.training(8) == training and found.diagnostics == ()


def test_what_is_measured_has_other_problems_than_what_is_trained_on(tmp_path: Path) -> None:
    found = load(tmp_path, "- agent_type: calculator\n- {agent_type: calculator, name: b, evaluation_only: true}\n")
    trained, measured = found.training(1)[0].agent, found.evaluation[0]
    trained_on, measured_on = ({str(a.problem(i).prompt) for i in range(50)} for a in (trained, measured))
    assert len(trained_on) == 50 and not trained_on & measured_on


def test_the_names_of_megatron_rl(tmp_path: Path) -> None:
    found = load(tmp_path, "- agent_type: CountdownAgent\n  agent_args: {}\n  weight: 1.0\n  evaluation_only: false\n")
    assert [share.agent.name for share in found.training(4)] == ["countdown"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", [("AL830", 1, 1, None)]),
        ("[]", [("AL830", 1, 1, None)]),
        ("agent_type: gsm8k", [("AL830", 1, 1, None)]),
        ("- gsm8k", [("AL807", 1, 3, "[0]")]),
        ("- agent_type: calculater", [("AL831", 1, 15, "[0].agent_type")]),
        ("- agent_type: os.system", [("AL831", 1, 15, "[0].agent_type")]),
        ("- weight: 1", [("AL806", 1, 3, "[0]")]),
        ("- agent_type: countdown\n  wieght: 2", [("AL805", 2, 3, "[0].wieght")]),
        ("- agent_type: countdown\n  weight: two", [("AL807", 2, 11, "[0].weight")]),
        ("- agent_type: countdown\n  weight: true", [("AL807", 2, 11, "[0].weight")]),
        ("- agent_type: countdown\n  weight: -1", [("AL808", 2, 11, "[0].weight")]),
        ("- agent_type: countdown\n  weight: .nan", [("AL808", 2, 11, "[0].weight")]),
        ("- agent_type: countdown\n  evaluation_only: 1", [("AL807", 2, 20, "[0].evaluation_only")]),
        ("- agent_type: countdown\n  name: ''", [("AL808", 2, 9, "[0].name")]),
        ("- agent_type: countdown\n  agent_args: [1]", [("AL807", 2, 15, "[0].agent_args")]),
        ("- agent_type: countdown\n  agent_args: {nmbers: 3}", [("AL832", 2, 16, "[0].agent_args.nmbers")]),
        ("- agent_type: reasoning_gym", [("AL832", 1, 3, "[0].agent_args.task")]),
        ("- agent_type: countdown\n  agent_args: {numbers: 4.5}", [("AL833", 2, 25, "[0].agent_args.numbers")]),
        ("- agent_type: countdown\n  agent_args: {numbers: '4'}", [("AL833", 2, 25, "[0].agent_args.numbers")]),
        ("- agent_type: countdown\n  agent_args: {numbers: 1}", [("AL833", 2, 25, "[0].agent_args.numbers")]),
        (
            "- agent_type: countdown\n  agent_args: {numbers: 2, largest: 10000, largest_target: 2}",
            [("AL833", 2, 3, "[0].agent_args")],
        ),
        ("- agent_type: countdown\n- agent_type: countdown", [("AL834", 2, 15, "[1]")]),
        ("- {agent_type: countdown, name: a}\n- {agent_type: calculator, name: a}", [("AL834", 2, 34, "[1]")]),
        ("- agent_type: aime", [("AL837", 1, 15, "[0].agent_type")]),
        ("- agent_type: countdown\n  weight: 1\n  weight: 2", [("AL804", 3, 3, None)]),
        ("- agent_type: [", [("AL802", 1, 16, None)]),
        # a fault that the dataset finds points at the argument
        ("- agent_type: gsm8k\n  agent_args:\n    path: ./nowhere.jsonl", [("AL561", 3, 5, "[0].agent_args.path")]),
        (
            "- agent_type: reasoning_gym\n  agent_args:\n    task: chain_summ",
            [("AL563", 3, 5, "[0].agent_args.task")],
        ),
        (
            "- agent_type: reasoning_gym\n  agent_args: {task: gcd, parameters: {a: 1}}",
            [("AL564", 2, 27, "[0].agent_args.parameters")],
        ),
        # all at once
        (
            "- agent_type: nothing\n- agent_type: countdown\n  agent_args: {a: 1, numbers: x}\n- {}",
            [
                ("AL831", 1, 15, "[0].agent_type"),
                ("AL833", 3, 31, "[1].agent_args.numbers"),
                ("AL832", 3, 16, "[1].agent_args.a"),
                ("AL806", 4, 3, "[2]"),
            ],
        ),
    ],
)
def test_what_is_refused_and_where(tmp_path: Path, text: str, expected: list[tuple[str, int, int, str]]) -> None:
    assert refused(tmp_path, text) == expected


def test_an_unknown_type_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"try: calculator") as caught:
        load(tmp_path, "- agent_type: calculater")
    assert "areal_like.agents" in str(caught.value) and "gsm8k" in str(caught.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="AL801"):
        load_environments(tmp_path / "nowhere.yaml", seed=0)


def test_a_weight_of_what_is_never_sampled_is_told(tmp_path: Path) -> None:
    found = load(tmp_path, "- agent_type: countdown\n- {agent_type: calculator, weight: 2, evaluation_only: true}\n")
    assert [(share.agent.name, share.groups) for share in found.training(3)] == [("countdown", 3)]
    assert [(d.code, d.severity, d.line) for d in found.diagnostics] == [("AL838", "warning", 2)]


@pytest.mark.parametrize("groups", [1, 0])
def test_a_batch_that_cannot_hold_all(tmp_path: Path, groups: int) -> None:
    with pytest.raises(ConfigError, match=r"AL835.*fewer than the 2 environments(.|\n)*environments.yaml:1:3"):
        load(tmp_path, TWO).training(groups)


def test_nothing_to_train_on(tmp_path: Path) -> None:
    found = load(tmp_path, "- {agent_type: countdown, weight: 0}")
    with pytest.raises(ConfigError, match="nothing is trained on"):
        found.training(4)


def test_environments_made_in_python() -> None:
    one, other = Countdown(), Calculator()
    with pytest.raises(ValueError, match="name of its own"):
        Environments.of(one)
    one.name = other.name = "a"
    with pytest.raises(ValueError, match="name of its own"):
        Environments.of(one, other)
    other.name = "b"
    assert [share.groups for share in Environments.of(one, other).training(5)] == [3, 2]


# Shares. Expected values by hand.


@pytest.mark.parametrize(
    ("weights", "groups", "expected"),
    [
        ([1.0], 7, [7]),
        ([3, 1], 8, [6, 2]),
        ([3, 1], 4, [3, 1]),
        ([1, 1, 1], 4, [2, 1, 1]),  # equal remainders: the earlier one
        ([5, 3, 2], 7, [4, 2, 1]),  # 3.5, 2.1, 1.4: the remainder .5 wins
        ([0.1, 0.2, 0.7], 10, [1, 2, 7]),  # binary fractions of these do not sum to 1
        ([100, 1, 1], 8, [6, 1, 1]),  # 7.84, .08, .08: at least one each
        ([100, 0, 1], 8, [7, 0, 1]),
        ([10, 10, 1, 1], 4, [1, 1, 1, 1]),
        ([6, 4, 1, 1], 6, [2, 2, 1, 1]),  # 3, 2, .5, .5; then 4 for 6:4 = 2.4, 1.6
    ],
)
def test_shares(weights: list[float], groups: int, expected: list[int]) -> None:
    assert shares(weights, groups) == expected


@pytest.mark.parametrize(
    ("weights", "groups", "words"),
    [
        ([1, 1], 1, "1 groups cannot hold 2"),
        ([0, 0], 4, "no weight"),
        ([-1, 2], 4, "at least 0"),
        ([float("inf")], 1, "finite"),
    ],
)
def test_shares_refused(weights: list[float], groups: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        shares(weights, groups)


@given(st.lists(st.integers(0, 50), min_size=1, max_size=8).filter(any), st.integers(0, 40))
def test_shares_keep_their_promises(weights: list[int], more: int) -> None:
    sampled = [weight for weight in weights if weight]
    groups = len(sampled) + more
    found = shares(weights, groups)
    assert sum(found) == groups
    for weight, share in zip(weights, found, strict=True):
        quota = Fraction(weight * groups, sum(weights))
        assert (share == 0) == (weight == 0)
        assert share <= quota + 1 or share == 1
        if all(w * groups >= sum(sampled) for w in sampled):  # nobody had to be lifted: the quota rule
            assert int(quota) <= share <= int(quota) + 1


# Plug-ins


MODULE = """
from typing import Annotated
from pydantic import Field
from areal_like.data.rows import Row
from areal_like.rollout.agents.base import GroupedRolloutGenerator
class Doubling(GroupedRolloutGenerator):
    def __init__(self, largest: Annotated[int, Field(ge=1)] = 100): self.largest = largest
    def problem(self, index): return Row(f"What is twice {index % self.largest}?", str(2 * (index % self.largest)))
    async def run(self, episode): return float((await episode.chat(episode.row.prompt)).text == episode.row.answer)
class NoRun(GroupedRolloutGenerator):
    def problem(self, index): return Row("", "")
class Anything(Doubling):
    def __init__(self, **kwargs): pass
class Untyped(Doubling):
    def __init__(self, largest=3): pass
class Angry(Doubling):
    def __init__(self): raise KeyError("mine")
"""


PLUGINS = {
    "doubling": "mine:Doubling",
    "norun": "mine:NoRun",
    "nothing": "mine:Nothing",
    "nowhere": "nowhere:X",
    "row": "mine:Row",
    "anything": "mine:Anything",
    "untyped": "mine:Untyped",
    "angry": "mine:Angry",
    "gsm8k": "mine:Doubling",
}
NAMED = {
    "- {agent_type: doubling, agent_args: {largest: 9}}": "What is twice 2?",
    "- {agent_type: doubling, agent_args: {largest: 0}}": "AL833.*greater than or equal to 1",
    "- {agent_type: doublin}": "AL831(.|\n)*try: doubling",
    "- {agent_type: norun}": "AL836.*does not define run",
    "- {agent_type: nothing}": "AL836.*importing mine:Nothing of thirdparty failed",
    "- {agent_type: nowhere}": "AL836.*No module named 'nowhere'",
    "- {agent_type: row}": "AL836.*no GroupedRolloutGenerator",
    "- {agent_type: anything}": r"AL836.*\*\*kwargs",
    "- {agent_type: untyped}": "AL836.*of what type largest is",
    "- {agent_type: angry}": "AL836.*KeyError: 'mine'",
    "- {agent_type: gsm8k}": "AL836.*declared more than once",
    "- {agent_type: calculator}": "What is ",  # whatever is wrong with others
}


def test_agents_of_another_package(tmp_path: Path) -> None:
    info = tmp_path / "thirdparty-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: thirdparty\nVersion: 1.0\n")
    points = "".join(f"{name} = {target}\n" for name, target in PLUGINS.items())
    (info / "entry_points.txt").write_text(f"[areal_like.agents]\n{points}")
    (tmp_path / "mine.py").write_text(MODULE)
    for number, text in enumerate(NAMED):
        (tmp_path / f"{number}.yaml").write_text(text)
    code = f"""
import sys; sys.path.insert(0, {str(tmp_path)!r})
from areal_like.config import ConfigError
from areal_like.rollout.agents.environment_file import load_environments
for number in range({len(NAMED)}):
    try: print(load_environments(f"{tmp_path}/{{number}}.yaml", seed=1).training(1)[0].agent.problem(11).prompt)
    except ConfigError as error: print(error)
    print("----")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    answers = done.stdout.split("----\n")[:-1]
    assert len(answers) == len(NAMED), done.stderr
    for answer, expected in zip(answers, NAMED.values(), strict=True):
        assert re.search(expected, answer), answer


# What is shipped


def test_arithmetic_for_a_cpu() -> None:
    found = load_environments(ENVIRONMENTS / "arithmetic.yaml", seed=3)
    assert [(share.agent.name, share.groups) for share in found.training(8)] == [("sums", 6), ("calculator", 2)]
    assert [agent.name for agent in found.evaluation] == ["unseen-sums"]


@pytest.mark.parametrize("name", ["gsm8k.yaml", "dapo.yaml"])
def test_files_of_datasets(name: str, tmp_path: Path) -> None:
    """As they are, with local copies of the datasets in the place of the Hub's."""
    folder = tmp_path / "rows"
    folder.mkdir()
    for split in ("train", "test"):
        (folder / f"{split}.jsonl").write_text('{"question": "1 + 1?", "answer": "#### 2"}\n')
    text = (ENVIRONMENTS / name).read_text()
    changed = re.sub(r"agent_args: \{", f"agent_args: {{path: {folder}, ", text)
    changed = changed.replace("agent_args:\n", f"agent_args:\n    path: {folder}\n")
    assert changed.count(str(folder)) == 2
    found = load(tmp_path, changed)
    assert [agent.name for agent in found.evaluation] == {"gsm8k.yaml": ["gsm8k-test"], "dapo.yaml": ["aime"]}[name]
    (share,) = found.training(4)
    assert (share.agent.name, share.groups) == (name.removesuffix(".yaml"), 4)
    assert share.agent.format_reward == {"gsm8k.yaml": 0.5, "dapo.yaml": 0.0}[name]
    assert found.diagnostics == ()


def test_every_file_is_tested() -> None:
    assert {path.name for path in ENVIRONMENTS.iterdir()} == {"arithmetic.yaml", "gsm8k.yaml", "dapo.yaml"}
