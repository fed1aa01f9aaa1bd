"""How a key of the schema is declared: its default, its meaning, its unit, and how far this version honours it.

Every key says one of these about itself, and the loader, the documentation and the tests read nothing else:

- no mark: some code reads it;
- `no_effect`: it loads, and has nothing to act on in this system; setting it yields an `info`;
- `unsupported_unless`: only these values can be honoured by this version; any other is an error;
- `refused_at_start`: it loads, so that a file can be checked and explained, but no run starts with it;
- `same_as`: repeats another key (AReaL's files write the trial name seven times); a differing value is an error;
- `inherits`: not a limit: when the key is absent, null or empty it takes the value of that other key.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field
from pydantic.fields import FieldInfo

REQUIRED: Any = ...
"""Default of a key that must be given."""


class Section(BaseModel):
    """A mapping of the YAML file: immutable, strict about types, closed to unknown keys."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        validate_default=False,
        protected_namespaces=(),
        defer_build=True,
    )


def key(
    default: Any,
    text: str,
    *,
    unit: str | None = None,
    no_effect: str | None = None,
    unsupported_unless: tuple[Any, ...] | None = None,
    why: str | None = None,
    refused_at_start: str | None = None,
    same_as: str | None = None,
    inherits: str | None = None,
    role: str | None = None,
    **constraints: Any,
) -> Any:
    """A documented key. `default` may be a type or function, which is then called for each new section."""
    marks = {
        "unit": unit,
        "no_effect": no_effect,
        "unsupported_unless": unsupported_unless,
        "why": why,
        "refused_at_start": refused_at_start,
        "same_as": same_as,
        "inherits": inherits,
        "role": role,
    }
    extra: dict[str, Any] = {name: value for name, value in marks.items() if value is not None}
    if callable(default) and default is not REQUIRED:
        return Field(default_factory=default, description=text, json_schema_extra=extra, **constraints)
    return Field(default, description=text, json_schema_extra=extra, **constraints)


def marks(field: FieldInfo) -> dict[str, Any]:
    """The marks of a key, as given to `key`."""
    extra = field.json_schema_extra
    return extra if isinstance(extra, dict) else {}


def is_marked(field: FieldInfo) -> bool:
    """Whether a key is exempt from being read by the code, because the loader already deals with each of its values."""
    return bool({"no_effect", "unsupported_unless", "refused_at_start", "same_as"} & marks(field).keys())


def run_name() -> Any:
    return key("", "Name of the experiment again; taken from the top of the file.", same_as="experiment_name")


def trial_name() -> Any:
    return key("", "Name of the trial again; taken from the top of the file.", same_as="trial_name")


def fileroot() -> Any:
    return key("", "Folder of all runs again; taken from `cluster.fileroot`.", same_as="cluster.fileroot")
