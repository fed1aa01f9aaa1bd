"""The tree against the schema: Pydantic finds the faults, this module says them in the user's words and places them."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from areal_like.alloc.diagnostics import closest
from areal_like.config import paths
from areal_like.config.experiment import RLConfig
from areal_like.config.fields import Section, marks
from areal_like.config.findings import Findings
from areal_like.config.legacy import ROOTS, look_up
from areal_like.config.nodes import Entry, child_of, plain
from areal_like.config.upstream import without_counterpart

_TYPES = {
    "string": "text",
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "dict": "a mapping of keys",
    "model": "a section: a mapping of keys",
    "tuple": "a list",
    "list": "a list",
}


def validate(root: Entry, findings: Findings) -> tuple[RLConfig | None, set[tuple[paths.Step, ...]]]:
    """The typed configuration, or None with findings; and the keys about which there are findings."""
    try:
        return RLConfig.model_validate(plain(root)), set()
    except ValidationError as error:
        faults = error.errors(include_url=False)
    except (ValueError, OverflowError, RecursionError) as error:  # for example a whole number too large for a float
        findings.error("AL808", f"a value cannot be used: {error}", root.at)
        return None, set()
    bad: set[tuple[paths.Step, ...]] = set()
    for fault in faults:
        steps = tuple(fault["loc"])
        if str(steps[-1]).startswith("literal[") or steps[-1] in _TYPES:  # pydantic: which type of several refused it
            _choice(steps[:-1], nearest(root, steps)[0], findings)
            bad.add(steps[:-1])
            continue
        if extra_key := (fault.get("ctx") or {}).get("key"):
            steps = (*steps, str(extra_key))
        bad.add(steps)
        entry, found = nearest(root, steps)
        if not entry.broken:
            _report(fault, steps, entry, found == len(steps), findings)
    return None, bad


def nearest(root: Entry, steps: tuple[paths.Step, ...]) -> tuple[Entry, int]:
    """The entry of a key, else of the innermost section around it that the file gives; and the steps it took."""
    current = root
    for index, step in enumerate(steps):
        child = child_of(current, step)
        if child is None:
            return current, index
        current = child
    return current, len(steps)


def _report(fault: Any, steps: tuple[paths.Step, ...], entry: Entry, found: bool, findings: Findings) -> None:
    kind, path = str(fault["type"]), paths.join(steps)
    if kind == "extra_forbidden":
        _unknown(steps, entry, findings)
    elif kind == "missing":
        where = f"in {paths.join(steps[:-1])}" if len(steps) > 1 else "at the top of the file"
        field = paths.find(RLConfig, steps)
        hint = f"{steps[-1]}: {field.description}" if field else None
        findings.error("AL806", f"the key {steps[-1]!r} is missing {where}", entry.at, path=path, help=hint)
    elif kind in ("literal_error", "enum"):
        choices = str(fault["ctx"]["expected"]).replace(" or ", ", ").split(", ")
        names = [choice.strip("'") for choice in choices]
        near = closest(str(entry.value), names)
        null = " (or null)" if _may_be_null(steps) else ""
        message = f"{_shown(entry.value)} is not one of {', '.join(names)}{null}"
        findings.error("AL808", message, entry.value_at, path=path, alternatives=(near,) if near else ())
    elif kind.endswith("_type") or kind in ("int_from_float", "finite_number"):
        wanted = _TYPES.get(kind.removesuffix("_type").split("_")[0], str(fault["msg"]))
        wanted = (
            "a finite number" if kind == "finite_number" else "a whole number" if kind == "int_from_float" else wanted
        )
        message = f"this must be {wanted}, not {_shown(entry.value)}"
        findings.error("AL807", message, entry.value_at, path=path, help=_type_help(kind, entry.value))
    else:
        field = paths.find(RLConfig, steps)
        about = field.description if field and found else None
        if field and entry.implicit:
            about = f"{steps[-1]} takes this value from {marks(field).get('inherits')}: {about}"
        message = _rule(fault, entry.value if found else None)
        findings.error("AL808", message, entry.value_at, path=path, help=about)


def _choice(steps: tuple[paths.Step, ...], entry: Entry, findings: Findings) -> None:
    """A value of a key that takes several types, each of which has refused it: said once."""
    field = paths.find(RLConfig, steps)
    wanted: list[str] = []
    for branch in getattr(field.annotation, "__args__", ()) if field else ():
        if branch is type(None):
            continue
        wanted += [str(c) for c in getattr(branch, "__args__", ())] or [_TYPES.get(branch.__name__, branch.__name__)]
    message = f"this must be {' or '.join(wanted)}, not {_shown(entry.value)}"
    about = field.description if field else None
    findings.error("AL807", message, entry.value_at, path=paths.join(steps), help=about)


def _rule(fault: Any, value: Any) -> str:
    """A broken rule about a value of the right type."""
    kind, said = str(fault["type"]), str(fault["msg"])
    if kind == "string_pattern_mismatch":
        return f"{_shown(value)} is not a usable name"
    if kind == "string_too_short":
        return "this must not be empty"
    bound = {
        "greater_than_equal": "at least",
        "greater_than": "above",
        "less_than_equal": "at most",
        "less_than": "below",
    }
    if kind in bound:
        limit = next(iter(fault["ctx"].values()))
        return f"this must be {bound[kind]} {limit:g}, not {_shown(value)}"
    return said.removeprefix("Value error, ")


def _unknown(steps: tuple[paths.Step, ...], entry: Entry, findings: Findings) -> None:
    path, name = paths.join(steps), str(steps[-1])
    model = _section_at(steps[:-1])
    replaced = look_up(path, entry.value)
    if replaced is not None:
        what, instead = replaced
        findings.error("AL814", f"{name} is {what}", entry.at, path=path, help=instead)
        return
    if _foreign(steps, entry, findings):
        return
    if without_counterpart(model, name):
        findings.error("AL811", f"{name} is a key of AReaL that this version has nothing for", entry.at, path=path)
        return
    near = closest(name, paths.fields(model))
    elsewhere = [paths.join(other) for other, _ in paths.keys(RLConfig) if other[-1] == name]
    hint = f"did you mean {near}?" if near else None
    if hint is None and elsewhere:
        hint = f"the schema has it as {' and as '.join(elsewhere[:3])}"
    where = f"in {paths.join(steps[:-1])}" if len(steps) > 1 else "at the top of the file"
    findings.error("AL805", f"unknown key {name!r} {where}", entry.at, path=path, help=hint)


_DEEPEST = 8
"""Steps of the longest key of another system, and some."""


def _foreign(steps: tuple[paths.Step, ...], entry: Entry, findings: Findings) -> bool:
    """The keys inside an unknown section that another system's tables know, each with its replacement."""
    path = paths.join(steps)
    system = ROOTS.get(path)
    if len(steps) > _DEEPEST:
        return False
    if system is not None:
        hint = f"`areal-like convert --from {system} FILE` writes all of it in the keys of this system"
        findings.error("AL814", f"{path} is a section of {system}", entry.at, path=path, help=hint)
    known = system is not None
    for name, child in entry.value.items() if isinstance(entry.value, dict) else ():
        inner = (*steps, name)
        replaced = look_up(paths.join(inner), child.value)
        if replaced is not None:
            what, instead = replaced
            findings.error("AL814", f"{name} is {what}", child.at, path=paths.join(inner), help=instead)
            known = True
        elif isinstance(child.value, dict):
            known = _foreign(inner, child, findings) or known
    return known


def _section_at(steps: tuple[paths.Step, ...]) -> type[Section]:
    field = paths.find(RLConfig, steps) if steps else None
    return (paths.section_of(field) if field else None) or RLConfig


def _may_be_null(steps: tuple[paths.Step, ...]) -> bool:
    field = paths.find(RLConfig, steps)
    return field is not None and type(None) in getattr(field.annotation, "__args__", ())


def _type_help(kind: str, value: Any) -> str | None:
    if kind == "string_type" and not isinstance(value, dict | list):
        return "put quotes around it if it is meant as text" if value is not None else None
    if kind == "model_type" and value is None:
        return "leave the key out to take the section's defaults"
    if kind == "bool_type" and str(value).lower() in ("yes", "no", "on", "off", "0", "1"):
        return "write true or false"
    return None


def _shown(value: Any) -> str:
    """A value as the user wrote it, shortened."""
    if value is None:
        return "null"
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list):
        return "a list"
    if isinstance(value, bool):
        return str(value).lower()
    text = repr(value) if isinstance(value, str) else _number(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _number(value: float) -> str:
    try:
        return str(value)
    except ValueError:  # Python refuses to print whole numbers of more than 4300 digits
        return "a huge number"
