"""Which recovery checkpoint is used, and which are removed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from areal_like.spec.checkpoint import CheckpointFault, Manifest, differences
from areal_like.spec.recovery import RunState, latest_checkpoint, prune, read_checkpoint, step_folder

DATA = {"epoch": 0, "position": 4, "rows": 64, "batch_size": 8, "seed": 1}


def write(root: Path, step: int, *, run: bool = True) -> Path:
    folder = step_folder(root, step)
    (folder / "actor").mkdir(parents=True)
    (folder / "actor" / "__0_0.distcp").write_bytes(b"x" * 100)
    manifest = Manifest.describe(folder / "actor", step=step, layout="megatron:d1", model={"a": 1}, counters={})
    manifest.write(folder / "actor")
    if run:
        RunState(step, step, 8 * step, DATA).write(folder)
    return folder


def test_the_newest_whole_one_is_used_and_the_torn_ones_are_named(tmp_path):
    assert latest_checkpoint(tmp_path / "none") == latest_checkpoint(tmp_path)
    for step in (2, 4, 10):
        write(tmp_path, step)
    write(tmp_path, 12, run=False)
    (tmp_path / "step-000014").mkdir()
    (tmp_path / ".step-000016.removed").mkdir()
    (tmp_path / "step-final").mkdir()
    found = latest_checkpoint(tmp_path)
    assert found.folder == tmp_path / "step-000010" and found.state == RunState(10, 10, 80, DATA)
    assert found.manifests["actor"].size == 100
    assert [fault.endswith("has no run.json: it was never finished") for fault in found.torn] == [True, True]
    (tmp_path / "step-000010" / "actor" / "__0_0.distcp").write_bytes(b"x" * 99)
    found = latest_checkpoint(tmp_path)
    assert found.folder == tmp_path / "step-000004"
    assert found.torn[2].endswith("__0_0.distcp has 99 bytes; its manifest says 100")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "cannot be read"),
        ("[1]", "cannot be read"),
        ('{"format": 7}', "has format 7; this program reads 1"),
        ('{"format": 1}', "cannot be read"),
        (json.dumps({"format": 1, "step": 3, "version": 3, "prompts": 0, "data": {}, "roles": ["actor"]}), "of step 4"),
        (json.dumps({"format": 1, "step": 4, "version": 4, "prompts": 0, "data": {}, "roles": ["critic"]}), "critic"),
    ],
)
def test_a_run_state_that_is_none(tmp_path, text, message):
    folder = write(tmp_path, 4)
    (folder / "run.json").write_text(text)
    with pytest.raises(CheckpointFault, match=message):
        read_checkpoint(folder)


@pytest.mark.parametrize("text", ["", "{}", "null", '{"files": {}, "version": 9}', '{"files": {}, "version": 1}'])
def test_a_manifest_that_is_none(tmp_path, text):
    folder = write(tmp_path, 4)
    (folder / "actor" / "manifest.json").write_text(text)
    assert latest_checkpoint(tmp_path).folder is None


def test_old_ones_are_removed_and_what_is_being_written_is_not(tmp_path):
    for step in (2, 4, 6, 8):
        write(tmp_path, step, run=step != 4)
    write(tmp_path, 10, run=False)  # an asynchronous one, on its way
    (tmp_path / ".step-000001.removed").mkdir()  # of a run that was killed while it removed
    prune(tmp_path, 2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-000006", "step-000008", "step-000010"]
    prune(tmp_path, 5)
    assert len(list(tmp_path.iterdir())) == 3
    prune(tmp_path, 1)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-000008", "step-000010"]
    prune(tmp_path / "none", 1)


def test_differences_are_named():
    assert differences({"a": 1, "b": [2]}, {"a": 1, "b": [2]}) == []
    assert differences({"a": 1, "b": 2}, {"a": 3, "c": 4}) == [
        "a is 1 in the checkpoint and 3 here",
        "b is 2 in the checkpoint and None here",
        "c is None in the checkpoint and 4 here",
    ]
