"""Every shell command of the documents is executed, or stands in LONG with the reason why not and is checked."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from documents import ROOT, Block, blocks, section

from areal_like.config import load_config
from areal_like.data.rows import Row
from areal_like.rollout.bank import RolloutBank
from areal_like.rollout.trajectories import Rollout, RolloutGroup

LONG = {
    "make demo": "minutes; the run that the README's curve is of",
    "make test": "this is it",
    "make lint": "what make test has run before the tests",
    "make test-all": "more than make test",
    "make test-gpu": "a GPU",
    "make bench": "minutes",
    "source .venv/bin/activate": "of a shell",
    "examples/math/gsm8k_rl.py": "minutes, or a GPU; the configuration and the overrides are loaded",
    "-m pip install": "a download; the extras that it names are looked up",
}
"""Beginning or part of a command: why it is not executed."""

SHELL = blocks("sh", "bash", "shell", "console")


def commands(block: Block) -> list[str]:
    return [line for line in block.text.splitlines() if line.strip() and not line.startswith("#")]


ALL = [(f"{block}", command) for block in SHELL for command in commands(block)]


def without_comment(command: str) -> list[str]:
    words = shlex.split(command, comments=True)
    if words and words[0] in ("python", ".venv/bin/python"):
        words[0] = sys.executable
    if words and words[0] in ("areal-like", ".venv/bin/areal-like"):
        words[0] = str(Path(sys.executable).with_name("areal-like"))
    return words


def reason(command: str) -> str | None:
    plain = " ".join(shlex.split(command, comments=True))
    return next((why for part, why in LONG.items() if plain == part or (part[0] in "e-" and part in plain)), None)


def run(words: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        words, cwd=folder, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=240
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder that looks like the checkout after the demo has run."""
    folder = tmp_path_factory.mktemp("checkout")
    (folder / "examples").symlink_to(ROOT / "examples")
    demo = folder / "experiments" / "gsm8k-grpo" / "cpu"
    demo.mkdir(parents=True)
    with RolloutBank.open(demo / "rollout_bank") as bank:
        bank.append(RolloutGroup("gsm8k", 17, Row("2 + 2?", "4"), [Rollout([], 1.0)])).result(30)
    (demo / "metrics.jsonl").write_text(
        "".join(f'{{"step": {i}, "time": {i}.0, "reward/mean": 0.{i}}}\n' for i in (1, 2, 3))
    )
    return folder


def test_there_are_commands() -> None:
    assert len(ALL) > 15
    unfenced = [str(block) for block in blocks("") if re.search(r"^\s*(make|areal-like|python) ", block.text, re.M)]
    assert not unfenced, "fences with commands need the language sh"


SHORT = {command: where for where, command in ALL if reason(command) is None}


@pytest.mark.parametrize("command", [c for c in SHORT if " try " not in c], ids=lambda c: c)
def test_short_command(command: str, folder: Path) -> None:
    done = run(without_comment(command), folder)
    assert done.returncode == 0, f"{SHORT[command]}: {command}\n{done.stdout}{done.stderr}"
    assert done.stdout or list(folder.glob("*.svg"))


TRIALS = [c for c in SHORT if " try " in c]
DENSE = [c for c in TRIALS if "--model" not in c]


def test_try_prints_what_the_readme_shows(folder: Path) -> None:
    """Executed once: the figures differ a little from machine to machine, the lines and the layout do not."""
    assert {without_comment(c)[1:] == ["try", "megatron:d1t2"] for c in DENSE} == {True}
    done = run(without_comment(DENSE[0]), folder)
    assert done.returncode == 0, done.stdout + done.stderr
    shown = section(ROOT / "README.md", "try").replace("```text\n", "").replace("```\n", "")
    assert shape(done.stdout) == shape(shown)


def shape(text: str) -> list[str]:
    """The lines of a trial with its measurements masked."""
    lines = text.strip().splitlines()
    return [re.sub(r"\s+", " ", re.sub(r"\d+\.\d+(e-\d+)?|(?<= )\d{3,}$", "#", line)) for line in lines]


@pytest.mark.slow
@pytest.mark.parametrize("command", [c for c in TRIALS if c not in DENSE], ids=lambda c: c)
def test_other_trials(command: str, folder: Path) -> None:
    done = run(without_comment(command), folder)
    assert done.returncode == 0, done.stdout + done.stderr


EXAMPLES = [(where, command) for where, command in ALL if "gsm8k_rl.py" in command]


@pytest.mark.parametrize(("where", "command"), EXAMPLES, ids=[command for _, command in EXAMPLES])
def test_example_command_loads(where: str, command: str) -> None:
    words = without_comment(command)
    assert (ROOT / words[1]).is_file() and words[2] == "--config"
    config = load_config(ROOT / words[3], words[4:])
    assert config.actor.backend in (
        words[-1].removeprefix("actor.backend="),
        load_config(ROOT / words[3]).actor.backend,
    )


def test_the_refused_example_is_refused(folder: Path, tmp_path: Path) -> None:
    (refused,) = [command for _, command in EXAMPLES if "# exits with 2" in command]
    done = run([*without_comment(refused), f"cluster.fileroot={tmp_path}"], folder)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "9 attention heads do not divide by t2" in done.stderr
    assert "actor.backend" in done.stderr and "t can be 1, 3" in done.stderr and "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir()), "nothing was started, so nothing is left"


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    named = {command.split()[1] for _, command in ALL if command.startswith("make ")}
    assert named <= targets and {"demo", "test"} <= named


def test_mesh_of_the_readme_is_what_the_command_prints(folder: Path) -> None:
    done = run(without_comment("areal-like mesh 'megatron:d2t2p2'"), folder)
    assert section(ROOT / "README.md", "mesh") == f"```text\n{done.stdout}```\n"


def test_every_reason_is_needed() -> None:
    plain = [" ".join(shlex.split(command, comments=True)) for _, command in ALL]
    assert [part for part in LONG if not any(part in command for command in plain)] == []
