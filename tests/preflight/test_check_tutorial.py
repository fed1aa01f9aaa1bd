"""docs/check.md: each `$ areal-like check FILE` prints what the page shows, on the files that the page describes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from areal_like.cli import main
from areal_like.config import load_config

PAGE = (Path(__file__).parents[2] / "docs" / "check.md").read_text(encoding="utf-8")
BLOCKS = [(m[1], m[2]) for m in re.finditer(r"^```(\w+)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)]
SHOWN = [text for language, text in BLOCKS if text.startswith("$ areal-like ")]
EXPECTED_STATUS = {"broken.yaml": 1, "better.yaml": 1, "works.yaml": 0, "fixed.yaml": 0, "quiet.yaml": 0}


@pytest.fixture(scope="module")
def files() -> dict[str, str]:
    """The files of the tutorial, made by the changes that its text names."""
    (broken,) = [text for _, text in BLOCKS if text.startswith("# broken.yaml")]
    (fixed,) = [text for _, text in BLOCKS if text.startswith("# fixed.yaml")]
    (quiet_line,) = [text for _, text in BLOCKS if text.startswith("  backend: megatron")]
    better = broken.replace("temprature", "temperature")
    assert "megatron:d1t2p4" in PAGE
    works = better.replace("megatron:d1p4t3", "megatron:d1t2p2").replace("queue_size: 16", "queue_size: 96")
    works = works.replace("max_tokens_per_mb: 4096", "max_tokens_per_mb: 8192")
    quiet = works.replace("  backend: megatron:d1t2p2\n", quiet_line)
    return {
        "broken.yaml": broken,
        "better.yaml": better,
        "works.yaml": works,
        "fixed.yaml": fixed,
        "quiet.yaml": quiet,
    }


def test_every_file_of_the_page_is_tested(files: dict[str, str]) -> None:
    assert {text.splitlines()[0].split()[-1] for text in SHOWN} == set(files) == set(EXPECTED_STATUS)


@pytest.mark.parametrize("shown", SHOWN, ids=lambda text: text.splitlines()[0])
def test_a_command_prints_what_is_shown(
    shown: str,
    files: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    command, _, output = shown.partition("\n")
    monkeypatch.chdir(tmp_path)
    for name, text in files.items():
        Path(name).write_text(text, encoding="utf-8")
    words = command.split()[2:]
    assert main(words) == EXPECTED_STATUS[words[-1]]
    assert capsys.readouterr().out == output


def test_the_fixed_file_can_start(files: dict[str, str], tmp_path: Path) -> None:
    file = tmp_path / "fixed.yaml"
    file.write_text(files["fixed.yaml"], encoding="utf-8")
    load_config(file).ensure_runnable()
