"""Finds agent types: every entry point of the group `areal_like.agents`, from this package or any other installed one.

A file names a type and can never point at code. A type's module is imported when the type is first named, so a broken
plug-in is an error to whoever names it and to nobody else.
"""

from __future__ import annotations

from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import NamedTuple

from areal_like.alloc.diagnostics import clip, closest
from areal_like.config.agent_types import ALIASES, GROUP
from areal_like.rollout.agents.base import EvaluationAgent

__all__ = ["ALIASES", "GROUP", "Problem", "agent_types", "look_up"]

HOW_TO_ADD = (
    f'a package adds one by the entry-point group {GROUP} (NAME = "module:Class" in its own metadata); '
    "docs/rollout.md shows it"
)


class Problem(NamedTuple):
    """Why an agent type cannot be had; `near` is the known name most like the one asked for."""

    code: str
    message: str
    help: str
    near: str | None = None


def agent_types() -> dict[str, type[EvaluationAgent]]:
    """All usable types by name; those whose plug-in is broken are left out (`look_up` says why)."""
    found = {name: look_up(name) for name in sorted(_entry_points())}
    return {name: value for name, value in found.items() if not isinstance(value, Problem)}


def look_up(name: str) -> type[EvaluationAgent] | Problem:
    """The class of an agent type, or why there is none."""
    known = _entry_points()
    name = ALIASES.get(name, name)
    if name in known:
        loaded = _load(name)
        if isinstance(loaded, str):
            hint = "repair or uninstall that distribution, or choose another type"
            return Problem("AL836", f"agent type {name} cannot be used: {loaded}", hint)
        return loaded
    if not known:
        hint = "install this project as a package (`pip install -e .`): agent types are found by its entry points"
        return Problem("AL831", f"unknown agent type {clip(name)}: none is declared in this environment", hint)
    near = closest(name, known)
    return Problem(
        "AL831", f"unknown agent type {clip(name)}", f"known are {', '.join(sorted(known))}; {HOW_TO_ADD}", near
    )


@cache
def _entry_points() -> dict[str, list[EntryPoint]]:
    """Entry points by name; one scan of the environment a process."""
    found: dict[str, list[EntryPoint]] = {}
    for point in entry_points(group=GROUP):
        found.setdefault(point.name, []).append(point)
    return found


@cache
def _load(name: str) -> type[EvaluationAgent] | str:
    """The class, or what is wrong with its plug-in."""
    points = _entry_points()[name]
    targets = sorted({point.value for point in points})
    if len(targets) > 1:
        return f"it is declared more than once, as {' and as '.join(targets)}"
    where = f"{points[0].value} of {points[0].dist.name if points[0].dist else 'an unknown distribution'}"
    try:
        found = points[0].load()
    except Exception as error:  # whatever the module of a third party raises
        return f"importing {where} failed: {error!r}"
    if not (isinstance(found, type) and issubclass(found, EvaluationAgent)):
        return f"{where} is no GroupedRolloutGenerator or EvaluationAgent"
    if missing := sorted(found.__abstractmethods__):
        return f"{where} does not define {' and '.join(missing)}"
    return found
