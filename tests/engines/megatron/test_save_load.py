"""Hugging Face folders in and out: what is written is what Transformers reads, and a bad folder is named."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

LENGTHS = [41, 2, 17, 30]


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: t for file in sorted(folder.glob("*.safetensors")) for name, t in load_file(file).items()}


def entries(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("qwen2", "megatron:t2p2"),
        ("llama-tied", "megatron:t2p2"),
        ("qwen3-moe", "megatron:(attn:t2p2|ffn:p2e2)"),
    ],
)
def test_what_was_loaded_is_saved_bit_for_bit_and_read_by_transformers(quad, models, helpers, tmp_path, kind, text):
    folder, target = models(kind), tmp_path / "deep" / "saved"
    quad.build(text, folder)
    batch = helpers.random_batch(LENGTHS)
    logits = quad.logits(batch)
    assert torch.allclose(logits, helpers.hugging_face_logits(folder, batch), atol=1e-4)
    quad.group.call("do", "save", str(target))
    original, saved = tensors(folder), tensors(target)
    assert saved.keys() == original.keys() == set(quad.group.call("tensor_names")[0])
    assert [n for n in original if not torch.equal(original[n], saved[n])] == []
    assert entries(tmp_path / "deep") == ["saved"]
    assert json.loads((target / "config.json").read_text()) == json.loads((folder / "config.json").read_text())
    assert target.stat().st_mode & 0o777 == 0o755, "others can read it, as any folder"
    # after a step the folder holds the new weights
    quad.train(batch)
    quad.group.call("do", "save", str(target))
    assert not torch.equal(tensors(target)["model.norm.weight"], original["model.norm.weight"])
    assert torch.allclose(quad.logits(batch), helpers.hugging_face_logits(target, batch), atol=1e-4)
    assert entries(tmp_path / "deep") == ["saved"], "the older folder was replaced and nothing is left of it"


def test_tokenizer_files_go_along_and_weights_of_the_source_do_not(solo, models, tmp_path):
    source = tmp_path / "source"
    shutil.copytree(models("qwen3"), source)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "merges.txt", "optimizer.pt"):
        (source / name).write_text("{}")
    solo.build("megatron:d1", source)
    solo.group.call("do", "save", str(tmp_path / "saved"))
    expected = {"chat_template.jinja", "config.json", "merges.txt", "model.safetensors", "tokenizer.json"}
    assert expected <= set(entries(tmp_path / "saved"))
    assert "optimizer.pt" not in entries(tmp_path / "saved")


def test_saving_over_the_folder_it_came_from(solo, models, helpers, tmp_path):
    source = tmp_path / "model"
    shutil.copytree(models("qwen3"), source)
    batch = helpers.random_batch(LENGTHS)
    solo.build("megatron:d1", source, optimizer={"lr": 0.01}).train(batch)
    solo.group.call("do", "save", str(source))
    assert torch.allclose(solo.logits(batch), helpers.hugging_face_logits(source, batch), atol=1e-4)


def test_large_models_are_saved_in_shards(pair, models, helpers, tmp_path):
    folder, target, again = models("qwen3-moe"), tmp_path / "saved", tmp_path / "again"
    pair.build("megatron:p2", folder)
    pair.group.call("save_in_shards", str(target), 100_000)
    index = json.loads((target / "model.safetensors.index.json").read_text())
    files = set(index["weight_map"].values())
    assert len(files) > 1 and files == {p.name for p in target.glob("*.safetensors")}
    assert index["weight_map"].keys() == tensors(folder).keys()
    assert index["metadata"]["total_size"] == sum(t.numel() * 4 for t in tensors(folder).values())
    batch = helpers.random_batch(LENGTHS)
    assert torch.allclose(pair.logits(batch), helpers.hugging_face_logits(target, batch), atol=1e-4)
    # a sharded folder is a source too; saved whole, it has no index any more
    pair.build("megatron:p2", target)
    pair.group.call("do", "save", str(again))
    assert not (again / "model.safetensors.index.json").exists()
    original, saved = tensors(folder), tensors(again)
    assert saved.keys() == original.keys() and all(torch.equal(saved[n], original[n]) for n in original)


@pytest.mark.parametrize("text", ["megatron:d2", "megatron:p2", "megatron:t2"])
def test_weights_stream_in_bounded_buckets(pair, models, text):
    folder, limit = models("qwen3-moe"), 20_000
    pair.build(text, folder)
    first, second = pair.group.call("bucket_sizes", limit)
    assert second == [], "rank 0 alone yields"
    names = [name for _, bucket in first for name in bucket]
    assert sorted(names) == sorted(tensors(folder))
    assert len(first) > 5
    assert all(size <= limit or len(bucket) == 1 for size, bucket in first)


# A disk that is full


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 200 KiB; a model here takes more. Needs the right to mount."""
    folder = tmp_path / "disk"
    folder.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=200k", "tmpfs", str(folder)], capture_output=True)
    if done.returncode:
        pytest.skip(f"mounting a small disk is not allowed here: {done.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_a_full_disk_leaves_nothing(quad, models, helpers, small_disk):
    quad.build("megatron:t2p2", models("qwen3"))
    older = small_disk / "step-1"
    older.mkdir()
    (older / "config.json").write_text("older")
    for name in ("step-1", "step-2"):
        errors = quad.attempt("save", str(small_disk / name))
        assert errors[0] is not None and errors[0][0] == "OSError"
        assert f"saving {small_disk / name} failed" in errors[0][1] and "No space left" in errors[0][1]
        assert errors[1:] == [None] * 3, "the other ranks do not wait for ever"
        assert entries(small_disk) == ["step-1"]
        assert (older / "config.json").read_text() == "older" and entries(older) == ["config.json"]
    batch = helpers.random_batch(LENGTHS)
    losses = [quad.train(batch)["loss"] for _ in range(3)]
    assert losses == sorted(losses, reverse=True), "training goes on"


def test_a_write_that_fails_leaves_nothing(quad, models, helpers, tmp_path):
    """The same without the right to mount: the kernel refuses files above 64 KiB to the writing process."""
    quad.build("megatron:t2p2", models("qwen3"))
    target = tmp_path / "step-1"
    quad.group.call("do", "save", str(target))
    before = tensors(target)
    quad.train(helpers.random_batch(LENGTHS))
    quad.group.call("limit_file_size", 64 * 1024)
    try:
        errors = quad.attempt("save", str(target)) + quad.attempt("save", str(tmp_path / "step-2"))
    finally:
        quad.group.call("limit_file_size", -1)
    assert [e is None for e in errors] == [False, True, True, True] * 2
    assert errors[0] is not None and errors[0][0] == "OSError" and f"saving {target} failed" in errors[0][1]
    assert entries(tmp_path) == ["step-1"]
    assert all(torch.equal(t, before[n]) for n, t in tensors(target).items())
    quad.group.call("do", "save", str(target))
    assert entries(tmp_path) == ["step-1"]
    assert not torch.equal(tensors(target)["model.norm.weight"], before["model.norm.weight"])


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_may_not_be_written(solo, models, tmp_path):
    solo.build("megatron:d1", models("qwen3"))
    tmp_path.chmod(0o500)
    try:
        assert solo.attempt("save", str(tmp_path / "model"))[0][0] == "OSError"
    finally:
        tmp_path.chmod(0o700)


def test_a_file_where_a_folder_should_be(solo, models, tmp_path):
    solo.build("megatron:d1", models("qwen3"))
    (tmp_path / "file").write_text("x")
    error = solo.attempt("save", str(tmp_path / "file" / "model"))[0]
    assert error is not None and error[0] == "OSError" and "failed and left nothing there" in error[1]


# Folders that are no good


@pytest.fixture
def broken(models, tmp_path):
    """`broken(kind, change)`: a copy whose tensors or config.json `change(tensors, config)` has altered."""

    def make(kind, change):
        folder = tmp_path / "broken"
        shutil.copytree(models(kind), folder)
        weights, config = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
        change(weights, config)
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        (folder / "config.json").write_text(json.dumps(config))
        return folder

    return make


BRIDGES = ("mbridge", "megatron-bridge")


def checkpoint_error(solo, folder, bridge: str = "mbridge") -> str:
    (error,) = solo.refuses("megatron:d1", folder, megatron={"bridge_type": bridge})
    assert error is not None and error[0] == "CheckpointError", error
    assert str(folder) in error[1]
    return error[1]


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("qwen3", "model.layers.1.self_attn.k_proj.weight"),
        ("qwen3", "model.embed_tokens.weight"),
        ("qwen2", "lm_head.weight"),
        ("qwen2", "model.layers.2.self_attn.v_proj.bias"),
        ("qwen3-moe", "model.layers.2.mlp.experts.3.down_proj.weight"),
    ],
)
def test_a_missing_tensor(solo, broken, kind, name):
    folder = broken(kind, lambda weights, config: weights.pop(name))
    for bridge in BRIDGES:
        assert f"has no tensor {name!r}" in checkpoint_error(solo, folder, bridge)


