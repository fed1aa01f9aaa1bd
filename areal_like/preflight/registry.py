"""How a rule is declared: a function with a code, a summary, a reason, and examples that are its tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from areal_like.alloc.diagnostics import Severity
from areal_like.preflight.job import Job, Role

__all__ = ["JOB_RULES", "LAYOUT_RULES", "RULES", "Example", "Finding", "Rule", "example", "layout_rule", "rule"]

JobFunction = Callable[[Job], Iterator["Finding"]]
LayoutFunction = Callable[[Role], Iterator["Finding"]]


class Finding(NamedTuple):
    """What a rule says.

    Attributes:
        message: what is wrong, in the user's letters and keys.
        help: what to do.
        letters: the letters of the allocation to point at, likeliest first; "T" is the experts' t.
        key: the key it is about; the role's backend when empty.
        role: whose backend it is about; layout rules need not say it.
        severity: instead of the rule's.
    """

    message: str
    help: str | None = None
    letters: str = ""
    key: str = ""
    role: Role | None = None
    severity: Severity | None = None


@dataclass(frozen=True)
class Example:
    """A job: `examples.BASE_JOB` with some keys changed.

    Attributes:
        changes: as on the command line, `key=value`.
        model: entries that replace those of the config.json of `examples.BASE_MODEL`.
        cluster: as after `--cluster`.
        text: a whole file instead of that job.
    """

    changes: tuple[str, ...] = ()
    model: tuple[tuple[str, Any], ...] = ()
    cluster: str = ""
    text: str | None = None


@dataclass(frozen=True)
class Rule:
    """A rule; `function` takes the job, or one role when `of_layout`: then another layout can cure what it finds."""

    code: str
    severity: Severity
    summary: str
    why: str
    bad: Example
    good: Example
    function: Callable[..., Iterator[Finding]]
    of_layout: bool = False
    curable: bool = False


RULES: dict[str, Rule] = {}
LAYOUT_RULES: list[Rule] = []
JOB_RULES: list[Rule] = []


def layout_rule(
    code: str,
    *,
    summary: str,
    why: str,
    bad: Example,
    good: Example,
    severity: Severity = "error",
    curable: bool = True,
) -> Callable[[LayoutFunction], LayoutFunction]:
    """A rule about one layout and one model. It is called only for a role whose model is known."""

    def declare(function: LayoutFunction) -> LayoutFunction:
        LAYOUT_RULES.append(_add(Rule(code, severity, summary, why, bad, good, function, True, curable)))
        return function

    return declare


def rule(
    code: str,
    *,
    summary: str,
    why: str,
    bad: Example,
    good: Example,
    severity: Severity = "error",
    curable: bool = False,
) -> Callable[[JobFunction], JobFunction]:
    """A rule about a whole job. `curable`: another layout of the role it names could cure it."""

    def declare(function: JobFunction) -> JobFunction:
        JOB_RULES.append(_add(Rule(code, severity, summary, why, bad, good, function, False, curable)))
        return function

    return declare


def _add(new: Rule) -> Rule:
    if new.code in RULES:
        raise ValueError(f"two rules have the code {new.code}")
    RULES[new.code] = new
    return new


def example(*changes: str, cluster: str = "", **model: Any) -> Example:
    """An example written as a call."""
    return Example(changes, tuple(model.items()), cluster)
