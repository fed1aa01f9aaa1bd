"""Writes the reference of the configuration: `python -m areal_like.config.docs > docs/configuration.md`."""

from __future__ import annotations

import sys
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from areal_like.config import paths
from areal_like.config.experiment import RLConfig
from areal_like.config.fields import Section, marks
from areal_like.config.findings import CODES

_HEAD = """\
# Configuration

<!-- Written by `python -m areal_like.config.docs > docs/configuration.md`; edit the schema instead. -->

A run is one YAML file. `load_config(path, overrides)` checks all of it and reports every fault at once, each with its
file, line and column.

- **Overrides.** `key=value` on the command line sets any key below, whether or not the file has it:
  `actor.optimizer.lr=1e-5`, `ref=null`, `gconfig.stop_token_ids=[2]`, `gconfig.stop_token_ids[0]=0`. The right side is
  YAML; a mapping such as `actor.optimizer={lr: 1e-5, weight_decay: 0}` changes the keys that it names. In a shell, put
  quotes around brackets and spaces.
- **References.** `${a.b}` is the value of another key, also of one that has its default; inside a longer text it is
  written out. References are followed after overrides. `\\${` stands for the characters themselves.
- **Inherited keys.** A key that inherits takes the value of the key named, when it is absent, null or empty.
- **Numbers and words** follow YAML 1.2: `3e-6` is a number; `yes`, `on` and `off` are texts, not true and false.

The column *effect* says what this version does with a key: *yes*, some code acts on it; *none*, it loads and a note
says why it does nothing here; *only X*, any other value is refused; *repeats X*, it may be left out and must otherwise
agree.
"""


def markdown() -> str:
    """The whole page."""
    parts = [_HEAD]
    tables: list[tuple[str, type[Section], str]] = [("", RLConfig, RLConfig.__doc__ or "")]
    seen: dict[type[Section], str] = {}
    while tables:
        path, model, text = tables.pop(0)
        title = f"`{path}`" if path else "Top of the file"
        if model in seen:
            parts.append(f"## {title}\n\nAs `{seen[model]}`.\n")
            continue
        seen[model] = path
        parts.append(f"## {title}\n\n{_first_line(text)}\n\n{_table(model)}\n")
        inner = []
        for name, field in paths.fields(model).items():
            section = paths.section_of(field)
            if section is not None:
                inner.append((f"{path}.{name}" if path else name, section, section.__doc__ or ""))
        tables[:0] = inner
    rows = "\n".join(f"| {code} | {text} |" for code, text in CODES.items())
    parts.append(
        "## Codes\n\nFindings about a `backend` string carry the codes of the language (AL0 to AL2).\n\n"
        f"| code | meaning |\n|---|---|\n{rows}\n"
    )
    return "\n".join(parts)


def _first_line(text: str) -> str:
    return text.strip().split("\n\n")[0].replace("\n", " ")


def _table(model: type[Section]) -> str:
    rows = ["| key | type | default | unit | meaning | effect |", "|---|---|---|---|---|---|"]
    for name, field in paths.fields(model).items():
        mark = marks(field)
        cells = [
            f"`{name}`",
            _type(field.annotation) + _bounds(field),
            _default(field, mark),
            str(mark.get("unit", "")),
            field.description or "",
            _effect(mark),
        ]
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(rows)


def _type(annotation: Any) -> str:
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin in (Union, UnionType):
        return ", ".join("null" if part is NoneType else _type(part) for part in inner)
    if origin is Literal:
        return ", ".join(f"`{choice}`" for choice in inner)
    if origin is tuple:
        return f"list of {_type(inner[0])}"
    if origin is dict:
        return "mapping"
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return "section"
    return {str: "text", int: "whole number", float: "number", bool: "true, false"}[annotation]


def _bounds(field: FieldInfo) -> str:
    signs = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
    found = []
    for rule in field.metadata:
        found += [f"{sign} {getattr(rule, name)}" for name, sign in signs.items() if hasattr(rule, name)]
    return f" {', '.join(found)}" if found else ""


def _default(field: FieldInfo, mark: dict[str, Any]) -> str:
    origin = mark.get("inherits") or mark.get("same_as")
    if origin:
        return f"`{origin}`"
    known, value = paths.default_of(field)
    if not known:
        return "**required**"
    if paths.section_of(field) is not None:
        return "" if value is not None else "null"
    return f"`{_yaml(value)}`"


def _yaml(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple | list):
        return "[" + ", ".join(map(_yaml, value)) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name}: {_yaml(inner)}" for name, inner in value.items()) + "}"
    return str(value)


def _effect(mark: dict[str, Any]) -> str:
    if "no_effect" in mark:
        return f"none: {mark['no_effect']}"
    if "unsupported_unless" in mark:
        return f"only {' or '.join(f'`{_yaml(value)}`' for value in mark['unsupported_unless'])}: {mark['why']}"
    if "refused_at_start" in mark:
        return str(mark["refused_at_start"])
    if "same_as" in mark:
        return f"repeats `{mark['same_as']}`"
    return "yes"


if __name__ == "__main__":
    sys.stdout.write(markdown())