@pytest.mark.parametrize(
    ("kind", "name", "shape"),
    [
        ("qwen3", "model.layers.1.self_attn.q_proj.weight", (64, 64)),
        ("qwen3", "model.layers.1.self_attn.o_proj.weight", (64, 64)),
        ("qwen3", "model.layers.0.mlp.gate_proj.weight", (95, 64)),
        ("qwen3", "model.layers.0.mlp.down_proj.weight", (64, 95)),
        ("qwen3", "model.layers.0.mlp.down_proj.weight", (96, 64)),
        ("qwen3", "model.layers.2.input_layernorm.weight", (63,)),
        ("qwen3", "model.embed_tokens.weight", (130, 64)),
        ("qwen3", "model.embed_tokens.weight", (200, 64)),
        ("qwen3", "model.embed_tokens.weight", (131, 60)),
        ("qwen2", "model.layers.2.self_attn.v_proj.bias", (5,)),
        ("qwen3-moe", "model.layers.1.mlp.experts.3.up_proj.weight", (30, 64)),
        ("qwen3-moe", "model.layers.1.mlp.gate.weight", (5, 64)),
    ],
)
def test_a_tensor_of_another_shape(solo, broken, kind, name, shape):
    folder = broken(kind, lambda weights, config: weights.update({name: torch.zeros(shape)}))
    for bridge in BRIDGES:
        assert f"{name} is {shape} where" in checkpoint_error(solo, folder, bridge)


