"""What the documents show loads, runs and exists: YAML, Python, links, the layout string, names of files."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from documents import DOCUMENTS, ROOT, Block, blocks

from areal_like.alloc import ModelAllocation
from areal_like.config import load_config
from areal_like.data.rows import Row

EXAMPLES = sorted(path for path in (ROOT / "examples").rglob("*.y*ml") if path.parent.name != "environments")


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.name)
def test_example_loads(path: Path) -> None:
    config = load_config(path)
    assert [d.render() for d in config.diagnostics if d.severity == "error" and d.code != "AL205"] == []


YAML = [block for block in blocks("yaml", "yml") if not block.text.startswith("- agent_type")]


@pytest.mark.parametrize("block", YAML, ids=str)
def test_yaml_block_loads(block: Block, tmp_path: Path) -> None:
    file = tmp_path / "block.yaml"
    file.write_text(block.text, encoding="utf-8")
    config = load_config(file)
    config.ensure_runnable()
    assert not config.diagnostics, [d.render() for d in config.diagnostics]


PYTHON = [block for block in blocks("python") if not block.text.startswith("from areal_like.alloc import BackendDesc")]


@pytest.mark.parametrize("block", PYTHON, ids=str)
def test_python_block_runs(block: Block) -> None:
    names: dict[str, object] = {"__name__": "block"}
    exec(compile(block.text, str(block), "exec"), names)
    if "short_and_right" in names:
        reward = names["short_and_right"]
        assert callable(reward)
        assert reward("1 + 1?", "2", Row("1 + 1?", "2")) == pytest.approx(0.99)
        assert reward("1 + 1?", "three", Row("1 + 1?", "2")) == pytest.approx(-0.05)


def anchor(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: p.name)
def test_links(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    targets = re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r'src="([^"]+)"', text)
    for target in targets:
        if re.match(r"https?://", target):
            continue
        path, _, part = target.partition("#")
        file = (document.parent / path).resolve() if path else document
        assert file.exists(), f"{document.name} links to {target}"
        assert file.is_relative_to(ROOT)
        if part:
            headings = re.findall(r"^#+ (.+)$", file.read_text(encoding="utf-8"), re.M)
            assert part in map(anchor, headings), f"{document.name} links to {target}"


STRINGS = re.findall(r"\| `(megatron:[^`]+)`: (\d+) ranks", (ROOT / "README.md").read_text(encoding="utf-8"))


def test_table_of_the_readme() -> None:
    assert len(STRINGS) == 7
    for text, ranks in STRINGS:
        assert ModelAllocation.parse(text.replace("\\|", "|")).world_size == int(ranks)


@pytest.mark.parametrize("document", [ROOT / "README.md", *(ROOT / "docs").glob("*.md")], ids=lambda p: p.name)
def test_allocations_in_the_text(document: Path) -> None:
    """Indented `role.backend: string` lines are real allocations."""
    for text in re.findall(r"^ +(?:\w+\.)?backend:\s+(\S+)$", document.read_text(encoding="utf-8"), re.M):
        ModelAllocation.parse(text)


def test_files_that_the_architecture_names_exist() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    names = set(re.findall(r"`([\w/]+\.(?:py|lark))`", text))
    assert len(names) > 25
    for name in names:
        assert list((ROOT / "areal_like").rglob(name)) or (ROOT / name).exists(), name
    for folder in re.findall(r"^\| `(\w+)/`", text, re.M):
        assert (ROOT / "areal_like" / folder).is_dir()


def test_keys_and_files_of_a_run() -> None:
    """Figures and files that the quick start names are those that the code writes."""
    text = (ROOT / "docs" / "quickstart.md").read_text(encoding="utf-8")
    source = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "areal_like").rglob("*.py"))
    for name in ("metrics.jsonl", "samples.jsonl", "tensorboard", "checkpoints", "logs", "reward/mean", "grad_norm"):
        assert name in text and f"{name}" in source
    assert f"step-{13:06d}" in text
