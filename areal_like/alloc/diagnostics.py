"""A finding about what a user wrote: what is wrong, where it stands, and what to write instead.

Everything that reads user input raises `DiagnosticError` (or a subclass) and nothing else. `reports` renders lists of
findings for machines.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

__all__ = ["AllocationError", "Diagnostic", "DiagnosticError", "Severity", "Span", "clip", "closest"]

Severity = Literal["error", "warning", "info"]

EXCERPT = 100
"""Characters of the source shown around a finding."""


class Span(NamedTuple):
    """Columns `start` to `end` (0-based, end excluded) of the allocation string."""

    start: int
    end: int


@dataclass(frozen=True)
class Diagnostic:
    """One finding.

    Attributes:
        code: `AL` and three digits; `docs/language.md` lists those of the language.
        severity: error, warning or info.
        message: what is wrong, in the letters of the user.
        span: where in `source`; None when the finding is not about a part of a string.
        source: the allocation string.
        key: the configuration key that holds the string, for example `actor.backend`.
        file, line, column: where that key stands; line and column count from 1.
        help: what to do.
        alternatives: legal strings close to what was written.
    """

    code: str
    severity: Severity
    message: str
    span: Span | None = None
    source: str | None = None
    key: str | None = None
    file: str | None = None
    line: int | None = None
    column: int | None = None
    help: str | None = None
    alternatives: tuple[str, ...] = ()

    @property
    def location(self) -> str | None:
        """`file:line:column (key)`, as far as known."""
        place = ":".join(str(part) for part in (self.file, self.line, self.column) if part is not None)
        if self.key is not None:
            place = f"{place} ({self.key})" if place else self.key
        return place or None

    def render(self) -> str:
        """For a person: the message, the place, the source line with a caret under the fault, and help."""
        lines = [f"{self.severity}[{self.code}]: {self.message}"]
        if self.location:
            lines.append(f"  --> {self.location}")
        if self.source is not None and self.span is not None:
            shown, start, width = _excerpt(self.source, self.span)
            lines += [f"  | {shown}", f"  | {' ' * start}{'^' * width}"]
        if self.help:
            lines.append(f"  = help: {self.help}")
        if self.alternatives:
            lines.append(f"  = try: {' or '.join(self.alternatives)}")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON: every attribute by name, `span` as `{"start": ..., "end": ...}`."""
        data = asdict(self)
        data["span"] = None if self.span is None else self.span._asdict()
        data["alternatives"] = list(self.alternatives)
        return data


class DiagnosticError(Exception):
    """User input that cannot be used, with every finding about it; `str()` renders them all."""

    def __init__(self, diagnostics: Iterable[Diagnostic]) -> None:
        self.diagnostics: tuple[Diagnostic, ...] = tuple(diagnostics)
        super().__init__(self.diagnostics)

    def __str__(self) -> str:
        return "\n".join(diagnostic.render() for diagnostic in self.diagnostics)


class AllocationError(DiagnosticError):
    """An allocation that does not parse, contradicts itself, or asks of a backend what it cannot do."""


def closest(word: str, options: Iterable[str]) -> str | None:
    """The option most like `word`, whatever its case; None when nothing is like it."""
    import difflib

    by_folded = {option.casefold(): option for option in options}
    found = difflib.get_close_matches(word.casefold(), by_folded, n=1, cutoff=0.65)
    return by_folded[found[0]] if found else None


def clip(text: str, width: int = 30) -> str:
    """The text as quoted in a message: printable and of bounded length."""
    return repr(text if len(text) <= width else text[:width] + "...")


def _excerpt(source: str, span: Span) -> tuple[str, int, int]:
    """One printable line around the span, and the terminal columns of the caret: (line, start, width)."""
    first = max(0, min(span.start - EXCERPT // 2, len(source) - EXCERPT))
    last = min(len(source), first + EXCERPT)
    before = _printable(source[first : span.start])
    inside = _printable(source[span.start : min(span.end, last)])
    after = _printable(source[span.end : last])
    lead, trail = ("..." if first > 0 else ""), ("..." if last < len(source) else "")
    return lead + before + inside + after + trail, len(lead) + _columns(before), max(1, _columns(inside))


def _printable(text: str) -> str:
    return "".join(
        c if c == " " or (c.isprintable() and not c.isspace()) else c.encode("unicode_escape").decode() for c in text
    )


def _columns(text: str) -> int:
    """Terminal columns: wide East Asian characters take two, combining marks none."""
    return sum(0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)
