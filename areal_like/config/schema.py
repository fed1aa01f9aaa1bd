"""The YAML of a run as JSON Schema (draft 2020-12), for editors: completion, documentation, red lines while typing.

It says what one key can say: names, types, choices, bounds, defaults. What takes several keys is left to the check. A
reference `${a.b}` may stand wherever a value can.
"""

from __future__ import annotations

from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from areal_like.config import paths
from areal_like.config.experiment import RLConfig
from areal_like.config.fields import Section, marks

DIALECT = "https://json-schema.org/draft/2020-12/schema"
_REFERENCE = {
    "type": "string",
    "pattern": r"\$\{[^{}]+\}",
    "description": "The value of another key, as in ${actor.path}.",
}
_BOUNDS = {"ge": "minimum", "gt": "exclusiveMinimum", "le": "maximum", "lt": "exclusiveMaximum"}


def schema() -> dict[str, Any]:
    """The whole schema, as plain data."""
    sections: dict[str, Any] = {}
    top = _section(RLConfig, sections)
    return {
        "$schema": DIALECT,
        "title": "areal-like run",
        **top,
        "$defs": {"reference": _REFERENCE, **dict(sorted(sections.items()))},
    }


def _section(model: type[Section], sections: dict[str, Any]) -> dict[str, Any]:
    """The schema of a section; those inside it go to `sections` by the names of their classes."""
    fields = paths.fields(model)
    required = [name for name, field in fields.items() if field.is_required()]
    return {
        "type": "object",
        "description": " ".join((model.__doc__ or "").split()),
        "properties": {name: _key(field, sections) for name, field in fields.items()},
        "additionalProperties": False,
        **({"required": required} if required else {}),
    }


def _key(field: FieldInfo, sections: dict[str, Any]) -> dict[str, Any]:
    mark = marks(field)
    allowed = mark.get("unsupported_unless")
    value = {"enum": [_plain(v) for v in allowed]} if allowed is not None else _type(field.annotation, sections)
    if allowed is None:
        value |= _bounds(field, value)
    choices = [*value.pop("anyOf", [value])]
    if mark.get("inherits") or mark.get("same_as"):  # both may be left empty
        choices += [choice for choice in ({"type": "null"}, {"const": ""}) if choice not in choices]
    found: dict[str, Any] = {"description": _text(field, mark), "anyOf": [*choices, {"$ref": "#/$defs/reference"}]}
    if mark.get("role"):
        found["examples"] = ["megatron:d2t2", "fsdp:d4"] if mark["role"] == "train" else ["huggingface:d1", "sglang:d4"]
    known, default = paths.default_of(field)
    if known and not (mark.get("inherits") or mark.get("same_as")) and paths.section_of(field) is None:
        found["default"] = _plain(default)
    if "no_effect" in mark or "refused_at_start" in mark:
        found["deprecated"] = True
    return found


def _text(field: FieldInfo, mark: dict[str, Any]) -> str:
    """The documentation of a key: what it means, its unit, and what this version does with it."""
    parts = [field.description or ""]
    if mark.get("unit"):
        parts.append(f"In {mark['unit']}.")
    if mark.get("inherits"):
        parts.append(f"Absent, null or empty: the value of {mark['inherits']}.")
    if mark.get("same_as"):
        parts.append(f"May be left out; otherwise it must equal {mark['same_as']}.")
    for name in ("why", "no_effect", "refused_at_start"):
        if mark.get(name):
            parts.append({"no_effect": "Without effect here: "}.get(name, "") + f"{mark[name]}.")
    return " ".join(parts)


def _type(annotation: Any, sections: dict[str, Any]) -> dict[str, Any]:
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin in (Union, UnionType):
        return {"anyOf": [_type(part, sections) for part in inner]}
    if origin is Literal:
        return {"enum": list(inner)}
    if origin is tuple:
        items = {"anyOf": [_type(inner[0], sections), {"$ref": "#/$defs/reference"}]}
        return {"type": "array", "items": items}
    if origin is dict:
        return {"type": "object"}
    if isinstance(annotation, type) and issubclass(annotation, Section):
        if annotation.__name__ not in sections:
            sections[annotation.__name__] = {}  # holds the place while the section is made
            sections[annotation.__name__] = _section(annotation, sections)
        return {"$ref": f"#/$defs/{annotation.__name__}"}
    names = {str: "string", int: "integer", float: "number", bool: "boolean", NoneType: "null"}
    return {"type": names[annotation]}


def _bounds(field: FieldInfo, value: dict[str, Any]) -> dict[str, Any]:
    """Bounds and patterns, put where they hold: beside a number or a text, not beside null."""
    found: dict[str, Any] = {}
    for rule in field.metadata:
        found |= {
            name: getattr(rule, short) for short, name in _BOUNDS.items() if getattr(rule, short, None) is not None
        }
        if getattr(rule, "pattern", None) is not None:
            found["pattern"] = rule.pattern
        if getattr(rule, "min_length", None) is not None:
            found["minLength"] = rule.min_length
    if found and "anyOf" in value:
        return {"anyOf": [part if part == {"type": "null"} else part | found for part in value["anyOf"]]}
    return found


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
