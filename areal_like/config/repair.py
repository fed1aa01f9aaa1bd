"""The best configuration that can be made of a file with faults, so that the check can go on and find the rest.

Only for looking: what is made here is never run, since the faults themselves are errors.
"""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from areal_like.config import paths
from areal_like.config.experiment import RLConfig
from areal_like.config.nodes import Entry, plain

__all__ = ["UNKNOWN", "repair"]

UNKNOWN = "?"
"""Stands where a required text is missing."""

ROUNDS = 8
"""A section that was missing shows what is missing in it only when it is there."""


def repair(root: Entry) -> RLConfig | None:
    """Leave faulty keys out and put something where one is missing; None when that does not help."""
    data: Any = plain(root)
    for _ in range(ROUNDS):
        try:
            return RLConfig.model_validate(data)
        except ValidationError as error:
            faults = error.errors(include_url=False)
        except (ValueError, OverflowError, RecursionError):
            return None
        for fault in faults:
            steps = tuple(fault["loc"])
            if extra := (fault.get("ctx") or {}).get("key"):
                steps = (*steps, str(extra))
            if not steps:
                return None
            if fault["type"] == "missing":
                _fill(data, steps)
            else:
                _remove(data, steps)
    return None


def _fill(data: Any, steps: tuple[paths.Step, ...]) -> None:
    field = paths.find(RLConfig, steps)
    parent = _at(data, steps[:-1])
    if field is None or not isinstance(parent, dict):
        return
    by_type: dict[Any, Any] = {str: UNKNOWN, int: 1, float: 1.0, bool: False}
    value = {} if paths.section_of(field) is not None else by_type.get(field.annotation)
    parent[steps[-1]] = "x" if value == UNKNOWN and len(steps) == 1 else value  # the names at the top have a pattern


def _remove(data: Any, steps: tuple[paths.Step, ...]) -> None:
    """Take out the key, or the innermost section around it that is there."""
    for end in range(len(steps), 0, -1):
        parent, last = _at(data, steps[: end - 1]), steps[end - 1]
        if isinstance(parent, dict) and last in parent:
            del parent[last]
            return
        if isinstance(parent, list) and isinstance(last, int) and last < len(parent):
            del parent[last]
            return


def _at(data: Any, steps: tuple[paths.Step, ...]) -> Any:
    try:
        for step in steps:
            data = data[step]
    except (KeyError, IndexError, TypeError):
        return None
    return data
