"""Faults of one allocation string while it is being read, and how they become diagnostics."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from areal_like.alloc.diagnostics import Diagnostic, Span

__all__ = ["Edit", "Fault", "diagnose"]


class Edit(NamedTuple):
    """Put `text` in place of columns `start` to `end`."""

    start: int
    end: int
    text: str


@dataclass(frozen=True)
class Fault:
    """Something wrong at `span`; `fixes` are edits of which each alone would mend it, likeliest first."""

    code: str
    message: str
    span: Span
    help: str | None = None
    fixes: tuple[Edit, ...] = ()


def diagnose(source: str, faults: Iterable[Fault], accepts: Callable[[str], bool]) -> tuple[Diagnostic, ...]:
    """Diagnostics in the order of the string, with mended strings as alternatives.

    Only strings that `accepts` are offered. One fault: every fix that mends it. Several: the string with the likeliest
    fix of each applied, offered by the last diagnostic.
    """
    found = sorted(faults, key=lambda fault: (fault.span, fault.code))
    if len(found) == 1:
        mended = [[_apply(source, [fix]) for fix in found[0].fixes]]
    else:
        together = _apply(source, [fault.fixes[0] for fault in found]) if all(fault.fixes for fault in found) else None
        mended = [[] for _ in found[:-1]] + [[together] if together is not None else []]
    return tuple(
        Diagnostic(
            fault.code,
            "error",
            fault.message,
            span=fault.span,
            source=source,
            help=fault.help,
            alternatives=tuple(dict.fromkeys(text for text in texts if accepts(text))),
        )
        for fault, texts in zip(found, mended, strict=True)
    )


def _apply(source: str, edits: Iterable[Edit]) -> str:
    for edit in sorted(set(edits), reverse=True):
        source = source[: edit.start] + edit.text + source[edit.end :]
    return source
