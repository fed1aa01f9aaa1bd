"""This system's side of a conversion: keys become a YAML file that loads, and a file that loads becomes keys."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from areal_like.config import paths
from areal_like.config.convert.draft import Draft, Given, NoCounterpart, Row, Source
from areal_like.config.experiment import RLConfig
from areal_like.config.fields import is_marked, marks
from areal_like.config.findings import Place
from areal_like.config.written import shown

_REQUIRED: tuple[tuple[str, Any, str], ...] = (
    ("experiment_name", "converted", "a run needs a name"),
    ("trial_name", "t0", "a trial needs a name"),
    ("rollout.backend", "sglang:d*", "no inference engine is named"),
    ("actor.backend", "megatron:d*", "no layout is given"),
    ("actor.path", "path/to/model", "no Hugging Face model is named: put yours here"),
    ("actor.optimizer.lr", 1e-6, "no learning rate is given"),
    ("train_dataset.path", "path/to/dataset", "no dataset is named: put yours here"),
    ("train_dataset.batch_size", 8, "no batch is given"),
)
"""Keys that a file must have, and what stands there until the user says it."""

_PLAIN = re.compile(r"[A-Za-z_/][A-Za-z0-9_./@*+-]*(?::[A-Za-z0-9_./*@+-]+)*")
_WORDS = {"null", "true", "false", "yes", "no", "on", "off", "y", "n"}


def to_yaml(draft: Draft, *, fragment: bool = False) -> str:
    """The YAML of a draft. Values that this version refuses are left out and said.

    `fragment`: only what the input says; otherwise every key that a file must have is there.
    """
    values = dict(draft.values)
    for key, value in draft.values.items():
        _, reason = _refusal(key, value)
        if reason is not None:
            del values[key]
            draft.left_out(draft.origin[key], f"{key} {reason}")
    if "valid_dataset.path" not in values:
        for key in [key for key in values if key.startswith("valid_dataset.")]:
            del values[key]
            if not draft.origin[key].default:
                draft.left_out(draft.origin[key], "no data to validate on are named")
    draft.values = values
    if not fragment:
        for key, value, why in _REQUIRED:
            draft.assumed(key, value, why)
    tree: dict[str, Any] = {}
    for key in sorted(draft.values, key=_order):
        *sections, last = key.split(".")
        inner = tree
        for name in sections:
            inner = inner.setdefault(name, {})
        if not (draft.values[key] == {} and inner.get(last)):
            inner[last] = draft.values[key]
    return "".join(_lines(tree, ""))


def _refusal(key: str, value: Any) -> tuple[bool, str | None]:
    """Whether the schema has the key, and why it cannot have this value in this version."""
    field = paths.find(RLConfig, tuple(key.split(".")))
    if field is None:
        return False, "is no key of this version"
    allowed = marks(field).get("unsupported_unless")
    if allowed is None or value in allowed:
        return True, None
    return True, f"takes only {' or '.join(scalar(v) for v in allowed)} in this version: {marks(field).get('why')}"


def _order(key: str) -> tuple[int, ...]:
    """The order of the schema, so that a file reads from names and machine to engines and data."""
    model: Any = RLConfig
    order = []
    for name in key.split("."):
        names = list(paths.fields(model)) if model is not None else []
        order.append(names.index(name) if name in names else len(names))
        field = paths.fields(model).get(name) if model is not None else None
        model = paths.section_of(field) if field is not None else None
    return tuple(order)


def _lines(tree: Mapping[str, Any], indent: str) -> list[str]:
    lines = []
    for name, value in tree.items():
        if isinstance(value, dict) and value:
            lines.append(f"{indent}{scalar(name)}:\n")
            lines += _lines(value, f"{indent}  ")
        else:
            lines.append(f"{indent}{scalar(name)}: {scalar(value)}\n")
    return lines


def scalar(value: Any) -> str:
    """A value as YAML 1.2 and 1.1 both read it back; a text is quoted where it could be read as anything else."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    if isinstance(value, float):
        text = repr(value)
        mantissa, e, exponent = text.partition("e")
        return f"{mantissa if '.' in mantissa else mantissa + '.0'}e{exponent}" if e else text
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(scalar, value))}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{scalar(k)}: {scalar(v)}" for k, v in value.items()) + "}"
    if not isinstance(value, str):
        return str(value)
    if _PLAIN.fullmatch(value) and value.lower() not in _WORDS:
        return value
    quoted = json.dumps(value.replace("${", "\\${"), ensure_ascii=False)
    return "".join(c if c.isprintable() and ord(c) < 0xE000 else _escaped(c) for c in quoted)