def test_a_shape_that_does_not_fit_names_the_tensor_on_every_tensor_rank(pair, broken):
    name = "model.layers.0.mlp.down_proj.weight"
    folder = broken("qwen3", lambda weights, config: weights.update({name: torch.zeros(63, 96)}))
    for bridge in BRIDGES:
        for error in pair.refuses("megatron:t2", folder, megatron={"bridge_type": bridge}):
            assert error is not None and error[0] == "CheckpointError" and name in error[1]


def test_a_missing_shard_file(solo, models, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(models("qwen3"), folder)
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    save_file(weights, folder / "model-00001-of-00002.safetensors", metadata={"format": "pt"})
    names = {n: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, n in enumerate(weights)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    message = checkpoint_error(solo, folder)
    assert "model-00002-of-00002.safetensors" in message and "index.json" in message


def test_no_weights_at_all(solo, models, tmp_path):
    shutil.copy(models("qwen3") / "config.json", tmp_path)
    assert "no *.safetensors files" in checkpoint_error(solo, tmp_path)


def test_a_file_that_is_cut_off(solo, models, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(models("qwen3"), folder)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:50_000])
    assert "model.safetensors cannot be read" in checkpoint_error(solo, folder)


def test_an_index_that_is_not_one(solo, models, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(models("qwen3"), folder)
    (folder / "model.safetensors.index.json").write_text('{"metadata": {}')
    assert "model.safetensors.index.json" in checkpoint_error(solo, folder)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "gpt2", "intermediate_size": 1}, ["'gpt2'", "llama, qwen2, qwen3, qwen3_moe"]),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}}, ["rotary scaling 'yarn'"]),
        ({"hidden_act": "gelu"}, ["activation 'gelu'"]),
        ({"use_sliding_window": True}, ["use_sliding_window"]),
    ],
    ids=lambda v: "-".join(v) if isinstance(v, dict) else "",
)
def test_what_the_engine_does_not_compute_is_refused(solo, broken, change, words):
    folder = broken("qwen3", lambda weights, config: config.update(change))
    for bridge in BRIDGES:
        message = checkpoint_error(solo, folder, bridge)
        for word in words:
            assert word in message
