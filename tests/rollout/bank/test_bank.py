"""The bank from outside: what goes in comes back, by the rule; who may write; what is refused."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from bank_tools import make_group, text_group

from areal_like.rollout.bank import BankError, BankReader, RolloutBank
from areal_like.rollout.trajectories import RolloutGroup, TokenRollout


def fill(bank: RolloutBank, count: int) -> list[RolloutGroup]:
    groups = [make_group(i) for i in range(count)]
    for promise in [bank.append(group) for group in groups]:
        promise.result(30)
    return groups


def generations(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("generation-*"))


def test_what_goes_in_comes_back_in_its_order(tmp_path: Path) -> None:
    with RolloutBank.open(tmp_path / "a" / "bank") as bank:
        assert bank.append(make_group(3)).result(30) == "sums/3"
        groups = [make_group(3), text_group(0), make_group(1, "maths"), make_group(1)]
        for group in groups[1:]:
            bank.append(group)
    with RolloutBank.open(tmp_path / "a" / "bank") as bank:
        recovered = bank.recover(0)
    assert recovered.groups == groups and recovered.dropped == []


def test_the_rule_of_a_restart(tmp_path: Path) -> None:
    with RolloutBank.open(tmp_path) as bank:
        groups = fill(bank, 5)
        bank.mark_consumed([groups[0].key], 1)
        bank.mark_consumed([groups[1].key, groups[3].key], 2)
        bank.mark_consumed([groups[4].key], 3)
    with RolloutBank.open(tmp_path) as bank:
        assert bank.recover(2).groups == [groups[2], groups[4]]


def test_markers_of_a_lost_run_mean_nothing_to_the_next(tmp_path: Path) -> None:
    with RolloutBank.open(tmp_path) as bank:
        (group,) = fill(bank, 1)
        bank.mark_consumed([group.key], 5)
        first = bank.timeline
    with RolloutBank.open(tmp_path) as bank:
        assert bank.recover(4).groups == [group] and bank.timeline != first
        bank.checkpoint(6)  # this run has not trained it
    with RolloutBank.open(tmp_path) as bank:
        assert bank.recover(7).groups == [group]


def test_a_group_that_was_dropped_can_be_made_again(tmp_path: Path) -> None:
    with RolloutBank.open(tmp_path) as bank:
        bank.append(make_group(0, version=1)).result(30)
    with RolloutBank.open(tmp_path) as bank:
        assert bank.recover(1, version=9, max_age=2).groups == []
        bank.append(make_group(0, version=9)).result(30)
        assert bank.recover(1, version=9, max_age=2).groups == [make_group(0, version=9)]


@pytest.mark.parametrize(("max_age", "kept"), [(7, [0, 1, 2]), (6, [1, 2]), (4, [1, 2]), (0, [2])])
def test_age_counts_from_the_oldest_drawn_token(tmp_path: Path, max_age: int, kept: list[int]) -> None:
    """Oldest tokens are of versions 3, 6 and 12; the policy is 10."""
    groups = [make_group(0), make_group(1), make_group(2)]
    for group, oldest in zip(groups, (3, 6, 12), strict=True):
        versions = [
            turn.versions for member in group.members if isinstance(member, TokenRollout) for turn in member.turns
        ]
        for run in versions:
            run[:] = [20] * len(run)
        versions[1][2] = oldest
    notes: list[str] = []
    with RolloutBank.open(tmp_path, note=notes.append) as bank:
        for group in [*groups, text_group(0)]:
            bank.append(group).result(30)
        recovered = bank.recover(0, version=10, max_age=max_age)
    assert recovered.groups == [*[groups[i] for i in kept], text_group(0)]
    assert recovered.counts() == ({"age": 3 - len(kept)} if len(kept) < 3 else {})
    assert [d.key for d in recovered.dropped] == [g.key for i, g in enumerate(groups) if i not in kept]
    if len(kept) < 3:
        assert f"dropped in all: {3 - len(kept)} age" in notes[-1]
        assert f"7 versions old, more than {max_age}" in recovered.dropped[0].problem


def test_no_age_limit_without_a_version(tmp_path: Path) -> None:
    with RolloutBank.open(tmp_path) as bank, pytest.raises(ValueError, match="max_age needs the version"):
        bank.recover(0, max_age=1)


@pytest.mark.parametrize("trained", range(6))
@pytest.mark.parametrize("max_bytes", [0, 1])
def test_compaction_does_not_change_what_comes_back(tmp_path: Path, trained: int, max_bytes: int) -> None:
    """Half the bytes must be free before files are copied; a limit that is passed makes it happen at once."""
    with RolloutBank.open(tmp_path, max_bytes=max_bytes, note=lambda _: None) as bank:
        groups = fill(bank, 6)
        if trained:
            bank.mark_consumed([g.key for g in groups[:trained]], 1)
        bank.mark_consumed([groups[5].key], 2)
        before, size = generations(tmp_path), bank.bytes
        bank.checkpoint(1)
        compacted = generations(tmp_path) != before
        assert compacted == (trained >= 3 or (max_bytes == 1 and trained > 0))
        assert len(generations(tmp_path)) == 1 and (bank.bytes < size) == compacted
    with BankReader(tmp_path) as reader:
        assert reader.manifest.checkpoint == 1
        assert reader.contents.consumed[groups[5].key] == 2
    with RolloutBank.open(tmp_path) as bank:
        assert bank.recover(1).groups == groups[trained:]


@pytest.mark.parametrize("trained", [1, 5])
def test_going_back_behind_a_checkpoint_is_said(tmp_path: Path, trained: int) -> None:
    """The same comes back whether the files were compacted or not: 1 of 6 is too little, 5 of 6 is enough."""
    notes: list[str] = []
    with RolloutBank.open(tmp_path) as bank:
        groups = fill(bank, 6)
        bank.mark_consumed([g.key for g in groups[:trained]], 4)
        bank.checkpoint(4)
    with RolloutBank.open(tmp_path, note=notes.append) as bank:
        assert bank.recover(2).groups == groups[trained:]
        assert "groups that steps 3 to 4 trained are gone" in notes[-1]
        bank.mark_consumed([groups[5].key], 3)  # the run has gone back, and the bank with it


def test_groups_stay_usable_over_compactions(tmp_path: Path) -> None:
    with RolloutBank.open(tmp_path) as bank:
        groups = [make_group(i) for i in range(40)]
        for step, group in enumerate(groups, start=1):
            bank.append(group).result(30)
            if step > 3:
                bank.mark_consumed([groups[step - 4].key], step)
                bank.checkpoint(step)
        assert bank.bytes < 8 * 1500
    with RolloutBank.open(tmp_path) as bank:
        assert bank.recover(40).groups == groups[-3:]


def test_append_does_not_wait_for_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk takes until the event loop is done with all its appends: a loop that waited would stay for ever."""
    handed_in, sync, syncs = threading.Event(), os.fsync, []

    def slow(descriptor: int) -> None:
        assert threading.current_thread().name == "rollout bank" and handed_in.wait(60)
        syncs.append(descriptor)
        sync(descriptor)

    async def produce(bank: RolloutBank) -> list[str]:
        promises = [asyncio.wrap_future(bank.append(make_group(i))) for i in range(50)]
        await asyncio.sleep(0.05)
        assert not any(promise.done() for promise in promises)
        handed_in.set()
        return await asyncio.gather(*promises)

    with RolloutBank.open(tmp_path) as bank:
        monkeypatch.setattr(os, "fsync", slow)
        assert asyncio.run(produce(bank)) == [f"sums/{i}" for i in range(50)]
        monkeypatch.undo()
    assert len(syncs) in (2, 4, 6), "the first few alone, and the rest in one commit: two syncs each"


