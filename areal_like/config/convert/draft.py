"""What a conversion reads and what it makes: keys of another system with their places, and keys of this one.

Every key that is read is taken or said: `Source.rest` lists what nobody asked for, so nothing is dropped in silence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from areal_like.alloc import AllocationError, Diagnostic, ModelAllocation
from areal_like.config.findings import Findings, Place, diagnostic
from areal_like.config.written import shown


@dataclass(frozen=True)
class Given:
    """A key of the input with its value. `default`: the system's own default, not written by the user."""

    key: str
    value: Any
    place: Place
    default: bool = False


class Source:
    """The keys of another system. Keys absent from the input have that system's default, where `defaults` knows it."""

    def __init__(self, system: str, given: Mapping[str, Given], defaults: Mapping[str, Any], place: Place) -> None:
        self.system, self.given, self.defaults, self.place = system, dict(given), defaults, place
        self.taken: set[str] = set()

    def take(self, key: str) -> Given | None:
        """The key, else its default; None when there is neither, or the value is null."""
        self.taken.add(key)
        found = self.given.get(key)
        if found is not None:
            return found if found.value is not None else None
        value = self.defaults.get(key)
        return None if value is None else Given(key, value, self.place, default=True)

    def value(self, key: str, otherwise: Any = None) -> Any:
        found = self.take(key)
        return otherwise if found is None else found.value

    def has(self, key: str) -> bool:
        """Whether the input itself gives the key a value."""
        return key in self.given and self.given[key].value is not None

    def rest(self) -> Iterator[Given]:
        """What nothing has asked for."""
        return (found for key, found in self.given.items() if key not in self.taken)


class Draft:
    """Keys of this system as far as they are known, where each came from, and what is to be said."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.values: dict[str, Any] = {}
        self.origin: dict[str, Given] = {}
        self.findings = Findings()

    def put(self, key: str, value: Any, given: Given) -> None:
        """Set a key; a second and different value is an error, unless one of them is only a default."""
        if key in self.values and self.values[key] != value:
            first = self.origin[key]
            if given.default:
                return
            if not first.default:
                message = (
                    f"{first.key} and {given.key} contradict each other: "
                    f"{key} would be {shown(self.values[key])} and {shown(value)}"
                )
                self.error(message, given, "make them equal, or remove one")
                return
        self.values[key], self.origin[key] = value, given

    def put_default(self, key: str, value: Any) -> None:
        """A value that follows from how the other system works, whatever its keys say."""
        if key not in self.values:
            self.values[key] = value
            self.origin[key] = Given(self.source.system, value, self.source.place, default=True)

    def left_out(self, given: Given, why: str) -> None:
        message = f"{given.key}: {shown(given.value)} is left out: {why}"
        self._say("AL820", message, given, severity="warning")

    def assumed(self, key: str, value: Any, why: str, given: Given | None = None) -> None:
        if key not in self.values:
            self.values[key], self.origin[key] = value, given or Given(key, value, self.source.place, default=True)
            self._say("AL821", f"{key}: {shown(value)} is assumed: {why}", given, severity="info", key=key)

    def changed(self, given: Given, why: str) -> None:
        self._say("AL822", f"{given.key}: {shown(given.value)} is carried over, but {why}", given, severity="warning")

    def error(self, message: str, given: Given | None, help: str | None = None) -> None:
        self._say("AL823", message, given, severity="error", help=help)

    def backend(self, key: str, name: str, sizes: Mapping[str, Any], given: Given) -> ModelAllocation | None:
        """Put a backend string made of sizes by field name; None, after a finding, when there is no such layout."""
        try:
            allocation = ModelAllocation(backend=name, **sizes)
        except AllocationError as error:
            for found in error.diagnostics:
                message = f"the sizes of {key} make no layout: {found.message} ({found.source})"
                self.error(message, given, found.help)
            return None
        self.put(key, str(allocation), given)
        return allocation

    def _say(
        self, code: str, message: str, given: Given | None, *, severity: Any, key: str = "", help: str | None = None
    ) -> None:
        place = given.place if given is not None else self.source.place
        path = key or (given.key if given is not None else "")
        self.findings.add(diagnostic(code, message, place, path=path, severity=severity, help=help))

    @property
    def diagnostics(self) -> tuple[Diagnostic, ...]:
        return self.findings.all


Way = Callable[[Any], Any]


class NoCounterpart(Exception):
    """A value for which a conversion has nothing; the text says why."""


@dataclass(frozen=True)
class Row:
    """One key of another system and its counterpart here.

    Attributes:
        theirs: dotted key, or the name of a flag without its dashes.
        ours: dotted key of this system's schema; "" when it has no counterpart, or a procedure deals with it.
        default: what the other system does when the key is absent; such a value of a key without counterpart needs no
            word.
        forth, back: the value here from theirs, and the other way round; they raise NoCounterpart.
        fill: written here even when only defaulted, because the default of this system differs.
        note: why there is no counterpart; or, beside `ours`, how the meaning differs.
    """

    theirs: str
    ours: str = ""
    default: Any = None
    forth: Way | None = None
    back: Way | None = None
    fill: bool = False
    note: str = ""


def one_of(choices: Mapping[Any, Any]) -> tuple[Way, Way]:
    """Values renamed: (forth, back)."""

    def forth(value: Any) -> Any:
        if isinstance(value, str | int | float) and value in choices:
            return choices[value]
        raise NoCounterpart(f"only {', '.join(map(shown, choices))} have a counterpart")

    def back(value: Any) -> Any:
        for theirs, ours in choices.items():
            if ours == value and isinstance(ours, bool) == isinstance(value, bool):
                return theirs
        raise NoCounterpart("it has no counterpart there")

    return forth, back


def read_rows(source: Source, rows: tuple[Row, ...], draft: Draft) -> None:
    """Every row with a counterpart; and those without one, where the value is not the default."""
    for row in rows:
        given = source.take(row.theirs)
        if given is None:
            continue
        if not row.ours:
            if not given.default and given.value != row.default:
                draft.left_out(given, row.note)
            continue
        if given.default and not row.fill:
            continue
        try:
            value = row.forth(given.value) if row.forth else given.value
        except NoCounterpart as error:
            draft.left_out(given, str(error))
            continue
        if row.note and value and not given.default:
            draft.changed(given, row.note)
        if value is not None:
            draft.put(row.ours, value, given)


def read_rest(source: Source, sections: Mapping[str, str], draft: Draft) -> None:
    """Say what nothing has asked for, with the reason of its section."""
    for given in source.rest():
        if given.key.rsplit(".", 1)[-1] in ("_target_", "defaults") or given.value in (None, {}, []):
            continue
        prefix = max((p for p in sections if not p or f"{given.key}.".startswith(f"{p}.")), key=len, default=None)
        draft.left_out(given, sections[prefix] if prefix is not None else "no counterpart of it is known here")
