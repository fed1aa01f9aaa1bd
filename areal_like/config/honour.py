"""The marks of the schema against what the file gives: nothing that a user sets is ignored without a word."""

from __future__ import annotations

from typing import Any

from areal_like.config import paths
from areal_like.config.experiment import RLConfig
from areal_like.config.fields import Section, marks
from areal_like.config.findings import Findings, diagnostic
from areal_like.config.nodes import Entry, plain
from areal_like.config.validation import nearest

Bad = set[tuple[paths.Step, ...]]


def check(root: Entry, bad: Bad, findings: Findings) -> None:
    """Findings AL811, AL812, AL813 and AL815 about all keys that the file gives, except those in `bad`."""
    _section(RLConfig, root, (), root, bad, findings)


def _section(
    model: type[Section], entry: Entry, steps: tuple[paths.Step, ...], root: Entry, bad: Bad, findings: Findings
) -> None:
    if not isinstance(entry.value, dict):
        return
    idle: dict[str, list[str]] = {}
    for name, field in paths.fields(model).items():
        child, here = entry.value.get(name), (*steps, name)
        if child is None or child.broken or here in bad:
            continue
        mark, value = marks(field), plain(child)
        _, default = paths.default_of(field)
        if "no_effect" in mark and not child.implicit and _differs(value, default):
            idle.setdefault(mark["no_effect"], []).append(name)
        if "unsupported_unless" in mark and not child.implicit and value not in mark["unsupported_unless"]:
            _unsupported(child, here, mark, findings)
        if "same_as" in mark and not child.implicit:
            _repetition(child, here, mark["same_as"], root, findings)
        if "refused_at_start" in mark and value is not None:
            findings.error("AL815", mark["refused_at_start"], child.at, path=paths.join(here))
        inner = paths.section_of(field)
        if inner is not None:
            _section(inner, child, here, root, bad, findings)
    for why, names in idle.items():
        first = entry.value[names[0]]
        message = f"{', '.join(names)} {'has' if len(names) == 1 else 'have'} no effect here: {why}"
        path = paths.join((*steps, names[0]))
        findings.add(diagnostic("AL812", message, first.at, path=path, severity="info"))


def _differs(value: Any, default: Any) -> bool:
    return bool((list(default) if isinstance(default, tuple) else default) != value and value is not None)


def _unsupported(entry: Entry, steps: tuple[paths.Step, ...], mark: dict[str, Any], findings: Findings) -> None:
    allowed = " or ".join(_yaml(value) for value in mark["unsupported_unless"])
    message = f"this version cannot do {paths.join(steps)}: {_yaml(entry.value)}: {mark['why']}"
    hint = f"leave it out, or write {allowed}"
    findings.error("AL811", message, entry.value_at, path=paths.join(steps), help=hint)


def _repetition(entry: Entry, steps: tuple[paths.Step, ...], original: str, root: Entry, findings: Findings) -> None:
    names = paths.split(original) or ()
    target, found = nearest(root, names)
    if found == len(names):
        value = plain(target)
        if target.broken:
            return
    else:
        known, value = paths.default_at(RLConfig, names, found)
        if not known:
            return
    if plain(entry) != value:
        message = f"{steps[-1]} repeats {original}, which is {_yaml(value)}, but says {_yaml(entry.value)}"
        hint = f"leave it out; {original} holds for the whole run"
        findings.error("AL813", message, entry.value_at, path=paths.join(steps), help=hint)


def _yaml(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict | list):
        return "{...}" if isinstance(value, dict) else "[...]"
    return str(value)
