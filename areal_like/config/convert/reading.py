"""YAML of another system, and `key=value` overrides, as flat keys with their places; OmegaConf references followed."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

from areal_like.config import paths
from areal_like.config.convert.draft import Given, Source
from areal_like.config.findings import COMMAND_LINE, ConfigError, Findings, Place
from areal_like.config.nodes import Entry, parse

MAX_DEPTH = 30
"""Longest chain of references, or of files that name each other under `defaults`."""

_REFERENCE = re.compile(r"\$\{([^{}]*)\}")


class Unresolved(Exception):
    """A reference that cannot be followed here."""


def read_yaml(
    system: str,
    text: str,
    file: str,
    overrides: Sequence[str],
    defaults: Mapping[str, Any],
    *,
    parents: Callable[[str], str] | None = None,
) -> tuple[Source, tuple[Given, ...]]:
    """The keys of a document and of overrides, the latter winning; and the keys whose references lead nowhere.

    Args:
        parents: reads the file that a top-level key `defaults` names, as NeMo-RL's files have it.

    Raises:
        ConfigError: the text, or an override, is not YAML, or not a mapping.
    """
    findings = Findings()
    given = _document(text, file, findings, parents, 0) if text.strip() or not overrides else {}
    for number, override in enumerate(overrides, start=1):
        given |= _override(override, number, findings)
    if findings.all:
        raise ConfigError(findings.all)
    resolved, unresolved = _References(given, defaults).run()
    where = file if text.strip() else COMMAND_LINE
    return Source(system, resolved, defaults, Place(where, 1, 1, "", 1)), unresolved


def _document(
    text: str, file: str, findings: Findings, parents: Callable[[str], str] | None, depth: int
) -> dict[str, Given]:
    root = parse(text, file, findings)
    if root is None or not isinstance(root.value, dict):
        if root is not None and not root.broken:
            findings.error("AL803", "the text is not a mapping of keys", root.value_at)
        return {}
    given: dict[str, Given] = {}
    _flatten(root, (), given)
    name = given.get("defaults")
    if parents is not None and name is not None and isinstance(name.value, str):
        if depth >= MAX_DEPTH:
            findings.error("AL809", "the files under `defaults` name each other", name.place, path="defaults")
            return given
        try:
            inherited = parents(name.value)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            message = f"the file under `defaults`, {name.value}, cannot be read: {reason}"
            findings.error("AL801", message, name.place, path="defaults", help="give the file with all of its keys")
            return given
        given = _document(inherited, name.value, findings, parents, depth + 1) | given
    return given


def _flatten(entry: Entry, steps: tuple[paths.Step, ...], given: dict[str, Given]) -> None:
    if isinstance(entry.value, dict) and entry.value:
        for name, child in entry.value.items():
            _flatten(child, (*steps, name), given)
    elif not entry.broken:
        value = _plain(entry)
        given[paths.join(steps)] = Given(paths.join(steps), None if value == "???" else value, entry.at)


def _plain(entry: Entry) -> Any:
    if isinstance(entry.value, dict):
        return {name: _plain(child) for name, child in entry.value.items()}
    if isinstance(entry.value, list):
        return [_plain(child) for child in entry.value]
    return entry.value


def _override(text: str, number: int, findings: Findings) -> dict[str, Given]:
    name, equals, right = text.partition("=")
    key = name.strip().lstrip("+~")
    place = Place(COMMAND_LINE, number, 1, text, len(text))
    if not equals or paths.split(key) is None:
        hint = "write key=value, as in trainer.nnodes=2"
        findings.error("AL810", f"{text!r} is neither a file nor an override", place, help=hint)
        return {}
    start = name.index(key) + 1
    entry = parse(right, COMMAND_LINE, findings, within=Place(COMMAND_LINE, number, len(name) + 2, text, 1))
    given: dict[str, Given] = {}
    if entry is not None:
        entry.at = Place(COMMAND_LINE, number, start, text, len(key))
        _flatten(entry, tuple(paths.split(key) or ()), given)
    return given


class _References:
    """Follows `${a.b}`, `${.sibling}`, `${oc.select:a.b,default}` and `${mul:a,b}`."""

    def __init__(self, given: dict[str, Given], defaults: Mapping[str, Any]) -> None:
        self.given, self.defaults = given, defaults

    def run(self) -> tuple[dict[str, Given], tuple[Given, ...]]:
        found: dict[str, Given] = {}
        unresolved = []
        for key, given in self.given.items():
            try:
                value = self.value(given.value, key, (key,))
            except Unresolved:
                unresolved.append(given)
                continue
            found[key] = replace(given, value=value)
            if isinstance(value, dict) and given.value is not value:  # a reference to a whole section
                del found[key]
                prefix = f"{key}."
                found |= {prefix + inner: Given(prefix + inner, v, given.place) for inner, v in value.items()}
        return found, tuple(unresolved)

    def value(self, value: Any, key: str, way: tuple[str, ...]) -> Any:
        if isinstance(value, list):
            return [self.value(item, key, way) for item in value]
        if not isinstance(value, str) or "${" not in value:
            return value
        text: Any = value.replace(",{}}", ",}")
        for _ in range(MAX_DEPTH):
            match = _REFERENCE.search(text)
            if match is None:
                break
            target = self.target(match[1].strip(), key, way)
            if match.span() == (0, len(text)):
                return target
            if isinstance(target, dict | list):
                raise Unresolved
            text = f"{text[: match.start()]}{'null' if target is None else target}{text[match.end() :]}"
        if "${" in text:
            raise Unresolved
        return text

    def target(self, name: str, key: str, way: tuple[str, ...]) -> Any:
        if len(way) > MAX_DEPTH:
            raise Unresolved
        function, colon, arguments = name.partition(":")
        if not colon:
            return self.look_up(_absolute(name, key), way)
        parts = [part.strip() for part in arguments.split(",")]
        if function == "oc.select":
            try:
                found = self.look_up(_absolute(parts[0], key), way)
            except Unresolved:
                found = None
            return _scalar(",".join(parts[1:])) if found is None and len(parts) > 1 else found
        if function == "mul":
            factors = [_scalar(part) for part in parts]
            if all(isinstance(factor, int | float) for factor in factors):
                return prod(factors)
        raise Unresolved

    def look_up(self, key: str, way: tuple[str, ...]) -> Any:
        """`way`: the keys that led here. One that needs itself has no value; without that check two such references in
        one text would be followed 2 to the power of MAX_DEPTH times."""
        if key in way:
            raise Unresolved
        if key in self.given:
            return self.value(self.given[key].value, key, (*way, key))
        inside = {k.removeprefix(f"{key}."): g for k, g in self.given.items() if k.startswith(f"{key}.")}
        if inside:
            return {name: self.value(g.value, g.key, (*way, key)) for name, g in inside.items()}
        if key in self.defaults:
            return self.defaults[key]
        raise Unresolved


def _absolute(name: str, key: str) -> str:
    """A reference that begins with dots counts from the section around the key."""
    dots = len(name) - len(name.lstrip("."))
    if not dots:
        return name
    around = key.split(".")[:-dots]
    return ".".join([*around, name.lstrip(".")])


def _scalar(text: str) -> Any:
    if not text or text.lower() in ("null", "none"):
        return None
    entry = parse(text, "", Findings())
    return _plain(entry) if entry is not None else text


def read_file(path: str, beside: Path) -> str:
    """A text file named in another one, of at most 256 KiB."""
    with (beside / path).open("rb") as stream:
        data = stream.read((256 << 10) + 1)
    if len(data) > 256 << 10:
        raise ValueError("it is too large")
    return data.decode("utf-8-sig")
