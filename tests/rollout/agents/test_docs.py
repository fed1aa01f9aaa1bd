"""docs/rollout.md against the code."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest
from doubles import scripted

from areal_like.config import ConfigError
from areal_like.rollout.agents.docs import markdown
from areal_like.rollout.agents.environment_file import load_environments

ROOT = Path(__file__).parents[3]
TEXT = (ROOT / "docs" / "rollout.md").read_text(encoding="utf-8")


def block(language: str) -> str:
    (found,) = re.findall(rf"^```{language}\n(.*?)^```$", TEXT, re.M | re.S)
    return found


def test_arguments_are_those_of_the_code() -> None:
    """`python -m areal_like.rollout.agents.docs` writes the section."""
    section = TEXT.split("<!-- agents:begin -->\n")[1].split("<!-- agents:end -->")[0]
    assert section == markdown()


def test_the_file_that_is_shown(tmp_path: Path) -> None:
    file = tmp_path / "environments.yaml"
    file.write_text(block("yaml"), encoding="utf-8")
    found = load_environments(file, seed=1)
    assert [(share.agent.name, share.groups) for share in found.training(8)] == [("sums", 6), ("calculator", 2)]
    assert [agent.name for agent in found.evaluation] == ["harder"] and found.diagnostics == ()


def test_the_error_that_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("environments.yaml").write_text("- agent_type: calculater\n")
    with pytest.raises(ConfigError) as caught:
        load_environments("environments.yaml", seed=1)
    assert str(caught.value) in TEXT


def test_your_own_in_ten_lines() -> None:
    source = block("python")
    names: dict[str, object] = {"__name__": "mine"}
    exec(source, names)
    lines = [line for line in source.split("class ")[1].splitlines() if line.strip()]
    assert len(lines) <= 10
    agent = names["Doubling"](7)
    agent.name = "doubling"
    response = asyncio.run(
        agent.evaluate(scripted(lambda row, index, attempt: [f" {2 * index + attempt}\n"]), prompts=7, samples=2)
    )
    assert response.metrics()["pass@1"] == 0.5 and response.metrics()["pass@2"] == 1.0


def test_every_row_of_the_study_that_concerns_agents_is_in_the_table() -> None:
    rows = re.findall(r"^\| (\d+) \|.*\| (done better|done|left out)", TEXT, re.M)
    assert [int(number) for number, _ in rows] == [*range(1, 12), 37, 38, 51]
