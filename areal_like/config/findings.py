"""Findings about a configuration: their codes, where they point, and the error that carries them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from areal_like.alloc import Diagnostic, DiagnosticError, Span
from areal_like.alloc.diagnostics import Severity

COMMAND_LINE = "<command line>"

CODES: dict[str, str] = {
    "AL801": "the file cannot be read",
    "AL802": "the text is not YAML",
    "AL803": "the file is not a mapping of keys",
    "AL804": "a key is given twice",
    "AL805": "unknown key",
    "AL806": "a key is missing",
    "AL807": "a value of the wrong type",
    "AL808": "a value that is not allowed",
    "AL809": "a reference `${...}` that cannot be followed",
    "AL810": "an override that cannot be applied",
    "AL811": "something that this version cannot do",
    "AL812": "a key without effect in this system",
    "AL813": "a repetition that differs from its original",
    "AL814": "a key that has been replaced",
    "AL815": "a section that no run can start with in this version",
    "AL816": "keys that contradict each other",
    "AL817": "a key that has nothing to act on in this file",
    "AL818": "a name of Megatron-RL, read as the key here",
    "AL820": "conversion: a key without counterpart",
    "AL821": "conversion: a value that had to be assumed",
    "AL822": "conversion: a key that means something else in the other system",
    "AL823": "conversion: values that contradict each other",
    "AL830": "an environment file that lists nothing",
    "AL831": "unknown agent type",
    "AL832": "an argument that the agent does not take, or lacks",
    "AL833": "an argument that the agent cannot use",
    "AL834": "two environments of one name",
    "AL835": "a batch that cannot hold its environments",
    "AL836": "an agent type whose code is broken",
    "AL837": "training on an environment that is for evaluation",
    "AL838": "a weight without effect",
}
"""Every code of the configuration with its one-line summary."""


class ConfigError(DiagnosticError):
    """A configuration that cannot be used, with every finding about it."""


class Location(NamedTuple):
    """Where a key stands. `line` and `column` count from 1; for an override, `line` is its number on the command line
    and `column` counts within it."""

    file: str
    line: int
    column: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column}"


@dataclass(frozen=True)
class Place:
    """A piece of one line of the input: `width` characters of `source` from `column` (1-based)."""

    file: str
    line: int
    column: int
    source: str
    width: int

    @property
    def location(self) -> Location:
        return Location(self.file, self.line, self.column)

    @property
    def span(self) -> Span:
        start = min(self.column - 1, len(self.source))
        return Span(start, min(len(self.source), start + max(1, self.width)))


class Findings:
    """Collects findings in the order in which they are made; one and the same finding is kept once."""

    def __init__(self) -> None:
        self._found: dict[tuple[object, ...], Diagnostic] = {}

    def add(self, diagnostic: Diagnostic) -> None:
        d = diagnostic
        self._found.setdefault((d.code, d.file, d.line, d.column, d.message), d)

    def error(
        self,
        code: str,
        message: str,
        place: Place,
        *,
        path: str = "",
        help: str | None = None,
        alternatives: tuple[str, ...] = (),
    ) -> None:
        self.add(diagnostic(code, message, place, path=path, help=help, alternatives=alternatives))

    @property
    def all(self) -> tuple[Diagnostic, ...]:
        return tuple(self._found.values())


def diagnostic(
    code: str,
    message: str,
    place: Place,
    *,
    path: str = "",
    severity: Severity = "error",
    help: str | None = None,
    alternatives: tuple[str, ...] = (),
) -> Diagnostic:
    """A finding that points at `place`; `path` is the key, as in actor.optimizer.lr."""
    return Diagnostic(
        code,
        severity,
        message,
        span=place.span,
        source=place.source,
        key=path or None,
        file=place.file,
        line=place.line,
        column=place.column,
        help=help,
        alternatives=alternatives,
    )
