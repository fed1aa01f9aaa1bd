"""Dotted keys such as `actor.optimizer.lr` or `rollout.scheduling_spec[0].cpu`, and what the schema says about them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from areal_like.config.fields import Section

Step = str | int

_STEP = re.compile(r"(?:^|\.)([^.\[\]\s{}$:,]+)|\[([0-9]{1,9})\]")


def split(path: str) -> tuple[Step, ...] | None:
    """The steps of a dotted key; None when it is not one. List positions are written `[0]` or `.0`."""
    steps: list[Step] = []
    position = 0
    while position < len(path):
        match = _STEP.match(path, position)
        if match is None:
            return None
        name, index = match.groups()
        steps.append(int(index) if name is None else name)
        position = match.end()
    return tuple(steps) or None


def join(steps: tuple[Step, ...]) -> str:
    text = ""
    for step in steps:
        text += f"[{step}]" if isinstance(step, int) else f".{step}" if text else step
    return text


def section_of(field: FieldInfo) -> type[Section] | None:
    """The schema of a key that holds a section, also when it may be null."""
    return _section(field.annotation)


def _section(annotation: Any) -> type[Section] | None:
    if get_origin(annotation) in (Union, UnionType):
        inner = [part for part in get_args(annotation) if part is not NoneType]
        return _section(inner[0]) if len(inner) == 1 else None
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    return None


def fields(model: type[Section]) -> dict[str, FieldInfo]:
    return model.model_fields


def keys(model: type[Section], prefix: tuple[Step, ...] = ()) -> Iterator[tuple[tuple[Step, ...], FieldInfo]]:
    """Every key of the schema with its steps, sections before what they hold."""
    for name, field in fields(model).items():
        steps = (*prefix, name)
        yield steps, field
        inner = section_of(field)
        if inner is not None:
            yield from keys(inner, steps)


def find(model: type[Section], steps: tuple[Step, ...]) -> FieldInfo | None:
    """The declaration of a key; None when the schema has no such key (or it lies inside a free mapping or a list)."""
    field: FieldInfo | None = None
    current: type[Section] | None = model
    for step in steps:
        if current is None or not isinstance(step, str) or step not in fields(current):
            return None
        field = fields(current)[step]
        current = section_of(field)
    return field


def default_of(field: FieldInfo) -> tuple[bool, Any]:
    """Whether a key has a default, and its plain value."""
    value = field.get_default(call_default_factory=True)
    if value is PydanticUndefined:
        return False, None
    return True, value.model_dump() if isinstance(value, BaseModel) else value


def default_at(model: type[Section], steps: tuple[Step, ...], given: int) -> tuple[bool, Any]:
    """The default of a key of which the file gives the first `given` steps, and whether there is one."""
    field = find(model, steps[: given + 1])
    known, value = default_of(field) if field is not None else (False, None)
    for step in steps[given + 1 :]:
        if not known or not isinstance(value, dict) or step not in value:
            return False, None
        value = value[step]
    return known, value
