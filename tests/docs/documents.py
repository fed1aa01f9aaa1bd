"""The documents of the project, and what stands in them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md")), *sorted((ROOT / "examples").glob("**/*.md"))]
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A fenced block, with its language and the line that it begins on."""

    document: Path
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.document.relative_to(ROOT)}:{self.line}"


def blocks(*languages: str) -> list[Block]:
    """Fenced blocks of these languages in all documents; of any language when none is given."""
    return [
        Block(document, text.count("\n", 0, found.start()) + 1, found[1], found[2])
        for document in DOCUMENTS
        for text in [document.read_text(encoding="utf-8")]
        for found in _FENCE.finditer(text)
        if not languages or found[1] in languages
    ]


def section(document: Path, name: str) -> str:
    """What stands between the comments `name:begin` and `name:end`."""
    text = document.read_text(encoding="utf-8")
    found = re.search(rf"<!-- {name}:begin -->\n(.*?)<!-- {name}:end -->", text, re.DOTALL)
    assert found, f"{document.name} has no section {name}"
    return found[1]
