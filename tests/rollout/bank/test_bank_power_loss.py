"""The power goes after any call of a run: what was not synced is lost or torn, what was promised is there."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from bank_life import Journal, life
from bank_tools import make_group
from power_loss import Disk, Recording

from areal_like.rollout.bank import BankError, RolloutBank

FATES = ("lost", "kept", "torn", "torn")


def record(folder: Path, skipped: str | None = None) -> Recording:
    """Three lives of a run: it makes the bank and begins, goes on, goes on from a checkpoint before its last step."""
    recording = Recording(folder, skipped)
    folder.mkdir(exist_ok=True)
    with recording.running():
        for steps in (4, 3, 4):
            life(folder, lambda what, **told: recording.tell(what, told, saved(folder)), steps=steps)
    return recording


def saved(folder: Path) -> str | None:
    """The trainer's checkpoint; the trainer syncs its files itself, which is not what is looked at here."""
    file = folder / "trainer.json"
    return file.read_text() if file.exists() else None


def broken(recording: Recording, folder: Path, every: int = 1) -> Iterator[str]:
    """Promises that are broken when the power goes after some call of the recording."""
    disk, promised, trainer = Disk(recording.root), set(), None
    draw = random.Random(1)
    with mock.patch.object(os, "fsync"):
        for number, step in enumerate(recording.steps):
            if step[0] == "told":
                if step[1] == "promised":
                    promised.add(step[2]["index"])
                trainer = step[3]
            else:
                disk.play(step)
            if number % every:
                continue
            for fate in FATES:
                place = folder / "crashed"
                shutil.rmtree(place, ignore_errors=True)
                disk.crash(place, draw, fate)
                if trainer is not None:
                    (place / "trainer.json").write_text(trainer)
                journal = Journal(set(promised))
                try:
                    life(place, lambda what, journal=journal, **told: journal.hear({"what": what, **told}), steps=1)
                except (BankError, OSError, ValueError) as error:
                    journal.broken.append(repr(error))
                yield from (f"step {number} {step[:2]}, {fate}: {text}" for text in journal.broken)


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Recording:
    return record(tmp_path_factory.mktemp("recorded"))


def test_the_recording_is_what_is_on_the_disk(recording: Recording, tmp_path: Path) -> None:
    """Played to its end with nothing lost, it is the folder that the run left."""
    disk = Disk(recording.root)
    for step in recording.steps:
        if step[0] != "told":
            disk.play(step)
    disk.crash(tmp_path / "played", random.Random(0), "kept")

    def files(root: Path) -> dict[str, bytes]:
        found = [path for path in root.rglob("*") if path.is_file() and path.name not in ("lock", "trainer.json")]
        return {str(path.relative_to(root)): path.read_bytes() for path in found}

    assert files(tmp_path / "played") == files(recording.root)
    kinds = {step[0] for step in recording.steps if not step[1].endswith("lock")}
    assert kinds == {"told", "create", "mkdir", "write", "fsync", "replace", "unlink"}


@pytest.mark.parametrize("every", [9, pytest.param(1, marks=pytest.mark.slow)])
def test_no_promise_is_broken(recording: Recording, tmp_path: Path, every: int) -> None:
    assert list(broken(recording, tmp_path, every)) == []
    assert len(recording.steps) > 200


@pytest.mark.parametrize("skipped", ["data.bin", "index.log", "consumed.log", "manifest.json.new", "bank"])
def test_an_fsync_that_is_left_out_is_found(tmp_path: Path, skipped: str) -> None:
    """`bank`: of the folder itself, which holds the manifest and the generations."""
    recording = record(tmp_path / "recorded", skipped)
    assert next(broken(recording, tmp_path), None) is not None, f"nobody misses the fsync of {skipped}"


def test_a_failed_write_and_then_the_power(tmp_path: Path) -> None:
    """A commit that fails is taken back; the one after it is whole whatever happened to the first on the disk."""
    recording = Recording(tmp_path)
    with recording.running(), RolloutBank.open(tmp_path / "bank") as bank:
        bank.append(make_group(0)).result(60)
        recording.tell("promised", {"index": 0}, None)
        write = os.write

        def full(descriptor: int, data: Any) -> int:
            if recording._paths[descriptor].endswith("index.log"):
                write(descriptor, bytes(data)[:50])
                raise OSError(28, "no space")
            return write(descriptor, data)

        with mock.patch.object(os, "write", full), pytest.raises(OSError, match=r"index\.log"):
            bank.append(make_group(1)).result(60)
        bank.append(make_group(2)).result(60)
        recording.tell("promised", {"index": 2}, None)
    assert "truncate" in {step[0] for step in recording.steps}
    assert list(broken(recording, tmp_path)) == []