def test_one_whose_owner_gave_up_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free, sync = threading.Event(), os.fsync
    with RolloutBank.open(tmp_path) as bank:
        monkeypatch.setattr(os, "fsync", lambda descriptor: (free.wait(60), sync(descriptor)))
        first = bank.append(make_group(0))
        while not first.running():
            pass
        second, third = bank.append(make_group(1)), bank.append(make_group(2))
        assert second.cancel() and not first.cancel()
        free.set()
        assert third.result(30) == "sums/2"
        monkeypatch.undo()
        assert bank.recover(0).groups == [make_group(0), make_group(2)]


def test_the_size_limit_warns_once(tmp_path: Path) -> None:
    notes: list[str] = []
    with RolloutBank.open(tmp_path, max_bytes=3000, note=notes.append) as bank:
        fill(bank, 1)
        assert notes == []
        for i in range(1, 20):
            bank.append(make_group(i)).result(30)
    assert len(notes) == 1 and "more than its limit of 3000" in notes[0]


def test_an_owner_who_fails_when_told_does_not_stop_the_bank(tmp_path: Path) -> None:
    def fail(text: str) -> None:
        raise RuntimeError(text)

    with RolloutBank.open(tmp_path, max_bytes=10, note=fail) as bank:
        assert [bank.append(make_group(i)).result(30) for i in range(3)] == ["sums/0", "sums/1", "sums/2"]


