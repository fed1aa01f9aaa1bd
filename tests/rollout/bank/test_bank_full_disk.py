"""A disk without room, a real one: who waits is told, what is there stays whole, and with room it goes on."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
from bank_tools import make_group

from areal_like.rollout.bank import BankReader, RolloutBank


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", str(folder)]
    if subprocess.run(command, capture_output=True).returncode:
        pytest.skip("a small file system cannot be mounted here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@contextlib.contextmanager
def without_room(disk: Path, left: int = 0) -> Iterator[None]:
    """Fill the disk up to `left` pages."""
    ballast = disk / "ballast"
    with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
    os.truncate(ballast, ballast.stat().st_size - left * 4096)
    yield
    ballast.unlink()


@pytest.mark.parametrize("left", [0, 1, 2])
def test_who_waits_is_told_and_with_room_it_goes_on(disk: Path, left: int) -> None:
    """With no page, the data does not fit; with one or two, some of it does, and some of the index."""
    large = [make_group(i, tokens=1500) for i in range(6)]
    with RolloutBank.open(disk / "bank") as bank:
        for group in large[:3]:
            bank.append(group).result(30)
        size = bank.bytes
        with without_room(disk, left):
            error = bank.append(large[3]).exception(30)
            assert isinstance(error, OSError) and error.errno == errno.ENOSPC
            assert "the bank needs" in str(error) and "bytes more" in str(error)
            assert str(error.filename).startswith(str(disk / "bank" / "generation-"))
            for _ in range(3):  # it does not get worse
                assert bank.append(large[4]).exception(30) is not None
            assert bank.bytes == size
            with BankReader(disk / "bank") as reader:
                assert reader.verify().groups == 3 and reader.verify().damages == []
            together = [bank.append(make_group(i, tokens=1500)) for i in range(10, 16)]  # all of them are told
            assert {type(promise.exception(30)) for promise in together} == {OSError}
        assert bank.append(large[3]).result(30) == "sums/3"
        assert bank.append(large[5]).result(30) == "sums/5"
    with BankReader(disk / "bank") as reader:
        found = reader.verify()
        assert (found.groups, found.damages, found.torn, found.unused) == (5, [], [], 0)
    with RolloutBank.open(disk / "bank") as bank:
        recovered = bank.recover(0)
        assert recovered.groups == [*large[:4], large[5]] and recovered.dropped == []


def test_a_marker_without_room_marks_nothing(disk: Path) -> None:
    with RolloutBank.open(disk / "bank") as bank:
        bank.append(make_group(0)).result(30)
        bank.append(make_group(1)).result(30)
        bank.mark_consumed([("sums", 0)], 1)
        with without_room(disk), pytest.raises(OSError, match=r"consumed\.log") as raised:
            for step in range(2, 100):  # the page that the file has already has room for some
                bank.mark_consumed([("sums", 1)], step=2)
                bank.mark_consumed([("sums", 0)] * step, step=1)
        assert raised.value.errno == errno.ENOSPC
        bank.mark_consumed([("sums", 1)], 2)
    with RolloutBank.open(disk / "bank") as bank:
        assert bank.recover(1).groups == [make_group(1)]


def test_a_compaction_without_room_waits_for_the_next_checkpoint(disk: Path) -> None:
    notes: list[str] = []
    groups = [make_group(i, tokens=1000) for i in range(5)]
    with RolloutBank.open(disk / "bank", note=notes.append) as bank:
        for group in groups:
            bank.append(group).result(30)
        bank.mark_consumed([g.key for g in groups[:3]], 1)
        size = bank.bytes
        with without_room(disk, left=2):
            bank.checkpoint(1)
            assert bank.bytes == size and "could not be compacted" in notes[0] and "No space left" in notes[0]
            assert len(list((disk / "bank").glob("generation-*"))) == 1
        bank.checkpoint(1)
        assert bank.bytes < size / 2 and len(notes) == 1
    with RolloutBank.open(disk / "bank") as bank:
        assert bank.recover(1).groups == groups[3:]


def test_a_recovery_without_room_changes_nothing(disk: Path) -> None:
    groups = [make_group(i, tokens=1000) for i in range(4)]
    with RolloutBank.open(disk / "bank") as bank:
        for group in groups:
            bank.append(group).result(30)
    with RolloutBank.open(disk / "bank") as bank:
        with without_room(disk, left=3), pytest.raises(OSError, match=r"the bank needs .* bytes more"):
            bank.recover(0)
        assert bank.recover(0).groups == groups


def test_a_disk_whose_sync_fails(tmp_path: Path) -> None:
    """A stand-in: os.fsync answers with an I/O error, once for each file."""
    sync, broken = os.fsync, {"data.bin", "index.log"}

    def failing(descriptor: int) -> None:
        name = Path(os.readlink(f"/proc/self/fd/{descriptor}")).name
        if name in broken:
            broken.discard(name)
            raise OSError(errno.EIO, "Input/output error")
        sync(descriptor)

    with RolloutBank.open(tmp_path) as bank:
        bank.append(make_group(0)).result(30)
        with mock.patch.object(os, "fsync", failing):
            for name in ("data.bin", "index.log"):
                with pytest.raises(OSError, match=f"cannot bring .* bytes to the disk.*{name}"):
                    bank.append(make_group(1)).result(30)
            bank.append(make_group(1)).result(30)
        assert bank.recover(0).groups == [make_group(0), make_group(1)]


def test_a_bank_that_is_deleted_under_its_writer(tmp_path: Path) -> None:
    """What is written into a deleted file is gone with the process: nothing is promised."""
    with RolloutBank.open(tmp_path / "bank") as bank:
        bank.append(make_group(0)).result(30)
        shutil.rmtree(tmp_path / "bank")
        with pytest.raises(OSError, match="was deleted under the bank"):
            bank.append(make_group(1)).result(30)
        with pytest.raises(OSError, match="was deleted under the bank"):
            bank.mark_consumed([("sums", 0)], 1)


def test_what_cannot_be_taken_back_at_once_is_taken_back_later(tmp_path: Path) -> None:
    """A stand-in: neither writing the index nor truncating works for a while."""
    with RolloutBank.open(tmp_path) as bank:
        bank.append(make_group(0)).result(30)
        write = os.write

        def half(descriptor: int, data: bytes) -> int:
            if os.readlink(f"/proc/self/fd/{descriptor}").endswith("index.log"):
                write(descriptor, bytes(data)[:100])
                raise OSError(errno.EIO, "Input/output error")
            return write(descriptor, data)

        def refuse(descriptor: int, size: int) -> None:
            raise OSError(errno.EIO, "Input/output error")

        with mock.patch.object(os, "write", half), mock.patch.object(os, "ftruncate", refuse):
            assert isinstance(bank.append(make_group(1)).exception(30), OSError)
        with mock.patch.object(os, "ftruncate", refuse):
            assert isinstance(bank.append(make_group(2)).exception(30), OSError)
        bank.append(make_group(3)).result(30)
    with BankReader(tmp_path) as reader:
        found = reader.verify()
        assert (found.groups, found.damages, found.torn, found.unused) == (2, [], [], 0)


def test_nothing_is_promised_while_nobody_knows_which_files_count(tmp_path: Path) -> None:
    """A stand-in: the manifest is replaced, and then the folder cannot be synced."""
    with RolloutBank.open(tmp_path) as bank:
        for i in range(3):
            bank.append(make_group(i)).result(30)
        bank.mark_consumed([("sums", 0), ("sums", 1)], 1)
        sync, replaced = os.fsync, []

        def failing(descriptor: int) -> None:
            if replaced and os.readlink(f"/proc/self/fd/{descriptor}") == str(tmp_path):
                raise OSError(errno.EIO, "Input/output error")
            sync(descriptor)

        replace = os.replace
        with (
            mock.patch.object(os, "fsync", failing),
            mock.patch.object(os, "replace", lambda a, b: (replace(a, b), replaced.append(b))),
            pytest.raises(OSError, match="Input/output error"),
        ):
            bank.checkpoint(1)
        with pytest.raises(RuntimeError, match=r"the disk of the bank .* failed; start the run again"):
            bank.append(make_group(9))
    with RolloutBank.open(tmp_path) as bank:
        assert bank.recover(1).groups == [make_group(2)]
