"""YAML text -> a tree in which every key and value knows its place.

The dialect is YAML's core schema, as OmegaConf users expect it and PyYAML's default is not: `3e-6` is a number, and
`yes`, `on` and `off` are texts.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import yaml

from areal_like.config.findings import Findings, Place

MAX_NODES = 20_000
"""Most keys and values of a file, aliases and references counted as often as they are used."""

_LINE_BREAK = re.compile("\r\n|[\n\r\x85\u2028\u2029]")  # those at which PyYAML counts a line


@dataclass
class Entry:
    """A value, its place, and that of its key.

    Attributes:
        value: None, bool, int, float, str, a list of entries, or a dict of entries by key.
        at: the key; for an item of a list, the item.
        value_at: the value.
        text_at: first character of a text that stands in the source as it is; None when it was escaped or computed.
        implicit: not written by the user: it takes its value from another key.
    """

    value: Any
    at: Place
    value_at: Place
    text_at: Place | None = None
    implicit: bool = False
    broken: bool = field(default=False)
    """A finding about it has been made: nothing more is to be said."""


class _Loader(yaml.SafeLoader):
    """Composes nodes with the core schema's idea of what a plain scalar is."""

    yaml_implicit_resolvers: dict[str, list[Any]] = {}  # noqa: RUF012  (PyYAML's own attribute)


_TAG = "tag:yaml.org,2002:"
_NUMBER_STARTS = list("-+.0123456789")
for _kind, _pattern, _first in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?[0-9][0-9_]*|0x[0-9a-fA-F]+", _NUMBER_STARTS),
    ("float", r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?", _NUMBER_STARTS),
    ("float", r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)", _NUMBER_STARTS),
    ("merge", r"<<", ["<"]),
):
    _Loader.add_implicit_resolver(_TAG + _kind, re.compile(rf"^(?:{_pattern})$"), _first)


