"""The backend strings of the file: each parses, and names an engine of the role that its key needs."""

from __future__ import annotations

from dataclasses import replace

from areal_like.alloc import AllocationError, Diagnostic, ModelAllocation, Span, get_backend
from areal_like.config import paths
from areal_like.config.experiment import RLConfig
from areal_like.config.fields import marks
from areal_like.config.findings import Findings
from areal_like.config.nodes import Entry
from areal_like.config.validation import nearest


def check(root: Entry, findings: Findings) -> None:
    """Findings of the language (AL0 to AL2), placed in the file; the same string is complained about once a role."""
    seen: set[tuple[str, str]] = set()
    for steps, field in paths.keys(RLConfig):
        role = marks(field).get("role")
        if role is None:
            continue
        entry, found = nearest(root, steps)
        if found < len(steps) or entry.implicit or not isinstance(entry.value, str) or (role, entry.value) in seen:
            continue
        seen.add((role, entry.value))
        for diagnostic in _faults(entry.value, role):
            findings.add(_placed(diagnostic, entry, paths.join(steps)))


def _faults(text: str, role: str) -> tuple[Diagnostic, ...]:
    try:
        backend = get_backend(ModelAllocation.parse(text).backend)
        backend.require_role("train" if role == "train" else "inference", source=text)
    except AllocationError as error:
        return error.diagnostics
    if not backend.engine:
        message = f"{backend.name} has no engine in this version: the file loads and can be checked, but no run starts"
        other = "huggingface, as in huggingface:d1" if role == "inference" else "megatron, as in megatron:d1"
        where = Span(0, len(backend.name))
        return (Diagnostic("AL205", "error", message, where, text, help=f"to run now, choose {other}"),)
    return ()


def _placed(diagnostic: Diagnostic, entry: Entry, path: str) -> Diagnostic:
    """In the file: the column of the fault itself where the string stands there as it is, else that of the value."""
    start = entry.text_at or entry.value_at
    offset = diagnostic.span.start if diagnostic.span and entry.text_at else 0
    span = diagnostic.span
    if span is None and diagnostic.source:
        span = Span(0, len(diagnostic.source))
    return replace(diagnostic, span=span, key=path, file=start.file, line=start.line, column=start.column + offset)
