"""`RolloutBank`: finished groups, durable before anybody trains on them."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import Self

from areal_like.rollout.bank.disk import make_folder, remove_folder
from areal_like.rollout.bank.generation import INDEX, Contents, Generation, Key, Payloads, read_contents
from areal_like.rollout.bank.lines import Damage
from areal_like.rollout.bank.lock import LOCK, WriterLock
from areal_like.rollout.bank.manifest import MANIFEST, BankError, Manifest, is_generation, new_name
from areal_like.rollout.bank.record import WIDTHS, Encoded, Entry, LogProbWidth, encode, group_name
from areal_like.rollout.bank.recovery import Dropped, Recovered, Restoring
from areal_like.rollout.bank.writer import GroupCommit, Pending
from areal_like.rollout.trajectories import RolloutGroup

__all__ = ["RolloutBank"]

_warn = logging.getLogger(__name__).warning

SHOWN = 20
"""Damages that are reported one by one."""


class RolloutBank:
    """The one writer of a bank; made by `open`. May be used from several threads.

    A group is in it from `append` until the checkpoint of the step that trained it: `append`, `mark_consumed` when a
    step takes it, `checkpoint` when the weights of that step are safe. After a restart `recover` gives back what the
    checkpoint does not know.
    """

    def __init__(
        self,
        folder: Path,
        lock: WriterLock,
        manifest: Manifest,
        *,
        log_probs: LogProbWidth,
        max_bytes: int,
        note: Callable[[str], None],
    ) -> None:
        self.folder = folder
        self._writer_lock = lock
        self._manifest = manifest
        self._width = log_probs
        self._max_bytes = max_bytes
        self._note = note
        self._warned = False
        self._closed = False
        self._broken: OSError | None = None
        self._files = Generation(folder / manifest.generation)
        self._ready = not self._files.size  # else `recover` has to say first what counts
        self._contents = Contents()
        self._lost: set[Key] = set()  # damaged on the disk; their owner may still have and train them
        self._state = threading.RLock()  # of the files and of what is known of them
        self._commits = GroupCommit(self._commit)

    @classmethod
    def open(
        cls,
        folder: Path,
        *,
        log_probs: LogProbWidth = "float32",
        max_bytes: int = 0,
        note: Callable[[str], None] = _warn,
    ) -> RolloutBank:
        """Open a bank for writing, or make one.

        Args:
            folder: made when it is not there; must be empty or a bank.
            log_probs: width of log-probabilities of groups that come; those that are there keep theirs.
            max_bytes: size beyond which `note` is called, once, and the next checkpoint compacts. 0: none.
            note: told of what an owner should know. Any thread may call it.

        Raises:
            BankError: somebody writes it, or it cannot be used; the message says what to do.
            ValueError: an argument is out of range.
            OSError: the disk.
        """
        if log_probs not in WIDTHS:
            raise ValueError(f"log_probs is {log_probs!r}; it can be {' or '.join(WIDTHS)}")
        if max_bytes < 0:
            raise ValueError(f"max_bytes is {max_bytes}; give a number of bytes, or 0 for no limit")
        folder = Path(folder)
        if folder.exists() and not folder.is_dir():
            raise BankError(f"{folder} is no folder: name another one for the bank")
        make_folder(folder)
        _refuse_foreign(folder)
        lock = WriterLock(folder)
        try:
            manifest = _first_manifest(folder) if not (folder / MANIFEST).exists() else Manifest.read(folder)
            _remove_leftovers(folder, manifest)
            return cls(folder, lock, manifest, log_probs=log_probs, max_bytes=max_bytes, note=note)
        except FileNotFoundError as error:
            lock.close()
            raise BankError(
                f"{error.filename} is missing, though {MANIFEST} names its folder: put it back from a copy, or move"
                f" {folder} away to begin without its groups"
            ) from None
        except BaseException:
            lock.close()
            raise

    @property
    def bytes(self) -> int:
        """Of all groups and markers on the disk."""
        return self._files.size

    @property
    def timeline(self) -> str:
        """New after each recovery."""
        return self._manifest.timeline

    def append(self, group: RolloutGroup) -> Future[str]:
        """Make a group durable. Returns at once; in a coroutine `await asyncio.wrap_future(bank.append(group))`.

        The group must not be changed until then.

        Returns:
            Done when the group is on the disk; its name, for `areal-like bank show`. Its errors: ValueError for a group
            that cannot be kept or is in the bank already; OSError when the disk is full, naming the file and the bytes:
            the group is then not in the bank, and may be appended again.

        Raises:
            BankError: the bank is closed, or holds groups of an earlier run and `recover` was not called.
        """
        self._usable()
        promise = self._commits.put(group)
        if promise is None:
            raise BankError(f"the bank {self.folder} is closed")
        return promise

    def mark_consumed(self, keys: Iterable[Key], step: int) -> None:
        """Write down that optimizer step `step` trains these groups; durable when this returns.

        Raises:
            KeyError: one of them is not in the bank.
            ValueError: another step trains one of them, or `step` is one that a checkpoint has.
            OSError: the disk; nothing is marked.
        """
        with self._state:
            self._usable()
            wanted = list(dict.fromkeys((environment, int(index)) for environment, index in keys))
            if step <= self._manifest.checkpoint:
                raise ValueError(f"step {step} is in the checkpoint of step {self._manifest.checkpoint} already")
            for key in wanted:
                if key not in self._contents.entries and key not in self._lost:
                    raise KeyError(f"group {group_name(key)} is not in the bank")
                if (other := self._contents.consumed.get(key, step)) != step:
                    raise ValueError(f"step {other} trains group {group_name(key)} already; step {step} must not")
            if wanted:
                self._files.mark(wanted, step)
                self._contents.consumed.update(dict.fromkeys(wanted, step))

    def checkpoint(self, step: int) -> None:
        """A recovery checkpoint of `step` is complete: groups that it trained are no longer needed.

        From now on they are gone for `recover`. They are removed from the files when that frees at least as many bytes
        as it has to copy, or when the bank is larger than `max_bytes`. Who keeps several checkpoints and may go back to
        an older one gives the oldest of them. When the disk has no room for the copy, `note` is told, nothing is lost,
        and the next checkpoint tries again.
        """
        with self._state:
            self._usable()
            self._manifest = _at_least(self._manifest, step)
            trained = {key for key, at in self._contents.consumed.items() if at <= self._manifest.checkpoint}
            kept = [entry for key, entry in self._contents.entries.items() if key not in trained]
            live = sum(entry.size for entry in kept)
            dead = self._files.payload_size - live
            too_large = 0 < self._max_bytes < self.bytes
            try:
                if dead and (dead >= live or too_large):
                    self._compact(kept)
                else:
                    self._publish(self._manifest)
            except OSError as error:
                if self._broken:
                    raise
                self._note(f"the bank could not be compacted; it goes on as it is until the next checkpoint: {error}")

    def recover(self, step: int, *, version: int | None = None, max_age: int | None = None) -> Recovered:
        """Go on from the checkpoint of `step`: 0 without one. To be called once, before anything is appended.

        Args:
            step: optimizer steps that the weights have seen.
            version: of their policy.
            max_age: drop groups with a token that is more versions older than `version`.

        Returns:
            Groups that no step up to `step` trained; the bank holds these and nothing else afterwards, without markers,
            so that steps of the run that was lost mean nothing to this one.

        Raises:
            ValueError: `max_age` without `version`, or a number below 0.
            OSError: the disk has no room for a copy of the groups; nothing is changed.
        """
        if max_age is not None and version is None:
            raise ValueError("max_age needs the version of the policy: recover(step, version=..., max_age=...)")
        if step < 0 or (max_age is not None and max_age < 0):
            raise ValueError(f"step {step} and max_age {max_age} must not be below 0")
        with self._state:
            self._intact()
            gone = max(step, self._manifest.checkpoint)
            contents = read_contents(self._files.folder)
            with contextlib.closing(Payloads(self._files.folder)) as payloads:
                restoring = Restoring(contents, payloads, gone, version, max_age)
                files, entries = self._copy(restoring.survivors())
            self._publish(Manifest(files.folder.name, uuid.uuid4().hex, step), files)
            self._contents = Contents({entry.key: entry for entry in entries})
            self._ready = True
            self._report(restoring.recovered)
            if gone > step:
                self._note(
                    f"the bank was told of a checkpoint of step {gone} and goes on from step {step}: groups that steps"
                    f" {step + 1} to {gone} trained are gone"
                )
            return restoring.recovered

    def close(self) -> None:
        """Bring what is pending to the disk, and let another writer in."""
        self._commits.close()
        with self._state:
            if not self._closed:
                self._closed = True
                self._files.close()
                self._writer_lock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # What the writer's thread does.

    def _commit(self, pending: list[Pending]) -> None:
        accepted: list[Pending] = []
        with self._state:
            try:
                self._intact()
                entries = self._files.append(self._encoded(pending, accepted))
            except BaseException as error:  # whatever it is, who waits has to know
                for one in pending:
                    if not one.promise.done():
                        one.promise.set_exception(error)
                return
            self._contents.entries.update((entry.key, entry) for entry in entries)
            beyond = 0 < self._max_bytes < self.bytes
        for one, entry in zip(accepted, entries, strict=True):
            one.promise.set_result(entry.name)
        if beyond and not self._warned:
            self._warned = True
            self._note(
                f"the bank {self.folder} has {self.bytes} bytes, more than its limit of {self._max_bytes}: the next"
                " checkpoint compacts it; write checkpoints more often, or raise the limit"
            )

    def _encoded(self, pending: list[Pending], accepted: list[Pending]) -> Iterator[Encoded]:
        """Encodes one group after the other; those that the bank cannot keep are told so."""
        keys: set[Key] = set()
        for one in pending:
            try:
                if one.group.key in self._contents.entries or one.group.key in keys:
                    raise ValueError(f"group {group_name(one.group.key)} is in the bank already")
                encoded = encode(one.group, self._width)
            except Exception as error:
                one.promise.set_exception(error)
                continue
            keys.add(one.group.key)
            accepted.append(one)
            yield encoded

    # Another generation.

    def _compact(self, kept: list[Entry]) -> None:
        """A generation of these groups and of the markers that still mean something."""
        recovered = Recovered()
        with contextlib.closing(Payloads(self._files.folder)) as payloads:

            def whole() -> Iterator[Encoded]:
                for entry in kept:
                    payload = payloads.read(entry)
                    if isinstance(payload, Damage):
                        recovered.dropped.append(Dropped("damaged", str(payload), payload.key))
                    else:
                        yield entry, payload

            files, entries = self._copy(whole())
        held = {entry.key: entry for entry in entries}
        consumed = {key: step for key, step in self._contents.consumed.items() if key in held}
        try:
            for step in sorted(set(consumed.values())):
                files.mark([key for key, at in consumed.items() if at == step], step)
        except OSError:
            self._discard(files)
            raise
        self._publish(Manifest(files.folder.name, self._manifest.timeline, self._manifest.checkpoint), files)
        self._contents = Contents(held, consumed)
        self._lost |= {entry.key for entry in kept} - held.keys()
        self._report(recovered)

    def _copy(self, groups: Iterator[Encoded]) -> tuple[Generation, list[Entry]]:
        files = Generation(self.folder / new_name(), create=True)
        try:
            return files, files.append(groups)
        except BaseException:
            self._discard(files)
            raise

    def _publish(self, manifest: Manifest, files: Generation | None = None) -> None:
        """Let another manifest count, and with it other files, which are complete and on the disk."""
        try:
            manifest.write(self.folder)
        except OSError as error:
            if files is not None and Manifest.read(self.folder) == manifest:
                self._broken = error  # replaced, but perhaps not for good: nobody knows which files count
            elif files is not None:
                self._discard(files)
            raise
        self._manifest = manifest
        if files is not None:
            old, self._files = self._files, files
            self._discard(old)

    def _discard(self, files: Generation) -> None:
        files.close()
        with contextlib.suppress(OSError):  # what is left is removed when the bank is opened
            remove_folder(files.folder)

    # Refusals and reports.

    def _intact(self) -> None:
        if self._closed:
            raise BankError(f"the bank {self.folder} is closed")
        if self._broken is not None:
            raise BankError(f"the disk of the bank {self.folder} failed; start the run again") from self._broken

    def _usable(self) -> None:
        self._intact()
        if not self._ready:
            raise BankError(
                f"the bank {self.folder} holds groups of an earlier run: call recover(step) first, with step 0 for a"
                " run that begins anew"
            )

    def _report(self, recovered: Recovered) -> None:
        for dropped in [d for d in recovered.dropped if d.reason != "age"][:SHOWN]:
            self._note(f"the bank dropped ({dropped.reason}) {dropped.problem}")
        if counts := recovered.counts():
            said = ", ".join(f"{count} {reason}" for reason, count in sorted(counts.items()))
            self._note(f"the bank {self.folder} dropped in all: {said}")


def _at_least(manifest: Manifest, step: int) -> Manifest:
    return Manifest(manifest.generation, manifest.timeline, max(step, manifest.checkpoint))


def _refuse_foreign(folder: Path) -> None:
    """Nothing is put into a folder that is somebody else's."""
    if (folder / MANIFEST).exists():
        Manifest.read(folder)
        return
    for name in sorted(os.listdir(folder)):
        index = folder / name / INDEX
        unfinished = is_generation(name) and not (index.exists() and index.stat().st_size)
        if not unfinished and name not in (LOCK, f"{MANIFEST}.new"):
            what = f"groups in {name}" if is_generation(name) else f"{name} in it"
            raise BankError(
                f"{folder} has {what} and no {MANIFEST}: put the manifest back from a copy, or move the folder away to"
                " begin without its groups"
            )


def _first_manifest(folder: Path) -> Manifest:
    """Make the first generation of a bank."""
    manifest = Manifest(new_name(), uuid.uuid4().hex, 0)
    Generation(folder / manifest.generation, create=True).close()
    manifest.write(folder)
    return manifest


def _remove_leftovers(folder: Path, manifest: Manifest) -> None:
    """Generations that do not count: of a compaction that a kill ended, before or after the manifest was replaced."""
    for name in os.listdir(folder):
        if is_generation(name) and name != manifest.generation:
            with contextlib.suppress(OSError):
                remove_folder(folder / name)
