"""Licence, metadata, dependencies and what must not stand in a file of the project."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
import tomllib
from importlib.metadata import entry_points, metadata, packages_distributions, requires, version

import pytest
from documents import ROOT
from packaging.requirements import Requirement

import areal_like

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
DECLARED = {Requirement(text).name.lower() for text in PROJECT["dependencies"]}
OPTIONAL = {
    Requirement(text).name.lower()
    for extra, texts in PROJECT["optional-dependencies"].items()
    if extra != "dev"
    for text in texts
}
"""What extras bring: imported where an option needs it."""
BROUGHT_IN = {
    "filelock": "torch",
    "huggingface-hub": "transformers",
    "jinja2": "torch",
    "pyarrow": "datasets",
    "pydantic-core": "pydantic",
    "tokenizers": "transformers",
    "triton": "torch",
}
"""Imported here, declared by a declared dependency that cannot do without: name, by whom."""
NOT_IMPORTED = {"einops": "mbridge imports it", "tensorboard": "torch.utils.tensorboard writes with it"}


def tracked() -> list[str]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    if listed.returncode:
        pytest.skip("not a git checkout")
    return [name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]


def test_licence() -> None:
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert re.match(r"\s+Apache License\n\s+Version 2\.0, January 2004", text)
    assert "END OF TERMS AND CONDITIONS" in text
    assert PROJECT["license"] == "Apache-2.0" == metadata("areal-like")["License-Expression"]


def test_metadata() -> None:
    assert version("areal-like") == PROJECT["version"]
    assert PROJECT["readme"] == "README.md"
    assert PROJECT["requires-python"] == ">=3.12,<3.13"
    assert set(PROJECT["optional-dependencies"]) == {"gpu", "sglang", "vllm", "ray", "megatron-bridge", "dev"}
    assert (ROOT / "areal_like" / "py.typed").exists()
    assert areal_like.__file__ == str(ROOT / "areal_like" / "__init__.py"), "another checkout is installed"


def test_entry_points_can_be_loaded() -> None:
    (script,) = entry_points(group="console_scripts", name="areal-like")
    assert script.load() is importlib.import_module("areal_like.cli").main
    found = {point.name: point.load() for point in entry_points(group="areal_like.backends")}
    assert set(PROJECT["entry-points"]["areal_like.backends"]) <= set(found)
    assert all(descriptor.name == name for name, descriptor in found.items())


def third_party_imports() -> set[str]:
    """Top-level names that the package imports, anywhere in a file, without those of extras."""
    names = set()
    for path in (ROOT / "areal_like").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names.add(node.module.split(".")[0])
    return names - set(sys.stdlib_module_names) - {"areal_like", "transformer_engine", "peft"}


def test_what_is_imported_is_declared_and_the_other_way_round() -> None:
    by_module = packages_distributions()
    used, undeclared = set(), []
    for name in sorted(third_party_imports()):
        distributions = {d.lower().replace("_", "-") for d in by_module.get(name, ())}
        used |= distributions
        if not distributions & (DECLARED | OPTIONAL | set(BROUGHT_IN)):
            undeclared.append(name)
    assert undeclared == [], "imported and not declared"
    assert set(BROUGHT_IN) <= used, "no longer imported"
    assert DECLARED - used - set(NOT_IMPORTED) == set(), "declared and not imported"


def test_what_is_brought_in_is_required_by_whom_it_is_said_to_be() -> None:
    for name, by in BROUGHT_IN.items():
        assert by in DECLARED
        needed = {Requirement(text) for text in requires(by) or ()}
        assert name in {r.name.lower().replace("_", "-") for r in needed if not r.marker or r.marker.evaluate()}, (
            f"{by} does not need {name}"
        )


def test_architecture_gives_a_reason_for_each_dependency() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    rows = {
        name.lower() for row in re.findall(r"^\| (`[^|]+) \|", text, re.M) for name in re.findall(r"`([^`]+)`", row)
    }
    assert rows >= DECLARED
    for requirement in PROJECT["optional-dependencies"]["dev"]:
        assert f"`{Requirement(requirement).name}`" in text, requirement


def test_no_file_names_the_machine_that_it_was_written_on() -> None:
    """Absolute paths of a workplace, and hosts that packages were fetched from, are nobody else's business."""
    slash = "/"
    folders = [slash + name + slash for name in ("work", "root", "opt" + slash + "pypi", "tmp" + slash + "contract")]
    hosts = [".".join(parts) for parts in (("pypi", "org"), ("pythonhosted", "org"), ("index" + "-url",))]
    forbidden = re.compile(
        rf"(?<![\w.\-])(?:{'|'.join(map(re.escape, folders))})|{'|'.join(map(re.escape, hosts))}", re.IGNORECASE
    )
    assert forbidden.search("in " + slash + "work" + slash + "main")
    found = []
    for name in tracked():
        data = (ROOT / name).read_bytes()
        if b"\0" in data[:1024]:
            continue
        for number, line in enumerate(data.decode("utf-8").splitlines(), 1):
            if forbidden.search(line):
                found.append(f"{name}:{number}: {line.strip()[:100]}")
    assert found == []


def test_no_large_or_generated_file_is_tracked() -> None:
    for name in tracked():
        assert (ROOT / name).stat().st_size < 1 << 20, f"{name} is larger than 1 MiB"
        assert not re.search(r"(^|/)(__pycache__|\.venv|runs|experiments)/|\.pyc$", name), name
