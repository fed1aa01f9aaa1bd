"""Pages about the codes, for a terminal; `docs.py` makes the reference of them."""

from __future__ import annotations

import textwrap

from areal_like.alloc.codes import CODES as LANGUAGE_CODES
from areal_like.config.findings import CODES as CONFIG_CODES
from areal_like.preflight.examples import findings
from areal_like.preflight.reading_rules import READING_RULES
from areal_like.preflight.registry import RULES, Example

__all__ = ["examples_of", "page", "said", "shown", "summaries", "why"]


def summaries() -> dict[str, tuple[str, str]]:
    """Severity and summary of every code, in order."""
    known = {code: (_severity(code), text) for code, text in {**LANGUAGE_CODES, **CONFIG_CODES}.items()}
    known |= {code: (rule.severity, rule.summary) for code, rule in RULES.items()}
    return dict(sorted(known.items()))


def _severity(code: str) -> str:
    return READING_RULES[code].severity if code in READING_RULES else "error"


def why(code: str) -> str:
    """Why a code matters; empty for one that only Python code can meet."""
    if code in RULES:
        return RULES[code].why
    return READING_RULES[code].why if code in READING_RULES else ""


def examples_of(code: str) -> tuple[Example, Example] | None:
    """A job that has the finding and one that has not; None when no file can show it."""
    found = RULES.get(code) or READING_RULES.get(code)
    if found is None or (found.bad == Example() and code not in RULES):
        return None
    return found.bad, found.good


def shown(example: Example) -> str:
    """An example as a person would write it down."""
    parts = [*example.changes, *(f"{key}: {value}" for key, value in example.model)]
    if example.cluster:
        parts.append(f"--cluster {example.cluster}")
    if example.text is not None:
        parts.append(example.text.strip().replace("\n", " ⏎ "))
    return "  ".join(parts) or "the job as it is"


def said(code: str, example: Example) -> str:
    """The first finding of this code, without its place in the example."""
    first = next(d for d in findings(example) if d.code == code)
    lines = first.render().splitlines()
    return "\n".join(line for line in lines if not line.startswith("  --> "))


def page(code: str) -> str:
    """Everything about a code."""
    severity, summary = summaries()[code]
    parts = [f"{code} ({severity}): {summary}"]
    if text := why(code):
        parts.append(textwrap.fill(text, 100))
    examples = examples_of(code)
    if examples is not None:
        bad, good = examples
        parts += [f"bad:  {shown(bad)}", textwrap.indent(said(code, bad), "  "), f"good: {shown(good)}"]
    return "\n\n".join(parts)