def _escaped(character: str) -> str:
    code = ord(character)
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def as_source(config: RLConfig) -> Source:
    """A loaded configuration as keys: those that say something, and below them the defaults of all."""
    given: dict[str, Given] = {}
    defaults: dict[str, Any] = {}
    _flat(config, (), config, given, defaults)
    return Source("this configuration", given, defaults, _place(config, "experiment_name"))


def _flat(
    section: BaseModel, steps: tuple[str, ...], config: RLConfig, given: dict[str, Given], defaults: dict[str, Any]
) -> None:
    for name, field in paths.fields(type(section)).items():  # type: ignore[arg-type]
        here = (*steps, name)
        value = getattr(section, name)
        if isinstance(value, BaseModel):
            before = len(given)
            _flat(value, here, config, given, defaults)
            if len(given) == before and field.default is None and not _idle(value):
                given[".".join(here)] = Given(".".join(here), "{}", _place(config, ".".join(here)))
            continue
        plain = list(value) if isinstance(value, tuple) else value
        key, mark = ".".join(here), marks(field)
        defaults[key] = plain
        known, default = paths.default_of(field)
        silent = "same_as" in mark or _inherited(mark, plain, defaults, config)
        differs = not known or plain != (list(default) if isinstance(default, tuple) else default)
        if differs and not silent:
            given[key] = Given(key, plain, _place(config, key))


def _idle(section: BaseModel) -> bool:
    """Whether nothing acts on any key of a section."""
    return all(is_marked(field) for field in type(section).model_fields.values())


def _inherited(mark: dict[str, Any], value: Any, defaults: dict[str, Any], config: RLConfig) -> bool:
    """Whether a key only has the value of the one that it inherits from."""
    origin = mark.get("inherits")
    if origin is None:
        return False
    current: Any = config
    for name in str(origin).split("."):
        current = getattr(current, name, None)
    return bool(current == value)


def _place(config: RLConfig, key: str) -> Place:
    where = config.location(key)
    return Place(where.file, where.line, where.column, "", 1)


def write_rows(source: Source, rows: tuple[Row, ...], draft: Draft) -> None:
    """Every row backwards: the other system's keys, where they are not its default."""
    written: set[str] = set()
    for row in rows:
        if not row.ours or row.ours in written:
            continue
        written.add(row.ours)
        given = source.take(row.ours)
        try:
            value = row.back(given.value if given else None) if row.back else given.value if given else None
        except NoCounterpart as error:
            if given is not None:
                draft.left_out(given, str(error))
            continue
        by_default = given is None or given.default
        if value in (None, []) or value == row.default or (by_default and row.default is None):
            continue
        where = given or Given(row.ours, None, source.place, default=True)
        if row.note and not where.default:
            draft.changed(where, row.note)
        draft.put(row.theirs, value, where)


def together(source: Source) -> bool:
    """Whether the rollout engine is said to share the trainer's GPUs."""
    strategies = [source.value(f"{role}.scheduling_strategy") for role in ("rollout", "actor")]
    return any(isinstance(s, dict) and s.get("type") == "colocation" for s in strategies)


def fixed_there(source: Source, draft: Draft, values: Mapping[str, Any], system: str) -> None:
    """Keys that have one value in the other system: any other, also a default, is said to be left out."""
    for key, value in values.items():
        given = source.take(key)
        if given is not None and given.value != value:
            draft.left_out(given, f"{system} always has {shown(value)}")


def nested(values: Mapping[str, Any]) -> str:
    """Flat keys of another system as its YAML."""
    tree: dict[str, Any] = {}
    for key, value in sorted(values.items()):
        *sections, last = key.split(".")
        inner = tree
        for name in sections:
            inner = inner.setdefault(name, {})
        inner[last] = value
    return "".join(_lines(tree, ""))
