"""`load_config`: one file and some overrides -> one immutable configuration, or every finding at once.

`examine` does the same and goes on after errors, for the check.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from areal_like.alloc import Diagnostic
from areal_like.config import aliases, consistency, honour, layouts, paths
from areal_like.config.experiment import AT_START, RLConfig
from areal_like.config.findings import ConfigError, Findings, Location, Place
from areal_like.config.nodes import Entry, parse
from areal_like.config.overrides import apply as apply_overrides
from areal_like.config.references import Resolver, insert_inherited
from areal_like.config.repair import repair
from areal_like.config.validation import nearest, validate

MAX_BYTES = 256 << 10
"""Largest file that is read, in bytes."""


class Examined(NamedTuple):
    """A file looked at.

    Attributes:
        config: None when there is none that could be checked; otherwise made of what is right in the file.
        diagnostics: every finding, in the order in which they were made.
        complete: the whole file is in `config`. If not, keys that are wrong or missing stand in it at their defaults.
    """

    config: RLConfig | None
    diagnostics: tuple[Diagnostic, ...]
    complete: bool


def load_config(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> RLConfig:
    """Load a YAML file, apply `key=value` overrides, follow references, and check everything.

    `config.diagnostics` holds what is worth knowing; `config.ensure_runnable()` refuses what no run can start with.

    Raises:
        ConfigError: with all findings; nothing else is raised for any content of the file or of the overrides.
    """
    config, found, complete = examine(path, overrides)
    if config is None or not complete or any(d.severity == "error" and d.code not in AT_START for d in found):
        raise ConfigError(d for d in found if d.severity != "info")
    return config


def examine(path: str | os.PathLike[str], overrides: Sequence[str] = (), *, text: str | None = None) -> Examined:
    """Look at a file as `load_config` does, and make of it what can be made: nothing is raised.

    Args:
        path: the file, or what to call it when its `text` is given.
    """
    findings = Findings()
    file = os.fspath(path)
    try:
        root = _tree(_text(file, findings) if text is None else text, file, findings)
    except ConfigError as error:
        return Examined(None, error.diagnostics, False)
    aliases.apply(root, findings)
    apply_overrides(RLConfig, root, aliases.renamed(overrides, findings), findings)
    insert_inherited(RLConfig, root)
    if not Resolver(RLConfig, root, findings).run():
        return Examined(None, findings.all, False)
    config, bad = validate(root, findings)
    honour.check(root, bad, findings)
    layouts.check(root, findings)
    complete = config is not None
    if config is not None:
        consistency.check(config, lambda key: nearest(root, paths.split(key) or ())[0].at, findings)
    else:
        config = repair(root)
    if config is not None:
        config.attach(_locations(root), findings.all)
    return Examined(config, findings.all, complete)


def read_text(path: str | os.PathLike[str]) -> str | tuple[Diagnostic, ...]:
    """What a file says, or why it cannot be read."""
    try:
        return _text(os.fspath(path), Findings())
    except ConfigError as error:
        return error.diagnostics


def _text(file: str, findings: Findings) -> str:
    """What a file says; ConfigError when it cannot be read."""
    start = Place(file, 1, 1, "", 1)
    try:
        data = _bytes(file)
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        column = error.start - (data.rfind(b"\n", 0, error.start) + 1) + 1
        place = Place(file, line, column, "", 1)
        findings.error("AL801", "the file is not UTF-8 text", place, help="save it as UTF-8")
        raise ConfigError(findings.all) from None
    except (OSError, ValueError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        findings.error("AL801", f"the file cannot be read: {reason}", start, help="give the path of a YAML file")
        raise ConfigError(findings.all) from None


def _tree(text: str, file: str, findings: Findings) -> Entry:
    """The tree of a text that is a mapping; ConfigError when it is none."""
    root = parse(text, file, findings)
    if root is None:
        raise ConfigError(findings.all)
    if not isinstance(root.value, dict):
        empty = root.value is None and not root.broken
        message = "the file is empty" if empty else "the file is not a mapping of keys"
        hint = "a configuration starts with experiment_name: NAME"
        findings.error("AL803", message, root.value_at, help=hint)
        raise ConfigError(findings.all)
    return root


def _bytes(file: str) -> bytes:
    if Path(file).is_dir():
        raise ValueError("it is a folder")
    with open(file, "rb") as stream:
        data = stream.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise ValueError(f"it has more than {MAX_BYTES} bytes")
    return data


def _locations(root: Entry) -> dict[str, Location]:
    found: dict[str, Location] = {}

    def walk(entry: Entry, steps: tuple[paths.Step, ...]) -> None:
        found[paths.join(steps)] = entry.at.location
        if isinstance(entry.value, dict):
            for name, child in entry.value.items():
                walk(child, (*steps, name))
        elif isinstance(entry.value, list):
            for index, child in enumerate(entry.value):
                walk(child, (*steps, index))

    walk(root, ())
    return found
