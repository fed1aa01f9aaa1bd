"""References `${a.b}` and inherited keys: both are a value taken from another key, after overrides."""

from __future__ import annotations

import re
from typing import Any

from areal_like.alloc.diagnostics import closest
from areal_like.config import paths
from areal_like.config.fields import Section, marks
from areal_like.config.findings import Findings, Place
from areal_like.config.nodes import MAX_NODES, Entry, child_of

MAX_TEXT = 65_536
"""Longest text that references may build."""

_REFERENCE = re.compile(r"(?<!\\)\$\{([^{}]*)\}")
_OPEN = re.compile(r"(?<!\\)\$\{")


def insert_inherited(model: type[Section], root: Entry) -> None:
    """Give every absent, null or empty key that inherits, or repeats another, a reference to that other key.

    Sections that are absent but have a default are made explicit, so that the keys in them inherit as well.
    """
    if not isinstance(root.value, dict):
        return
    for name, field in paths.fields(model).items():
        entry, inner = root.value.get(name), paths.section_of(field)
        if entry is None and inner is not None and field.default_factory is not None:
            entry = root.value[name] = Entry({}, root.at, root.at, implicit=True)
        origin = marks(field).get("inherits") or marks(field).get("same_as")
        if origin is not None and (entry is None or entry.value in (None, "")) and not (entry and entry.broken):
            root.value[name] = Entry("${" + origin + "}", root.at, root.at, implicit=True)
        elif inner is not None and entry is not None:
            insert_inherited(inner, entry)


class Resolver:
    """Replaces references in a tree, in place."""

    def __init__(self, model: type[Section], root: Entry, findings: Findings) -> None:
        self.model, self.root, self.findings = model, root, findings
        self.active: list[tuple[int, str]] = []
        self.done: set[int] = set()

    def run(self) -> bool:
        """Resolve everything; False when the result is too deep or too large to go on with."""
        try:
            self.resolve(self.root, ())
            size = _size(self.root, {})
        except RecursionError:
            self.findings.error("AL809", "references are nested too deeply", self.root.at)
            return False
        if size > MAX_NODES:
            message = f"with its references the file has more than {MAX_NODES} keys and values"
            self.findings.error("AL809", message, self.root.at)
        return size <= MAX_NODES

    def resolve(self, entry: Entry, steps: tuple[paths.Step, ...]) -> None:
        """Resolve an entry and all below it."""
        if id(entry) in self.done:
            return
        self.active.append((id(entry), paths.join(steps)))
        if isinstance(entry.value, dict):
            for name, child in list(entry.value.items()):
                self.resolve(child, (*steps, name))
                if child.implicit and child.broken:
                    del entry.value[name]  # what it would inherit is missing, which is reported where it is missing
        elif isinstance(entry.value, list):
            for index, child in enumerate(entry.value):
                self.resolve(child, (*steps, index))
        elif isinstance(entry.value, str) and _OPEN.search(entry.value):
            self.text(entry, entry.value, paths.join(steps))
        elif isinstance(entry.value, str):
            entry.value = entry.value.replace("\\${", "${")
        self.active.pop()
        self.done.add(id(entry))

    def text(self, entry: Entry, text: str, path: str) -> None:
        entry.text_at = None
        if (whole := _REFERENCE.fullmatch(text)) is not None:
            target = self.target(whole[1], entry, path)
            if target is None:
                entry.value, entry.broken = None, True
                return
            entry.value, entry.broken = target.value, target.broken
            if entry.implicit:
                entry.at, entry.value_at = target.at, target.value_at
            return
        if len(_OPEN.findall(text)) != len(_REFERENCE.findall(text)):
            self.fault(
                entry, path, "a reference is not closed", help="write ${a.b}, or \\${ for the characters themselves"
            )
            return
        pieces: list[str] = []
        end = 0
        for match in _REFERENCE.finditer(text):
            target = self.target(match[1], entry, path)
            if target is None or target.broken:
                entry.value, entry.broken = None, True
                return
            if isinstance(target.value, dict | list):
                self.fault(entry, path, f"{match[1]} is a section and cannot stand inside a text")
                return
            pieces += [text[end : match.start()], _written(target.value)]
            end = match.end()
        joined = "".join([*pieces, text[end:]]).replace("\\${", "${")
        if len(joined) > MAX_TEXT:
            self.fault(entry, path, f"its references build a text of more than {MAX_TEXT} characters")
            return
        entry.value = joined

    def target(self, name: str, entry: Entry, path: str) -> Entry | None:
        """The resolved entry that a reference names; None after a finding."""
        steps = paths.split(name.strip())
        if steps is None:
            hint = "a reference names a key from the top of the file, as in ${actor.path}"
            self.fault(entry, path, f"${{{name}}} is not a reference to a key", help=hint)
            return None
        current = self.root
        for index, step in enumerate(steps):
            if isinstance(current.value, str) and not self.follow(current, steps[:index], entry, path):
                return None
            child = child_of(current, step)
            if child is None:
                return self.absent(steps, index, current, entry, path)
            current = child
        return current if self.follow(current, steps, entry, path) else None

    def follow(self, target: Entry, steps: tuple[paths.Step, ...], entry: Entry, path: str) -> bool:
        """Resolve a target first; False when that leads back to what is being resolved."""
        names = [name for _, name in self.active]
        ids = [number for number, _ in self.active]
        if id(target) in ids:
            circle = [*names[ids.index(id(target)) :], paths.join(steps)]
            shown = " -> ".join(name or "the file" for name in circle)
            self.fault(entry, path, f"the reference leads back to itself: {shown}")
            return False
        self.resolve(target, steps)
        return True

    def absent(self, steps: tuple[paths.Step, ...], index: int, parent: Entry, entry: Entry, path: str) -> Entry | None:
        """A key that the file does not give: its default, else a finding."""
        has_default, value = paths.default_at(self.model, steps, index)
        if has_default:
            return _computed(value, entry.at)
        if entry.implicit:
            entry.broken = True
            return None
        known = list(parent.value) if isinstance(parent.value, dict) else []
        field = paths.find(self.model, steps[:index]) if index else None
        section = self.model if not index else paths.section_of(field) if field else None
        known += list(paths.fields(section)) if section else []
        where = f"in {paths.join(steps[:index])}" if index else "at the top of the file"
        near = closest(str(steps[index]), known)
        hint = f"did you mean ${{{paths.join((*steps[:index], near))}}}?" if near and near != steps[index] else None
        self.fault(entry, path, f"${{{paths.join(steps)}}}: there is no {steps[index]!r} {where}", help=hint)
        return None

    def fault(self, entry: Entry, path: str, message: str, help: str | None = None) -> None:
        entry.value, entry.broken = None, True
        if not entry.implicit:
            self.findings.error("AL809", message, entry.value_at, path=path, help=help)


def _computed(value: Any, at: Place) -> Entry:
    """A tree of a default value."""
    if isinstance(value, dict):
        return Entry({name: _computed(child, at) for name, child in value.items()}, at, at)
    if isinstance(value, list | tuple):
        return Entry([_computed(child, at) for child in value], at, at)
    return Entry(value, at, at)


def _written(value: Any) -> str:
    """A scalar as YAML writes it, inside a text."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _size(entry: Entry, known: dict[int, int]) -> int:
    """Keys and values of a tree whose parts may be shared, each counted as often as it is used."""
    if id(entry) not in known:
        children = entry.value.values() if isinstance(entry.value, dict) else entry.value
        inside = children if isinstance(entry.value, dict | list) else ()
        known[id(entry)] = 1 + sum(_size(child, known) for child in inside)
    return known[id(entry)]
