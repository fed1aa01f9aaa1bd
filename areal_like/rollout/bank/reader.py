"""Looking at a bank without touching it, also while a run writes it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from areal_like.rollout.bank.generation import Contents, Key, Payloads, read_contents
from areal_like.rollout.bank.lines import Damage
from areal_like.rollout.bank.manifest import MANIFEST, BankError, Manifest
from areal_like.rollout.trajectories import RolloutGroup

__all__ = ["BankReader", "Verification"]


@dataclass
class Verification:
    """What reading every byte that counts has shown.

    Attributes:
        groups: that are whole.
        damages: what is not, groups and lines.
        torn: unfinished ends of files: of a write that goes on now, or that a kill ended.
        unused: bytes of payloads that no group has.
    """

    groups: int = 0
    damages: list[Damage] = field(default_factory=list)
    torn: list[Damage] = field(default_factory=list)
    unused: int = 0


class BankReader:
    """A bank as it is now.

    Raises:
        BankError: this is no bank, or one that cannot be used.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        while True:
            self.manifest = Manifest.read(folder)
            generation = folder / self.manifest.generation
            try:
                self._payloads = Payloads(generation)
            except FileNotFoundError as error:
                self._moved_on(error)
                continue
            try:
                self.contents: Contents = read_contents(generation)
                return
            except FileNotFoundError as error:
                self._payloads.close()
                self._moved_on(error)

    def _moved_on(self, error: FileNotFoundError) -> None:
        """A writer may have replaced the generation since the manifest was read; then there is another one."""
        if Manifest.read(self.folder) == self.manifest:
            raise BankError(
                f"{error.filename} is missing, though {MANIFEST} names its folder: put it back from a copy"
            ) from None

    def group(self, key: Key) -> RolloutGroup:
        """One group. KeyError when there is none; BankError when it is damaged."""
        found = self._payloads.group(self.contents.entries[key])
        if isinstance(found, Damage):
            raise BankError(f"{found}: this group is lost")
        return found

    def verify(self) -> Verification:
        """Read everything."""
        result = Verification()
        for damage in self.contents.damages:
            (result.torn if damage.torn else result.damages).append(damage)
        entries = self.contents.entries.values()
        for entry in entries:
            found = self._payloads.group(entry)
            if isinstance(found, Damage):
                result.damages.append(found)
            else:
                result.groups += 1
        result.unused = max(0, self._payloads.size - sum(entry.size for entry in entries))
        return result

    def close(self) -> None:
        self._payloads.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