def test_what_is_refused(tmp_path: Path) -> None:
    good = make_group(0)
    with RolloutBank.open(tmp_path) as bank:
        bank.append(good).result(30)
        with pytest.raises(ValueError, match="sums/0 is in the bank already"):
            bank.append(good).result(30)
        both = [bank.append(make_group(1)), bank.append(make_group(1))]
        assert sorted(type(promise.exception(30)).__name__ for promise in both) == ["NoneType", "ValueError"]
        with pytest.raises(ValueError, match="sums/2 has no members"):
            bank.append(replace(make_group(2), members=[])).result(30)
        with pytest.raises(KeyError, match="sums/9 is not in the bank"):
            bank.mark_consumed([good.key, ("sums", 9)], 1)
        bank.mark_consumed([good.key], 3)
        bank.mark_consumed([good.key], 3)
        bank.mark_consumed([], 3)
        with pytest.raises(ValueError, match="step 3 trains group sums/0 already; step 4 must not"):
            bank.mark_consumed([good.key], 4)
        bank.checkpoint(3)
        with pytest.raises(ValueError, match="step 3 is in the checkpoint of step 3"):
            bank.mark_consumed([("sums", 1)], 3)
        with pytest.raises(ValueError, match="below 0"):
            bank.recover(-1)
    for call in (lambda: bank.append(good), lambda: bank.recover(0), lambda: bank.checkpoint(9)):
        with pytest.raises(BankError, match="is closed"):
            call()
    bank.close()
    with pytest.raises(ValueError, match="can be float32 or float16"):
        RolloutBank.open(tmp_path, log_probs="bfloat16")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="max_bytes is -1"):
        RolloutBank.open(tmp_path, max_bytes=-1)


def test_an_earlier_run_has_to_be_recovered_first(tmp_path: Path) -> None:
    with RolloutBank.open(tmp_path) as bank:
        bank.append(make_group(0)).result(30)
    with RolloutBank.open(tmp_path) as bank:
        for call in (lambda: bank.append(make_group(1)), lambda: bank.mark_consumed([], 1), lambda: bank.checkpoint(1)):
            with pytest.raises(BankError, match=r"call recover\(step\) first"):
                call()
        bank.recover(0)
        bank.append(make_group(1)).result(30)


def test_widths_may_change_from_run_to_run(tmp_path: Path) -> None:
    with RolloutBank.open(tmp_path, log_probs="float16") as bank:
        bank.append(make_group(0)).result(30)
        small = bank.bytes
    with RolloutBank.open(tmp_path, log_probs="float32") as bank:
        bank.recover(0)
        bank.append(make_group(1)).result(30)
        assert bank.recover(0).groups == [make_group(0), make_group(1)]
        assert bank.bytes > 2 * small


HOLD = """
import os, sys
from pathlib import Path
from areal_like.rollout.bank import RolloutBank
bank = RolloutBank.open(Path(sys.argv[1]))
print(os.getpid(), flush=True)
if len(sys.argv) > 2:
    child = os.fork()
    print(child or "child", flush=True)
sys.stdin.read()
"""


