"""The files that hold the groups of a bank, all in one folder; a compaction makes the next one.

generation-6d1c.../
  data.bin        payloads, end to end
  index.log       a line a group: its `Entry`
  consumed.log    a line a step: which groups it trains; each line twice, so that no single byte loses a marker
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from areal_like.rollout.bank.disk import AppendFile, remove_folder
from areal_like.rollout.bank.lines import Damage, check, frame, scan
from areal_like.rollout.bank.record import Encoded, Entry, decode
from areal_like.rollout.trajectories import RolloutGroup
from areal_like.spec.checkpoint import sync_folder

__all__ = ["Contents", "Generation", "Key", "Payloads", "read_contents"]

type Key = tuple[str, int]

DATA, INDEX, CONSUMED = "data.bin", "index.log", "consumed.log"
FILES = (DATA, INDEX, CONSUMED)


class Generation:
    """The files of a generation, open for writing.

    Args:
        folder: of the generation.
        create: make folder and files, on the disk when this returns.
    """

    def __init__(self, folder: Path, *, create: bool = False) -> None:
        self.folder = folder
        if create:
            os.mkdir(folder)
        with contextlib.ExitStack() as undo:
            if create:
                undo.callback(remove_folder, folder)
            opened = []
            for name in FILES:
                opened.append(AppendFile(folder / name, create=create))
                undo.callback(opened[-1].close)
            self._data, self._index, self._consumed = opened
            if create:
                sync_folder(folder)
                sync_folder(folder.parent)
            undo.pop_all()

    @property
    def size(self) -> int:
        """Of all files, in bytes."""
        return self._data.size + self._index.size + self._consumed.size

    @property
    def payload_size(self) -> int:
        return self._data.size

    def append(self, groups: Iterable[Encoded]) -> list[Entry]:
        """Write groups, all or none of them; on the disk when this returns.

        The data is synced before the index is written: a line of the index that is on the disk has its payload.

        Returns:
            Entries with the offsets that they got.

        Raises:
            OSError: the disk is full or broken. What was written is taken back.
        """
        entries = []
        try:
            for entry, payload in groups:
                entries.append(entry.at(self._data.end))
                self._data.write(payload)
            if entries:
                self._data.sync()
                self._index.write(b"".join(frame(entry.to_record()) for entry in entries))
                self._index.sync()
        except BaseException:
            for file in (self._index, self._data):
                with contextlib.suppress(OSError):  # then before the next write
                    file.take_back()
            raise
        self._data.keep()
        self._index.keep()
        return entries

    def mark(self, keys: Iterable[Key], step: int) -> None:
        """Write that a step trains these groups; on the disk when this returns.

        Raises:
            OSError: the disk is full or broken. Nothing is marked.
        """
        line = frame({"step": step, "keys": [list(key) for key in keys]})
        try:
            self._consumed.write(line + line)
            self._consumed.sync()
        except BaseException:
            with contextlib.suppress(OSError):
                self._consumed.take_back()
            raise
        self._consumed.keep()

    def close(self) -> None:
        for file in (self._data, self._index, self._consumed):
            file.close()


@dataclass
class Contents:
    """What the index and the markers of a generation say.

    Attributes:
        entries: of each group, in the order in which they were appended.
        consumed: the step that trains a group.
        damages: lines that do not count.
        replaced: entries that a later one of the same key stands for: of a write that failed and was made again.
    """

    entries: dict[Key, Entry] = field(default_factory=dict)
    consumed: dict[Key, int] = field(default_factory=dict)
    damages: list[Damage] = field(default_factory=list)
    replaced: list[Entry] = field(default_factory=list)


def read_contents(folder: Path) -> Contents:
    """What there is in a generation. Nothing is changed; payloads are not looked at."""
    contents = Contents()
    for found in scan(folder / INDEX):
        if isinstance(found, Damage):
            contents.damages.append(found)
            continue
        offset, record = found
        try:
            entry = Entry.from_record(record)
        except (TypeError, LookupError) as error:
            contents.damages.append(Damage(folder / INDEX, offset, f"this is no entry of format 1: {error}"))
            continue
        if entry.key in contents.entries:
            contents.replaced.append(contents.entries.pop(entry.key))
        contents.entries[entry.key] = entry
    for found in scan(folder / CONSUMED):
        if isinstance(found, Damage):
            contents.damages.append(found)
            continue
        for environment, index in found[1]["keys"]:
            contents.consumed[environment, index] = found[1]["step"]
    return contents


class Payloads:
    """Reads payloads. Goes on to work when the generation is deleted meanwhile."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / DATA
        self._descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)

    @property
    def size(self) -> int:
        return os.fstat(self._descriptor).st_size

    def read(self, entry: Entry) -> bytes | Damage:
        """The payload of a group, compared with its check."""
        try:
            payload = os.pread(self._descriptor, entry.size, entry.offset)
        except OSError as error:
            return self._damage(entry, f"cannot be read: {error.strerror}")
        if len(payload) < entry.size:
            return self._damage(entry, f"only {len(payload)} of {entry.size} bytes are there")
        if check(payload) != entry.check:
            return self._damage(entry, f"{entry.size} bytes do not agree with their check")
        return payload

    def group(self, entry: Entry) -> RolloutGroup | Damage:
        """A group, or why there is none."""
        payload = self.read(entry)
        return payload if isinstance(payload, Damage) else decode(entry, payload)

    def _damage(self, entry: Entry, problem: str) -> Damage:
        return Damage(self.path, entry.offset, f"group {entry.name}: {problem}", key=entry.key)

    def close(self) -> None:
        os.close(self._descriptor)
