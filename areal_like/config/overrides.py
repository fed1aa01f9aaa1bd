"""`key=value` from the command line, put into the tree before references are followed.

The right side is YAML: `actor.optimizer.lr=1e-5`, `gconfig.stop=["\\n\\n"]`, `ref=null`. A mapping is merged into the
section that it names. Every key of the schema can be given, also one that the file does not have.
"""

from __future__ import annotations

from areal_like.alloc.diagnostics import closest
from areal_like.config import paths
from areal_like.config.fields import Section
from areal_like.config.findings import COMMAND_LINE, Findings, Place
from areal_like.config.legacy import look_up
from areal_like.config.nodes import Entry, parse


def apply(model: type[Section], root: Entry, overrides: list[str], findings: Findings) -> None:
    """Put every override into the tree, the last of a key winning; findings name the command line as their place."""
    for number, text in enumerate(overrides, start=1):
        _apply(model, root, text, number, findings)


def _apply(model: type[Section], root: Entry, text: str, number: int, findings: Findings) -> None:
    def place(column: int, width: int) -> Place:
        return Place(COMMAND_LINE, number, column, text, width)

    legible = text.encode("utf-8", "backslashreplace").decode()
    if legible != text:  # bytes of another encoding, as Python hands them on
        findings.error("AL810", "the override is not UTF-8 text", Place(COMMAND_LINE, number, 1, legible, len(legible)))
        return
    name, equals, right = text.partition("=")
    key = name.strip().lstrip("+")
    start = name.index(key) + 1 if key else 1
    steps = paths.split(key)
    replaced = look_up(key, None) if key.startswith("--") and not equals else None
    if replaced is not None:
        what, instead = replaced
        findings.error("AL814", f"{key} is {what}", place(start, len(key)), path=key, help=instead)
        return
    if not equals or steps is None or isinstance(steps[0], int):
        hint = "write key=value with a key of the schema, as in actor.optimizer.lr=1e-5"
        findings.error("AL810", f"{text!r} is not an override", place(1, len(text)), help=hint)
        return
    at = place(start, len(key))
    before = len(findings.all)
    value = parse(right, COMMAND_LINE, findings, within=place(len(name) + 2, 1))
    if value is None or len(findings.all) > before:
        return
    value.at = at
    replaced = look_up(key, value.value) if paths.find(model, steps) is None else None
    if replaced is not None and _leaves_the_schema(model, steps):
        what, instead = replaced
        findings.error("AL814", f"{steps[-1]} is {what}", at, path=paths.join(steps), help=instead)
        return
    parent = _descend(model, root, steps, at, findings)
    if parent is not None:
        _put(parent, steps, value, at, findings)


def _leaves_the_schema(model: type[Section], steps: tuple[paths.Step, ...]) -> bool:
    """Whether a key that the schema does not have is wrong, and not one inside a free mapping or list."""
    section: type[Section] | None = model
    for step in steps:
        field = paths.fields(section).get(str(step)) if section else None
        if field is None:
            return section is not None
        section = paths.section_of(field)
    return False


def _descend(
    model: type[Section], root: Entry, steps: tuple[paths.Step, ...], at: Place, findings: Findings
) -> Entry | None:
    """The entry that holds the last step; sections on the way are made."""
    current = root
    section: type[Section] | None = model
    for index, step in enumerate(steps[:-1]):
        path = paths.join(steps[: index + 1])
        if isinstance(current.value, list):
            found = _item(current, step, path, at, findings)
            if found is None:
                return None
            current, section = found, None
            continue
        field = paths.fields(section).get(str(step)) if section else None
        if section is not None and field is None:
            near = closest(str(step), paths.fields(section))
            hint = f"did you mean {paths.join((*steps[:index], near))}?" if near else None
            findings.error("AL805", f"unknown key {path!r}", at, path=path, help=hint)
            return None
        child = current.value.get(str(step)) if isinstance(current.value, dict) else None
        if child is None or child.value is None:
            if isinstance(steps[index + 1], int):
                findings.error("AL810", f"{path} is not a list", at, path=paths.join(steps))
                return None
            if current.value is None:
                current.value = {}
            child = Entry({}, at, at)
            current.value[str(step)] = child
        if not isinstance(child.value, dict | list):
            findings.error(
                "AL810", f"{path} is a single value: nothing can be set inside it", at, path=paths.join(steps)
            )
            return None
        current, section = child, paths.section_of(field) if field else None
    return current


def _put(parent: Entry, steps: tuple[paths.Step, ...], value: Entry, at: Place, findings: Findings) -> None:
    path, last = paths.join(steps), steps[-1]
    if isinstance(parent.value, list):
        found = _item(parent, last, path, at, findings)
        if found is not None:
            parent.value[int(last)] = _merged(found, value)
    elif isinstance(last, int):
        findings.error("AL810", f"{paths.join(steps[:-1])} is not a list", at, path=path)
    else:
        old = parent.value.get(last)
        parent.value[last] = value if old is None else _merged(old, value)


def _item(entry: Entry, step: paths.Step, path: str, at: Place, findings: Findings) -> Entry | None:
    if str(step).isdecimal() and int(step) < len(entry.value):
        item: Entry = entry.value[int(step)]
        return item
    count = len(entry.value)
    findings.error("AL810", f"{path}: the list has {count} items, counted from 0", at, path=path)
    return None


def _merged(old: Entry, new: Entry) -> Entry:
    """A mapping changes the keys that it names; anything else replaces."""
    if not isinstance(old.value, dict) or not isinstance(new.value, dict):
        return new
    both = dict(old.value)
    for name, value in new.value.items():
        both[name] = _merged(both[name], value) if name in both else value
    return Entry(both, new.at, new.value_at)
