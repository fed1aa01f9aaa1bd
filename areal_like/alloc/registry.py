"""Finds backends: every entry point of the group `areal_like.backends`, from this package or any other installed one.

The environment is scanned at the first parse, not at import. A descriptor's module is imported when its backend is
first named, so a broken plug-in is an error to whoever names it and to nobody else.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, NamedTuple

from areal_like.alloc.backends import BackendDescriptor
from areal_like.alloc.diagnostics import AllocationError, Diagnostic, clip, closest

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

__all__ = ["GROUP", "Problem", "backends", "get_backend", "look_up"]

GROUP = "areal_like.backends"


class Problem(NamedTuple):
    """Why a backend cannot be had; `near` is the known name most like the one asked for."""

    code: str
    message: str
    help: str
    near: str | None = None


def get_backend(name: str) -> BackendDescriptor:
    """The descriptor of this name; AllocationError AL201 (unknown) or AL204 (its plug-in is broken) otherwise."""
    found = look_up(name)
    if isinstance(found, Problem):
        alternatives = (found.near,) if found.near else ()
        raise AllocationError(
            [Diagnostic(found.code, "error", found.message, help=found.help, alternatives=alternatives)]
        )
    return found


def backends() -> dict[str, BackendDescriptor]:
    """All usable backends by name; those whose plug-in is broken are left out (`get_backend` says why)."""
    found = {name: _load(name) for name in sorted(_entry_points())}
    return {name: value for name, value in found.items() if isinstance(value, BackendDescriptor)}


def look_up(name: str) -> BackendDescriptor | Problem:
    """The descriptor, or why there is none."""
    known = _entry_points()
    if name not in known:
        return _unknown(name, sorted(known))
    loaded = _load(name)
    if isinstance(loaded, str):
        hint = "repair or uninstall that distribution, or choose another backend"
        return Problem("AL204", f"backend {name} cannot be used: {loaded}", hint)
    return loaded


def _unknown(name: str, known: list[str]) -> Problem:
    message = f"unknown backend {clip(name)}"
    if not known:
        hint = "install this project as a package (`pip install -e .`): backends are found by its entry points"
        return Problem("AL201", f"{message}: no backend is declared in this environment", hint)
    hint = "known backends: " + ", ".join(known)
    near = closest(name, known)
    return Problem("AL201", message, f"did you mean {near}? {hint}" if near else hint, near)


@cache
def _entry_points() -> dict[str, list[EntryPoint]]:
    """Entry points by backend name; one scan of the environment a process."""
    from importlib.metadata import entry_points

    found: dict[str, list[EntryPoint]] = {}
    for point in entry_points(group=GROUP):
        found.setdefault(point.name, []).append(point)
    return found


@cache
def _load(name: str) -> BackendDescriptor | str:
    """The descriptor, or what is wrong with its plug-in."""
    points = _entry_points()[name]
    targets = sorted({point.value for point in points})
    if len(targets) > 1:
        return f"it is declared more than once, as {' and as '.join(targets)}"
    where = f"{points[0].value} of {points[0].dist.name if points[0].dist else 'an unknown distribution'}"
    try:
        descriptor = points[0].load()
    except Exception as error:  # whatever the module of a third party raises
        return f"importing {where} failed: {error!r}"
    if not isinstance(descriptor, BackendDescriptor):
        return f"{where} is a {type(descriptor).__name__}, not a BackendDescriptor"
    if descriptor.name != name:
        return f"{where} calls itself {descriptor.name!r}"
    return descriptor
