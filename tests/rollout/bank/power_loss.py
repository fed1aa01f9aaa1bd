"""What a disk holds after a loss of power: of what was not synced anything, or nothing, or half of it.

SIGKILL leaves the page cache of the system as it is, so it cannot show that an fsync is missing. `Recording` writes
down every call that changes the disk; `crash` makes a folder that the disk may hold if the power goes after the first
so many of them. It is as unkind as POSIX allows: each file keeps any beginning of its unsynced writes, the last cut at
any byte or filled with zeros, and each folder keeps any of its unsynced entries, whatever happened to the others.
"""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

type Change = Callable[[], None]


@dataclass
class File:
    synced: bytes = b""
    pending: list[tuple[str, Any]] = field(default_factory=list)

    def content(self, draw: random.Random, fate: str) -> bytes:
        kept = {"lost": 0, "kept": len(self.pending)}.get(fate, draw.randint(0, len(self.pending)))
        data = self.synced
        for what, value in self.pending[:kept]:
            data = data + value if what == "write" else data[:value].ljust(value, b"\0")
        if fate == "torn" and kept < len(self.pending):
            what, value = self.pending[kept]
            if what == "write":
                cut = draw.randint(0, len(value))
                data += draw.choice([value[:cut], bytes(cut)])
        return data

    def sync(self) -> None:
        self.synced, self.pending = self.content(random.Random(), "kept"), []


@dataclass
class Folder:
    entries: dict[str, File | Folder] = field(default_factory=dict)
    synced: dict[str, File | Folder] = field(default_factory=dict)
    pending: list[dict[str, File | Folder | None]] = field(default_factory=list)

    def change(self, **entries: File | Folder | None) -> None:
        self.pending.append(entries)
        self._apply(self.entries, entries)

    def sync(self) -> None:
        self.synced, self.pending = dict(self.entries), []

    def after(self, draw: random.Random, fate: str) -> dict[str, File | Folder]:
        found = dict(self.synced)
        for change in self.pending:
            if {"lost": False, "kept": True}.get(fate, draw.random() < 0.5):
                self._apply(found, change)
        return found

    @staticmethod
    def _apply(entries: dict[str, File | Folder], change: dict[str, File | Folder | None]) -> None:
        for name, what in change.items():
            if what is None:
                entries.pop(name, None)
            else:
                entries[name] = what


class Recording:
    """Every change below a folder, as a list of steps that can be played again.

    Args:
        root: below it everything is recorded; exists.
        skipped: what is not recorded as synced, a part of the path: to see that a missing fsync is found.
    """

    def __init__(self, root: Path, skipped: str | None = None) -> None:
        self.root, self.skipped = root, skipped
        self.steps: list[tuple[Any, ...]] = []
        self._paths: dict[int, str] = {}

    @contextlib.contextmanager
    def running(self) -> Iterator[Recording]:
        own = {name: getattr(self, f"_{name}") for name in ("open", "write", "fsync", "ftruncate", "replace")}
        own |= {name: getattr(self, f"_{name}") for name in ("mkdir", "unlink", "rmdir")}
        self._real = {name: getattr(os, name) for name in own}
        with contextlib.ExitStack() as stack:
            for name, function in own.items():
                stack.enter_context(mock.patch.object(os, name, function))
            yield self

    def tell(self, *told: Any) -> None:
        """Write down what happened to the run at this moment."""
        self.steps.append(("told", *told))

    def _open(self, path: Any, flags: int, *mode: Any, **named: Any) -> int:
        existed = os.path.exists(path)
        descriptor: int = self._real["open"](path, flags, *mode, **named)
        self._paths[descriptor] = str(path)
        if not existed:
            self.steps.append(("create", str(path)))
        return descriptor

    def _write(self, descriptor: int, data: Any) -> int:
        written: int = self._real["write"](descriptor, data)
        self.steps.append(("write", self._paths[descriptor], bytes(data)[:written]))
        return written

    def _fsync(self, descriptor: int) -> None:  # the file system below need not do it: it will not lose power
        path = self._paths[descriptor]
        if self.skipped is None or not path.endswith(self.skipped):
            self.steps.append(("fsync", path))

    def _ftruncate(self, descriptor: int, size: int) -> None:
        self._real["ftruncate"](descriptor, size)
        self.steps.append(("truncate", self._paths[descriptor], size))

    def _replace(self, source: Any, target: Any) -> None:
        self._real["replace"](source, target)
        self.steps.append(("replace", str(source), str(target)))

    def _mkdir(self, path: Any, *mode: Any, **named: Any) -> None:
        self._real["mkdir"](path, *mode, **named)
        self.steps.append(("mkdir", str(path)))

    def _unlink(self, path: Any, **named: Any) -> None:
        self._real["unlink"](path, **named)
        self.steps.append(("unlink", str(path)))

    def _rmdir(self, path: Any, **named: Any) -> None:
        self._real["rmdir"](path, **named)
        self.steps.append(("unlink", str(path)))


class Disk:
    """Plays the steps of a recording, one after the other."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.top = Folder()

    def play(self, step: tuple[Any, ...]) -> None:
        what, path, *rest = step
        if what == "create":
            self._folder(path).change(**{Path(path).name: File()})
        elif what == "mkdir":
            self._folder(path).change(**{Path(path).name: Folder()})
        elif what == "unlink":
            self._folder(path).change(**{Path(path).name: None})
        elif what == "replace":
            moved = self._find(path)
            self._folder(path).change(**{Path(path).name: None, Path(rest[0]).name: moved})
        elif what == "fsync":
            self._find(path).sync()
        else:
            file = self._find(path)
            assert isinstance(file, File)
            file.pending.append((what, rest[0]))

    def crash(self, target: Path, draw: random.Random, fate: str) -> None:
        """Make the folder that is there after the power is back.

        Args:
            fate: of what was not synced: lost, kept, or torn (each thing for itself, by chance).
        """
        target.mkdir()
        self._write(self.top, target, draw, fate)

    def _write(self, folder: Folder, target: Path, draw: random.Random, fate: str) -> None:
        for name, what in folder.after(draw, fate).items():
            if isinstance(what, Folder):
                (target / name).mkdir()
                self._write(what, target / name, draw, fate)
            else:
                (target / name).write_bytes(what.content(draw, fate))

    def _find(self, path: str) -> File | Folder:
        found: File | Folder = self.top
        for part in Path(path).relative_to(self.root).parts:
            assert isinstance(found, Folder)
            found = found.entries[part]
        return found

    def _folder(self, path: str) -> Folder:
        found = self._find(str(Path(path).parent))
        assert isinstance(found, Folder)
        return found
