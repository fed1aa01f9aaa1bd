"""`load_config`: one file and some overrides -> one immutable configuration, or every finding at once."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from areal_like.config import consistency, honour, layouts, paths
from areal_like.config.experiment import AT_START, RLConfig
from areal_like.config.findings import ConfigError, Findings, Location, Place
from areal_like.config.nodes import Entry, parse
from areal_like.config.overrides import apply as apply_overrides
from areal_like.config.references import Resolver, insert_inherited
from areal_like.config.validation import nearest, validate

MAX_BYTES = 256 << 10
"""Largest file that is read, in bytes."""


def load_config(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> RLConfig:
    """Load a YAML file, apply `key=value` overrides, follow references, and check everything.

    `config.diagnostics` holds what is worth knowing; `config.ensure_runnable()` refuses what no run can start with.

    Raises:
        ConfigError: with all findings; nothing else is raised for any content of the file or of the overrides.
    """
    findings = Findings()
    file = os.fspath(path)
    root = _read(file, findings)
    apply_overrides(RLConfig, root, list(overrides), findings)
    insert_inherited(RLConfig, root)
    if not Resolver(RLConfig, root, findings).run():
        raise ConfigError(findings.all)
    config, bad = validate(root, findings)
    honour.check(root, bad, findings)
    layouts.check(root, findings)
    if config is not None:
        consistency.check(config, lambda key: nearest(root, paths.split(key) or ())[0].at, findings)
    if config is None or any(d.severity == "error" and d.code not in AT_START for d in findings.all):
        raise ConfigError(d for d in findings.all if d.severity != "info")
    config.attach(_locations(root), findings.all)
    return config


def _read(file: str, findings: Findings) -> Entry:
    """The tree of a file that is a mapping; ConfigError when it is none."""
    start = Place(file, 1, 1, "", 1)
    try:
        data = _bytes(file)
        text = data.decode("utf-8-sig")
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