def parse(text: str, file: str, findings: Findings, *, within: Place | None = None) -> Entry | None:
    """The tree of a document; None when it cannot be made, which `findings` then explains.

    `within` is the place where the text starts, when it is the end of a longer line (an override).
    """
    source = _Source(text, file, within)
    try:
        node = yaml.compose(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = source.place(mark.line, mark.column) if mark else source.start
        said = " ".join(part for part in (error.context, error.problem) if part)
        findings.error("AL802", f"this is not YAML: {said}", place, help=_syntax_help(place, error))
        return None
    except yaml.reader.ReaderError as error:
        before = text[: error.position]
        line = len(_LINE_BREAK.findall(before))
        column = len(_LINE_BREAK.split(before)[-1])
        message = f"this is not YAML: the character {chr(int(error.character))!r} is not allowed"
        findings.error("AL802", message, source.place(line, column))
        return None
    except RecursionError:
        findings.error("AL802", "this is not usable YAML: it is nested too deeply", source.start)
        return None
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        findings.error("AL802", f"this is not YAML: {error}", source.start)
        return None
    if node is None:
        return Entry(None, source.start, source.start)
    builder = _Builder(source, findings)
    root = builder.entry(node, source.place(node.start_mark.line, node.start_mark.column))
    return root if builder.count <= MAX_NODES else None


def _syntax_help(place: Place, error: yaml.MarkedYAMLError) -> str | None:
    problem = error.problem or ""
    if place.source[: place.column].endswith("${"):
        return 'between { } or [ ], put quotes around a reference: "${a.b}"'
    if "\\t" in problem or "'\t'" in problem:
        return "indent with spaces, not with tabs"
    if "mapping values are not allowed" in problem:
        return "quote a text that contains a colon followed by a space"
    if "expected <block end>" in problem:
        return "keys of one section start in the same column"
    return None


class _Source:
    """The text, its lines, and places in it."""

    def __init__(self, text: str, file: str, within: Place | None) -> None:
        self.file, self.within = file, within
        self.lines = _LINE_BREAK.split(text)

    def place(self, line: int, column: int, width: int = 1) -> Place:
        """From 0-based line and column."""
        if self.within is not None:
            w = self.within
            offset = sum(len(text) + 1 for text in self.lines[:line])
            return Place(w.file, w.line, w.column + offset + column, w.source, width)
        return Place(self.file, line + 1, column + 1, self.lines[min(line, len(self.lines) - 1)], width)

    @property
    def start(self) -> Place:
        return self.place(0, 0)

    def of(self, node: yaml.Node) -> Place:
        start, end = node.start_mark, node.end_mark
        one_line = start.line == end.line
        width = (end.column if one_line else len(self.lines[min(start.line, len(self.lines) - 1)])) - start.column
        return self.place(start.line, start.column, max(1, width))


class _Builder:
    def __init__(self, source: _Source, findings: Findings) -> None:
        self.source, self.findings = source, findings
        self.count = 0
        self.open: set[int] = set()

    def entry(self, node: yaml.Node, at: Place) -> Entry:
        """The entry of a node whose key stands at `at`."""
        value_at = self.source.of(node)
        self.count += 1
        if self.count > MAX_NODES:
            if self.count == MAX_NODES + 1:
                self.findings.error("AL802", f"the file has more than {MAX_NODES} keys and values", value_at)
            return Entry(None, at, value_at, broken=True)
        if id(node) in self.open:
            self.findings.error("AL802", "an alias stands inside the value that it names", value_at)
            return Entry(None, at, value_at, broken=True)
        self.open.add(id(node))
        try:
            if isinstance(node, yaml.MappingNode) and node.tag == _TAG + "map":
                return Entry(self.mapping(node), at, value_at)
            if isinstance(node, yaml.SequenceNode) and node.tag == _TAG + "seq":
                return Entry([self.entry(item, self.source.of(item)) for item in node.value], at, value_at)
            if isinstance(node, yaml.ScalarNode):
                return self.scalar(node, at, value_at)
        except RecursionError:
            self.findings.error("AL802", "this is not usable YAML: it is nested too deeply", value_at)
            return Entry(None, at, value_at, broken=True)
        finally:
            self.open.discard(id(node))
        return self.wrong_tag(node, at, value_at)

    def wrong_tag(self, node: yaml.Node, at: Place, value_at: Place) -> Entry:
        self.findings.error("AL802", f"the tag {node.tag!r} is not allowed here", value_at, help="write a plain value")
        return Entry(None, at, value_at, broken=True)

    def mapping(self, node: yaml.MappingNode) -> dict[str, Entry]:
        found: dict[str, Entry] = {}
        merged: dict[str, Entry] = {}
        for key_node, value_node in node.value:
            at = self.source.of(key_node)
            if key_node.tag == _TAG + "merge":
                self.merge(value_node, at, merged)
                continue
            if not isinstance(key_node, yaml.ScalarNode) or key_node.tag != _TAG + "str":
                self.findings.error(
                    "AL805", "a key is a name; this is not", at, help="quote it if it is meant as a name"
                )
                continue
            name = key_node.value
            value = self.entry(value_node, at)
            if name in found:
                first = found[name].at
                message = f"{name!r} is given twice; the first stands in line {first.line}, column {first.column}"
                self.findings.error("AL804", message, at, help="remove one of them")
                continue
            found[name] = value
        return {**merged, **found}

    def merge(self, node: yaml.Node, at: Place, merged: dict[str, Entry]) -> None:
        """`<<: *anchor`, or a list of them of which the first one that has a key counts."""
        value = self.entry(node, at)
        for source in value.value if isinstance(value.value, list) else [value]:
            if isinstance(source.value, dict):
                for name, entry in source.value.items():
                    merged.setdefault(name, entry)
            elif not source.broken:
                self.findings.error("AL802", "`<<` takes a mapping or a list of mappings", at)

    def scalar(self, node: yaml.ScalarNode, at: Place, value_at: Place) -> Entry:
        kind, text = node.tag.removeprefix(_TAG), node.value
        try:
            if kind == "str":
                return Entry(text, at, value_at, text_at=self.text_place(node))
            if kind == "null":
                return Entry(None, at, value_at)
            if kind == "bool" and text.lower() in ("true", "false"):
                return Entry(text.lower() == "true", at, value_at)
            if kind == "int":
                return Entry(int(text, 16 if text.startswith("0x") else 10), at, value_at)
            if kind == "float":
                return Entry(float(text.lower().replace(".inf", "inf").replace(".nan", "nan")), at, value_at)
        except ValueError:
            self.findings.error("AL807", f"this is not a usable {kind}", value_at)
            return Entry(None, at, value_at, broken=True)
        return self.wrong_tag(node, at, value_at)

    def text_place(self, node: yaml.ScalarNode) -> Place | None:
        """Where the text starts, when the source holds it unchanged, with or without quotes around it."""
        inside = self.source.of(node)
        quote = 1 if node.style in ("'", '"') else 0
        start = node.start_mark.column + quote
        line = self.source.lines[min(node.start_mark.line, len(self.source.lines) - 1)]
        if line[start : start + len(node.value)] != node.value:
            return None
        return Place(inside.file, inside.line, inside.column + quote, inside.source, len(node.value))


def plain(entry: Entry) -> Any:
    """Ordinary Python values of a tree."""
    if isinstance(entry.value, dict):
        return {name: plain(child) for name, child in entry.value.items()}
    if isinstance(entry.value, list):
        return [plain(child) for child in entry.value]
    return entry.value


def child_of(entry: Entry, step: str | int) -> Entry | None:
    """What a section or a list holds under a name or a position."""
    if isinstance(entry.value, dict):
        return entry.value.get(str(step))
    if isinstance(entry.value, list) and str(step).isdecimal() and int(step) < len(entry.value):
        child: Entry = entry.value[int(step)]
        return child
    return None