def hold(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", HOLD, str(folder), *arguments]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_two_writers_are_refused_and_readers_are_not(tmp_path: Path) -> None:
    with RolloutBank.open(tmp_path) as bank:
        bank.append(make_group(0)).result(30)
    with hold(tmp_path) as holder:
        assert holder.stdout is not None
        assert int(holder.stdout.readline()) == holder.pid
        with pytest.raises(BankError, match=f"written by process {holder.pid} on {os.uname().nodename}: end that run"):
            RolloutBank.open(tmp_path)
        with BankReader(tmp_path) as reader:
            assert reader.group(("sums", 0)) == make_group(0)
        holder.kill()
        holder.wait()
        with RolloutBank.open(tmp_path), pytest.raises(BankError, match=f"process {os.getpid()}"):
            RolloutBank.open(tmp_path)


def test_the_lock_ends_with_its_owner_and_not_with_a_forked_child(tmp_path: Path) -> None:
    with hold(tmp_path, "fork") as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        holder.stdout.readline()
        holder.stdout.readline()  # the child lives, and ends with its input
        holder.kill()
        os.waitpid(holder.pid, 0)
        holder.returncode = -9
        RolloutBank.open(tmp_path).close()


def test_a_reader_changes_nothing(tmp_path: Path) -> None:
    with RolloutBank.open(tmp_path) as bank:
        fill(bank, 3)
        before = {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in tmp_path.rglob("*")}
        with BankReader(tmp_path) as reader:
            assert reader.verify().groups == 3
        assert before == {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in tmp_path.rglob("*")}


def test_a_reader_goes_on_while_the_files_are_replaced(tmp_path: Path) -> None:
    with RolloutBank.open(tmp_path) as bank:
        groups = fill(bank, 4)
        with BankReader(tmp_path) as reader:
            bank.mark_consumed([g.key for g in groups], 1)
            bank.checkpoint(1)
            assert [reader.group(g.key) for g in groups] == groups
        done = threading.Event()

        def compact() -> None:
            for i in range(100, 180):
                bank.append(make_group(i)).result(30)
                bank.mark_consumed([("sums", i)], i)
                bank.checkpoint(i)
            done.set()

        thread = threading.Thread(target=compact)
        thread.start()
        looks = 0
        while not done.is_set():
            with BankReader(tmp_path) as reader:
                found = reader.verify()
            assert found.damages == [] and found.groups <= 1
            looks += 1
        thread.join()
        assert looks > 5


# Folders that are no bank of this program.


def test_a_folder_of_somebody_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(BankError, match=r"has thesis\.tex in it and no manifest\.json"):
        RolloutBank.open(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]
    with pytest.raises(BankError, match="is no folder"):
        RolloutBank.open(tmp_path / "thesis.tex")
    with pytest.raises(BankError, match="it is no rollout bank"):
        BankReader(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, r"has groups in generation-\w+ and no manifest\.json: put the manifest back"),
        ("", "is damaged: put it back from a copy"),
        ("[]", "is damaged"),
        ("{}", "is damaged"),
        ('{"manifest": {"format": 2}}', "has format 2; this program reads 1: go on with the program that wrote it"),
        ('{"manifest": {"format": 1}}', "is damaged"),
    ],
)
def test_a_manifest_that_cannot_be_used_is_refused(tmp_path: Path, text: str | None, message: str) -> None:
    with RolloutBank.open(tmp_path) as bank:
        bank.append(make_group(0)).result(30)
    manifest = tmp_path / "manifest.json"
    before = manifest.read_text()
    if text is None:
        manifest.unlink()
    else:
        manifest.write_text(text)
    with pytest.raises(BankError, match=message) as raised:
        RolloutBank.open(tmp_path)
    assert "away to begin without its groups" in str(raised.value) and "\n" not in str(raised.value)
    with pytest.raises(BankError):
        BankReader(tmp_path)
    manifest.write_text(before)
    with RolloutBank.open(tmp_path) as bank:
        assert bank.recover(0).groups == [make_group(0)]


def test_a_manifest_of_a_newer_program(tmp_path: Path) -> None:
    RolloutBank.open(tmp_path).close()
    manifest = tmp_path / "manifest.json"
    found = json.loads(manifest.read_text())
    manifest.write_text(json.dumps({**found, "manifest": {**found["manifest"], "format": 9}}))
    with pytest.raises(BankError, match="format 9; this program reads 1"):
        RolloutBank.open(tmp_path)


def test_files_that_are_missing(tmp_path: Path) -> None:
    with RolloutBank.open(tmp_path) as bank:
        bank.append(make_group(0)).result(30)
    next(tmp_path.rglob("data.bin")).unlink()
    with pytest.raises(BankError, match=r"data\.bin is missing, though manifest\.json names its folder"):
        RolloutBank.open(tmp_path)
    with pytest.raises(BankError, match=r"data\.bin is missing"):
        BankReader(tmp_path)


def test_a_creation_that_was_cut_short_is_made_again(tmp_path: Path) -> None:
    RolloutBank.open(tmp_path).close()
    (tmp_path / "manifest.json").rename(tmp_path / "manifest.json.new")
    with RolloutBank.open(tmp_path) as bank:
        bank.append(make_group(0)).result(30)
    assert len(generations(tmp_path)) == 1 and not (tmp_path / "manifest.json.new").exists()
