"""Recovery checkpoints on disk: whole or not there, written beside the training, as large as predicted."""

from __future__ import annotations

import contextlib
import json
import subprocess
from pathlib import Path

import pytest
import torch

from areal_like.alloc import ModelAllocation
from areal_like.spec import ModelSpec
from areal_like.spec.checkpoint import CheckpointFault, read_manifest
from areal_like.spec.memory import LoRA, MemoryJob
from areal_like.spec.memory.recovery import checkpoint_bytes

LENGTHS = [41, 2, 17, 30, 22]


@pytest.mark.parametrize(
    ("kind", "text", "dtype", "kind_of_optimizer", "rank"),
    [
        ("qwen3", "megatron:t2", "bfloat16", "adam", None),
        ("qwen3-moe", "megatron:d2e2", "float32", "adam", None),
        ("qwen2", "megatron:d2", "bfloat16", "sgd", None),
        ("qwen2", "megatron:p2", "bfloat16", "adam", 4),
    ],
)
def test_the_size_is_the_predicted_one(pair, models, helpers, tmp_path, kind, text, dtype, kind_of_optimizer, rank):
    changes = {"dtype": dtype, "optimizer": {"type": kind_of_optimizer}}
    if rank:
        changes |= {"use_lora": True, "lora_rank": rank, "megatron": {"bridge_type": "megatron-bridge"}}
    pair.build(text, models(kind), **changes)
    pair.group.call("do", "save_checkpoint", str(tmp_path / "c"), step=0)
    stored = [t for t in helpers.content(tmp_path / "c").values() if torch.is_tensor(t)]
    lora = LoRA(rank, dtype=dtype) if rank else None
    job = MemoryJob(micro_tokens=1, seq=1, dtype=dtype, optimizer=kind_of_optimizer, lora=lora)
    predicted = checkpoint_bytes(ModelSpec.from_path(models(kind)), ModelAllocation.parse(text), job)
    assert predicted == sum(t.numel() * t.element_size() for t in stored)
    files = read_manifest(tmp_path / "c").files
    shards = 2 * len(stored) * 3 * 4  # two ranks, layers, experts
    assert predicted < sum(files.values()) < predicted + 2048 * shards
    data = [size for name, size in files.items() if name.endswith(".distcp")]
    assert len(data) == 2
    if kind_of_optimizer == "adam" and text != "megatron:p2":  # there one stage has two of three layers
        assert max(data) < 1.5 * min(data), "both ranks store about as much"


def test_training_goes_on_while_an_asynchronous_checkpoint_is_written(pair, models, helpers, tmp_path):
    folder, batch = models("qwen3"), helpers.random_batch(LENGTHS)
    pair.build("megatron:d2", folder)
    pair.train(batch)
    pair.group.call("do", "save_checkpoint", str(tmp_path / "sync"), step=1)
    pair.build("megatron:d2", folder, megatron={"async_save": True})
    pair.train(batch)
    pair.group.call("hold_writer")
    pair.group.call("do", "save_checkpoint", str(tmp_path / "async"), step=1)
    pair.train(batch)  # the written values are those of before
    assert pair.group.call("do", "finish_checkpoint", wait=False) == [False, False]
    assert not (tmp_path / "async").exists()
    pair.group.call("release_writer")
    assert pair.group.call("do", "finish_checkpoint") == [True, True]
    assert helpers.unequal(helpers.tensors(tmp_path / "sync"), helpers.tensors(tmp_path / "async")) == []
    assert sorted(p.name for p in tmp_path.iterdir() if p.is_dir()) == ["async", "sync"]
    # the next one completes the one before; closing completes the last
    pair.group.call("do", "save_checkpoint", str(tmp_path / "second"), step=2)
    pair.group.call("do", "save_checkpoint", str(tmp_path / "third"), step=2)
    assert read_manifest(tmp_path / "second").step == 2 and not (tmp_path / "third").exists()
    pair.group.call("do", "finish_checkpoint")
    assert helpers.unequal(helpers.tensors(tmp_path / "second"), helpers.tensors(tmp_path / "third")) == []


@contextlib.contextmanager
def small_disk(folder: Path, size: str):
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], capture_output=True)
    if mounted.returncode:
        pytest.skip("a small file system cannot be mounted here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.parametrize("beside", [False, True])
def test_a_full_disk_leaves_the_previous_checkpoint(pair, models, tmp_path, beside):
    pair.build("megatron:t2", models("qwen2"), megatron={"async_save": beside})
    with small_disk(tmp_path / "disk", "3m") as disk:
        pair.group.call("do", "save_checkpoint", str(disk / "one"), step=1)
        pair.group.call("do", "finish_checkpoint")
        assert pair.attempt("save_checkpoint", str(disk / "two"), step=2) == [None, None] or not beside
        errors = pair.attempt("save_checkpoint", str(disk / "two"), step=2)
        assert errors[0] == errors[1] and errors[0][0] == "OSError"
        assert errors[0][1].startswith(f"writing the checkpoint {disk}/two failed: [Errno 28] No space left on device")
        assert "\n" not in errors[0][1]
        assert [p.name for p in disk.iterdir()] == ["one"]
        assert pair.group.call("do", "load_checkpoint", str(disk / "one")) == [1, 1]
        # it was not the end: with room again the next one is written
        pair.group.call("do", "save_checkpoint", str(tmp_path / "two"), step=2)
        pair.group.call("do", "finish_checkpoint")
        assert read_manifest(tmp_path / "two").step == 2


def test_what_is_torn_or_of_another_model_is_named_on_all_ranks(pair, models, tmp_path):
    pair.build("megatron:d2", models("qwen2"))
    pair.group.call("do", "save_checkpoint", str(tmp_path / "c"), step=1)
    manifest = json.loads((tmp_path / "c" / "manifest.json").read_text())
    assert manifest["layout"] == "megatron:d2" and manifest["files"].keys() == {
        p.name for p in (tmp_path / "c").iterdir()
    } - {"manifest.json"}
    file = tmp_path / "c" / "__1_0.distcp"
    whole = file.read_bytes()
    for damage, text in (
        (lambda: file.write_bytes(whole[:-1]), f"{file} has {len(whole) - 1} bytes; its manifest says {len(whole)}"),
        (file.unlink, "lacks the file __1_0.distcp that its manifest names"),
        ((tmp_path / "c" / "manifest.json").unlink, "has no manifest.json: it was never finished"),
    ):
        damage()
        with pytest.raises(CheckpointFault, match="c"):
            read_manifest(tmp_path / "c")
        errors = pair.attempt("load_checkpoint", str(tmp_path / "c"))
        assert errors[0] == errors[1] and errors[0][0] == "CheckpointFault" and text in errors[0][1]
    file.write_bytes(whole)
    (tmp_path / "c" / "manifest.json").write_text(json.dumps(manifest))
    assert pair.group.call("do", "load_checkpoint", str(tmp_path / "c")) == [1, 1]
    pair.build("megatron:d2", models("qwen3"))
    errors = pair.attempt("load_checkpoint", str(tmp_path / "c"))
    assert errors[0] == errors[1] and "architecture is qwen2 in the checkpoint and qwen3 here" in errors[0][1]
    pair.build("megatron:d2", models("qwen2"), optimizer=None)
    assert "no optimizer" in pair.attempt("save_checkpoint", str(tmp_path / "d"), step=1)[0][1]
