"""From what a rule says to a diagnostic: where it stands in the allocation string and in the file."""

from __future__ import annotations

from areal_like.alloc import Diagnostic, ModelAllocation, Span
from areal_like.alloc.fields import write
from areal_like.alloc.syntax import Dim, Draft, draft_of
from areal_like.preflight.job import Job, Role
from areal_like.preflight.registry import Finding, Rule

__all__ = ["of_layout", "to_diagnostic"]


def to_diagnostic(
    rule: Rule, finding: Finding, role: Role | None, job: Job, alternatives: tuple[str, ...]
) -> Diagnostic:
    """A finding of a job, with its place in the file."""
    role = finding.role or role
    key, source, span = finding.key, None, None
    if role is not None and "." not in key and rule.of_layout:
        key = f"{role.name}.{key}" if key else ""
    if not key and role is not None:
        key, source = role.key, role.source
        span = _span(draft_of(source)[0], finding.letters)
    where = job.config.location(key) if job.config is not None and key else None
    return Diagnostic(
        rule.code,
        finding.severity or rule.severity,
        finding.message,
        span=span,
        source=source,
        key=key or None,
        file=where.file if where else None,
        line=where.line if where else None,
        column=where.column if where else None,
        help=finding.help,
        alternatives=alternatives,
    )


def of_layout(rule: Rule, finding: Finding, allocation: ModelAllocation) -> Diagnostic:
    """A finding about a layout alone, which points into its canonical string."""
    draft = write(dict(allocation))[0]
    span = None if finding.key else _span(draft, finding.letters)
    return Diagnostic(rule.code, rule.severity, finding.message, span=span, source=draft.source, help=finding.help)


def _span(draft: Draft, letters: str) -> Span:
    """The first of these letters that is written; the whole string when there is none."""
    if letters == "backend" and draft.backend is not None:
        return draft.backend.span
    for letter in letters:
        dim = _find(draft, letter)
        if dim is not None:
            return dim.span
    return Span(0, len(draft.source))


def _find(draft: Draft, letter: str) -> Dim | None:
    ffn = draft.ffn or []
    parts = ffn if letter == "T" else [*draft.attn, *ffn]
    return next((dim for dim in parts if dim.letters == letter.lower()), None)
