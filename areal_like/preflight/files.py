"""One file through the whole check: what loading finds, what the rules find, less what the file itself silences."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from areal_like.alloc import Diagnostic
from areal_like.config.findings import COMMAND_LINE
from areal_like.config.loader import examine, read_text
from areal_like.preflight.check import check_job
from areal_like.preflight.cluster import parse_cluster
from areal_like.preflight.job import make_job
from areal_like.spec import ModelSpec

__all__ = ["UNREADABLE", "check_file", "check_text", "selected"]

UNREADABLE = frozenset({"AL801", "AL802", "AL803"})
"""Findings after which there is nothing to check."""

_SEVERITY = {"error": 0, "warning": 1, "info": 2}
_IGNORE = re.compile(r"#\s*areal-like:\s*ignore\s+(AL[0-9]{0,3}(?:\s*,\s*AL[0-9]{0,3})*)")
_LAYOUT_FAMILIES = ("AL2", "AL3")
"""What can be said of a file with faulty keys: the other families would read defaults that the user did not mean."""


def check_file(
    path: str, overrides: Sequence[str] = (), *, spec: ModelSpec | None = None, cluster: str | None = None
) -> tuple[Diagnostic, ...]:
    """Every finding about a file, errors first; see `check_text`."""
    text = read_text(path)
    return text if isinstance(text, tuple) else check_text(text, path, overrides, spec=spec, cluster=cluster)


def check_text(
    text: str, file: str, overrides: Sequence[str] = (), *, spec: ModelSpec | None = None, cluster: str | None = None
) -> tuple[Diagnostic, ...]:
    """Every finding about a text that is called `file`, errors first, else in the order of the file.

    Args:
        spec: the numbers of every model.
        cluster: as after `--cluster`; then the job runs on GPUs unless its device is cpu.

    Raises:
        ValueError: `cluster` does not name a cluster.
    """
    config, found, complete = examine(file, overrides, text=text)
    if config is not None:
        on_gpus = True if cluster is not None and config.device != "cpu" else None
        job = make_job(config, spec=spec, cluster=parse_cluster(cluster or "", config), on_gpus=on_gpus)
        found = (*found, *check_job(job, families=("AL",) if complete else _LAYOUT_FAMILIES))
    elif cluster is not None:
        parse_cluster(cluster)
    silenced = _silenced(text)
    kept = [d for d in _once(found) if not _is_silenced(d, file, silenced)]
    return tuple(sorted(kept, key=_order))


def _order(d: Diagnostic) -> tuple[int, bool, int, int]:
    return _SEVERITY[d.severity], d.file == COMMAND_LINE, d.line or 0, d.column or 0


def selected(found: Iterable[Diagnostic], select: tuple[str, ...], ignore: tuple[str, ...]) -> list[Diagnostic]:
    """Findings whose code begins with one of `select` (all when empty) and with none of `ignore`.

    That a file cannot be read is always among them: nothing else of it has been looked at.
    """
    return [
        d
        for d in found
        if d.code in UNREADABLE or (d.code.startswith(select or ("AL",)) and not (ignore and d.code.startswith(ignore)))
    ]


def _once(found: Iterable[Diagnostic]) -> list[Diagnostic]:
    """Loading and the rules may find the same thing about the same key; what was found first stays."""
    kept: dict[tuple[str | None, ...], Diagnostic] = {}
    for d in found:
        kept.setdefault((d.code, d.key) if d.code == "AL205" else (d.code, d.key, d.message), d)
    return list(kept.values())


def _silenced(text: str) -> dict[int, tuple[str, ...]]:
    """Codes, or beginnings of codes, that a comment silences, by line."""
    if "areal-like:" not in text:
        return {}
    lines = enumerate(text.splitlines(), start=1)
    return {n: tuple(re.findall(r"AL[0-9]*", m[1])) for n, line in lines if (m := _IGNORE.search(line))}


def _is_silenced(d: Diagnostic, file: str, silenced: dict[int, tuple[str, ...]]) -> bool:
    if d.file != file or d.line is None or d.code in UNREADABLE:
        return False
    return d.code.startswith(silenced.get(d.line, ("?",)))
