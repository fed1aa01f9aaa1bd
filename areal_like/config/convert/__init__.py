"""Configurations of other systems as ours, and ours as theirs.

    convert("verl", "ours", text) -> Converted

Nothing is dropped in silence: a key without counterpart is a finding (AL820), as are a value that had to be assumed
(AL821), one that is carried over with another meaning (AL822), and values that contradict each other (AL823, an error).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from areal_like.alloc import Diagnostic
from areal_like.config.convert import allocation_mode, megatron_lm, megatron_lm_write, nemo_rl, verl, verl_write
from areal_like.config.convert.draft import Draft, Given, Source
from areal_like.config.convert.ours import as_source, nested, to_yaml
from areal_like.config.convert.reading import read_file, read_yaml
from areal_like.config.experiment import AT_START, RLConfig
from areal_like.config.findings import ConfigError, Findings, Place
from areal_like.config.loader import examine

__all__ = ["FROM", "TO", "Converted", "convert", "read_input"]

FROM = ("verl", "megatron-lm", "nemo-rl", "allocation_mode", "ours")
TO = ("ours", "verl", "megatron-lm", "nemo-rl")


@dataclass(frozen=True)
class Converted:
    """What came of a conversion.

    Attributes:
        text: YAML, or flags; it ends with a line break.
        diagnostics: what has no counterpart, was assumed, or means something else; no errors.
    """

    text: str
    diagnostics: tuple[Diagnostic, ...]


def convert(
    source: str,
    target: str,
    text: str,
    *,
    file: str = "<text>",
    overrides: Sequence[str] = (),
    fragment: bool = False,
    beside: Path | None = None,
) -> Converted:
    """One configuration in the words of another system.

    Args:
        source, target: of `FROM` and `TO`.
        text: YAML; flags for megatron-lm; an expression for allocation_mode.
        file: its name, for findings.
        overrides: `key=value` in the words of `source`, of YAML only.
        fragment: write only the keys that follow from the input, not all that a file needs.
        beside: folder of the file, in which NeMo-RL's `defaults` are looked for.

    Raises:
        ConfigError: the input cannot be read, contradicts itself, or makes no configuration that loads; with all
            findings.
    """
    found: tuple[Diagnostic, ...] = ()
    if source == "ours":
        yaml = text
        config = _loaded(text, file, overrides, {})
    else:
        yaml, draft = _to_ours(source, text, file, overrides, fragment, beside)
        found = draft.diagnostics
        if target == "ours" and fragment:
            return Converted(yaml, found)
        config = _loaded(yaml, f"<{source} as YAML>", (), draft.origin)
    if target == "ours":
        return Converted(yaml, found)
    writers: dict[str, Callable[[Source], Draft]] = {
        "verl": verl_write.write,
        "megatron-lm": megatron_lm_write.write,
        "nemo-rl": nemo_rl.write,
    }
    written = writers[target](as_source(config))
    found += written.diagnostics
    _refuse(found)
    return Converted(megatron_lm_write.to_flags(written) if target == "megatron-lm" else nested(written.values), found)


def read_input(path: str) -> str:
    """The text of a file; ConfigError AL801 when there is none."""
    try:
        return read_file(path, Path())
    except (OSError, ValueError) as error:
        findings = Findings()
        reason = (error.strerror if isinstance(error, OSError) else None) or "it is not UTF-8 text, or too large"
        findings.error("AL801", f"the file cannot be read: {reason}", Place(path, 1, 1, "", 1))
        raise ConfigError(findings.all) from None


def _to_ours(
    source: str, text: str, file: str, overrides: Sequence[str], fragment: bool, beside: Path | None
) -> tuple[str, Draft]:
    """YAML of this system, and where its keys come from."""
    unresolved: tuple[Given, ...] = ()
    if source == "allocation_mode":
        draft = allocation_mode.read(allocation_mode.source_of(text))
    elif source == "megatron-lm":
        draft = megatron_lm.read(megatron_lm.split_flags(text))
    else:
        reader: Callable[[Source], Draft] = verl.read if source == "verl" else nemo_rl.read
        defaults: dict[str, Any] = verl.DEFAULTS if source == "verl" else nemo_rl.DEFAULTS
        parents = None if source == "verl" or beside is None else lambda name: read_file(name, beside)
        keys, unresolved = read_yaml(source, text, file, overrides, defaults, parents=parents)
        draft = reader(keys)
    for given in unresolved:
        draft.left_out(given, "its reference cannot be followed here")
    _refuse(draft.diagnostics)
    yaml = to_yaml(draft, fragment=fragment)
    _refuse(draft.diagnostics)
    return yaml, draft


def _loaded(yaml: str, name: str, overrides: Sequence[str], origin: Mapping[str, Given]) -> RLConfig:
    """The configuration that the YAML makes; ConfigError, with the keys that the faults are of, if it does not load."""
    config, found, complete = examine(name, overrides, text=yaml)
    errors = [d for d in found if d.severity == "error" and d.code not in AT_START]
    if config is None or not complete or errors:
        raise ConfigError(_traced(d, origin.get(d.key or "")) for d in errors)
    return config


def _traced(found: Diagnostic, given: Given | None) -> Diagnostic:
    """A fault of the result, with the key of the input that it comes from."""
    if given is None or given.default:
        return found
    return replace(found, message=f"{found.message} (from {given.key} in {given.place.location})")


def _refuse(found: tuple[Diagnostic, ...]) -> None:
    errors = [diagnostic for diagnostic in found if diagnostic.severity == "error"]
    if errors:
        raise ConfigError(errors)
