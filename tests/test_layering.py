"""Imports go downward only. The graph is read from the source, so imports inside functions count."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "areal_like"
ORDER = (
    "cli",
    "trainers",
    "rollout",
    "engines",
    "runtime",
    "algorithms",
    "data",
    "observe",
    "preflight",
    "config",
    "spec",
    "alloc",
)
"""From the top to the bottom; a part may import itself and what is below it."""
LIGHT = {"alloc", "spec", "config", "preflight"}
HEAVY = {"torch", "transformers", "megatron", "mbridge"}


def imports(path: Path, package: Path) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of everything that a file imports, relative names made absolute."""
    own = [package.name, *path.relative_to(package).with_suffix("").parts]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = own[: -node.level] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                yield node.lineno, f"{module}.{alias.name}"
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("import_module", "importlib.import_module"):
            yield from ((node.lineno, str(name.value)) for name in node.args[:1] if isinstance(name, ast.Constant))


def violations(package: Path) -> list[str]:
    found = []
    for path in sorted(package.rglob("*.py")):
        part = path.relative_to(package).with_suffix("").parts[0]
        if part == "__init__":
            continue
        where = path.relative_to(package.parent)
        if part not in ORDER:
            found.append(f"{where}: {part} has no place in the order of the house")
            continue
        for line, name in imports(path, package):
            root, _, rest = name.partition(".")
            if part in LIGHT and root in HEAVY:
                found.append(f"{where}:{line}: {part} imports {name}")
            if root != package.name or not rest:
                continue
            target = rest.split(".")[0]
            if target not in ORDER:
                found.append(f"{where}:{line}: imports {name}, which has no place in the order of the house")
            elif ORDER.index(target) < ORDER.index(part):
                found.append(f"{where}:{line}: {part} imports {name}, which is above it")
    return found


def test_imports_go_downward() -> None:
    assert violations(PACKAGE) == []


def test_every_part_is_seen() -> None:
    seen = {path.relative_to(PACKAGE).with_suffix("").parts[0] for path in PACKAGE.rglob("*.py")}
    assert seen >= {"cli", "alloc", "engines", "data"}


@pytest.mark.parametrize(
    ("file", "source", "message"),
    [
        ("alloc/a.py", "def f():\n    from areal_like.spec import x", "alloc/a.py:2: alloc imports areal_like.spec.x"),
        ("alloc/a.py", "from ..config import x", "alloc/a.py:1: alloc imports areal_like.config.x"),
        ("alloc/a.py", "from .. import engines", "alloc imports areal_like.engines"),
        ("alloc/a.py", "from areal_like import trainers", "alloc imports areal_like.trainers"),
        ("algorithms/a.py", "import areal_like.engines.base", "algorithms imports areal_like.engines.base"),
        ("runtime/a.py", "import importlib\nimportlib.import_module('areal_like.engines.base')", "runtime imports"),
        ("spec/a.py", "def f():\n    import torch.nn as nn", "spec/a.py:2: spec imports torch.nn"),
        ("config/a.py", "from transformers import AutoConfig", "config imports transformers.AutoConfig"),
        ("preflight/a.py", "if True:\n    import megatron.core", "preflight imports megatron.core"),
        ("attic/a.py", "", "attic has no place"),
        ("cli.py", "import areal_like.attic", "areal_like.attic, which has no place"),
    ],
)
def test_an_upward_arrow_is_found(tmp_path: Path, file: str, source: str, message: str) -> None:
    package = tmp_path / "areal_like"
    for part in ("alloc/b.py", "alloc/__init__.py", "engines/c.py"):
        (package / part).parent.mkdir(parents=True, exist_ok=True)
        (package / part).write_text("from areal_like.alloc import x\nfrom . import y\nimport areal_like\n")
    assert violations(package) == []
    (package / file).parent.mkdir(exist_ok=True)
    (package / file).write_text(source)
    found = violations(package)
    assert len(found) == 1 and message in found[0]
