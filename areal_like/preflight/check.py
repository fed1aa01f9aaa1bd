"""All rules over one job; all findings at once."""

from __future__ import annotations

from collections.abc import Iterator

from areal_like.alloc import Diagnostic, ModelAllocation
from areal_like.config import RLConfig
from areal_like.preflight import rules
from areal_like.preflight.alternatives import nearest
from areal_like.preflight.job import Job, Role, make_job
from areal_like.preflight.legality import check_layout, is_legal
from areal_like.preflight.registry import JOB_RULES, LAYOUT_RULES, Finding, Rule
from areal_like.preflight.report import to_diagnostic

__all__ = ["check", "check_job", "check_layout", "is_legal"]

assert rules.__all__  # importing the package declares the rules

MEMORY = "AL6"

Found = tuple[Rule, Finding, Role | None]


def check(config: RLConfig) -> tuple[Diagnostic, ...]:
    """Everything that is known to stop the job, and what is worth knowing, before any process starts.

    A model that is neither a local folder nor one whose numbers are bundled is reported as unchecked (AL310): its
    numbers become known when it is fetched, and `check_layout` is run again then.
    """
    return check_job(make_job(config))


def check_job(job: Job, *, families: tuple[str, ...] = ("AL",)) -> tuple[Diagnostic, ...]:
    """The findings of all rules whose code begins with one of `families`, with the nearest layouts that have none."""
    found = [item for item in _findings(job) if item[0].code.startswith(families)]
    alternatives = {role.name: _alternatives(job, role) for role in _curable(found)}
    diagnostics = []
    for rule, finding, role in found:
        near: tuple[str, ...] = ()
        if _cures((rule, finding, role)):
            complete, near = alternatives[_name(finding, role)]
            near = near if complete or not rule.code.startswith(MEMORY) else ()
        diagnostics.append(to_diagnostic(rule, finding, role, job, near))
    return tuple(diagnostics)


def _findings(job: Job, *, curable: bool = False) -> Iterator[Found]:
    """What the rules say, those about layouts first; only rules whose findings another layout can cure, if so asked."""
    for role in job.roles:
        if role.spec is not None:
            for rule in LAYOUT_RULES:
                if rule.curable or not curable:
                    yield from ((rule, finding, role) for finding in rule.function(role))
    for rule in JOB_RULES:
        if rule.curable or not curable:
            yield from ((rule, finding, finding.role) for finding in rule.function(job))


def _cures(item: Found) -> bool:
    rule, finding, _ = item
    return rule.curable and (finding.severity or rule.severity) == "error"


def _name(finding: Finding, role: Role | None) -> str:
    found = finding.role or role
    return found.name if found else ""


def _curable(found: list[Found]) -> list[Role]:
    """Roles with an error that another layout could cure."""
    roles = {_name(item[1], item[2]): item[1].role or item[2] for item in found if _cures(item)}
    return [role for role in roles.values() if role is not None]


def _alternatives(job: Job, role: Role) -> tuple[bool, tuple[str, ...]]:
    """The nearest layouts that pass every rule; if none fits into memory, those that pass all other rules.

    Returns:
        Whether they pass every rule, and the layouts.
    """
    gpus = job.cluster.gpus if job.on_gpus else None
    experts = role.spec is not None and role.spec.is_moe

    def search(*skipped: str) -> tuple[str, ...]:
        def passes(candidate: ModelAllocation) -> bool:
            found = _findings(job.with_allocation(role.name, candidate), curable=True)
            return not any(
                _cures(item) and _name(*item[1:]) == role.name and not item[0].code.startswith(skipped)
                for item in found
            )

        return nearest(role.allocation, passes, gpus=gpus, experts=experts)

    near = search()
    return (True, near) if near else (False, search(MEMORY))
