"""Each benchmark explains itself at once; the training step's runs at a small size."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from areal_like.alloc import ModelAllocation
from areal_like.spec import ModelSpec
from areal_like.spec.memory import GIB, MemoryJob, predict

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def call(name, *arguments, timeout=60):
    command = [sys.executable, str(BENCHMARKS / name), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=ENVIRONMENT)


@pytest.mark.parametrize("name", sorted(p.name for p in BENCHMARKS.glob("*.py")))
def test_help(name):
    done = call(name, "--help")
    assert done.returncode == 0, done.stderr
    assert f"usage: {name}" in done.stdout and f"python benchmarks/{name}" in done.stdout
    assert done.stderr == ""


def test_an_unknown_option_is_an_error():
    assert call("alloc.py", "--fast").returncode == 2


SMALL = ["--device", "cpu", "--layers", "1", "--tokens", "64", "--seq", "16", "--micro", "2", "--steps", "1"]


@pytest.mark.slow
def test_a_small_training_step(tmp_path):
    """Beside a reference that says known figures: the ratios are of its output."""
    reference = tmp_path / "reference.py"
    reference.write_text('print("noise"); print(\'{"tok_s_gpu": 1000, "tflops_gpu": 1.0, "peak_gib": 1.0}\')')
    out = tmp_path / "figures.json"
    command = [*SMALL, "--set", "optimizer.lr=0.5", "--json", str(out), "--reference", str(reference)]
    done = call("train_step.py", *command, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    figures = json.loads(out.read_text())["engine"]
    lines = done.stdout.splitlines()
    printed = [json.loads(line) for line in lines if line.startswith("{")]
    assert figures == printed[0] and printed[1]["tok_s_gpu"] == 1000
    assert f"tokens/s: {figures['tok_s_gpu'] / 1000:.3f} x reference" in lines
    assert figures["keys"] == ["optimizer.lr=0.5"]
    assert figures["loss"] != pytest.approx(0.0, abs=0.01)  # of the fourth step: the key reached the optimizer
    job = MemoryJob(micro_tokens=64, seq=16, micro_batches=2, dtype="float32")
    plan = predict(ModelSpec.from_config(shape()), ModelAllocation.parse("megatron:d1"), job)
    assert figures["predicted_gib"] == pytest.approx(plan.ranks[0].phase("update").allocated / GIB, abs=0.01)
    assert figures["micro_batches"] == 2 and figures["tok_s_gpu"] > 0 and figures["step_s"] > 0
    assert not figures["transformer_engine"]
    # one layer of Qwen2.5-1.5B and its head: 3 x (2 x weights + attention) x tokens / time
    weights = 2 * 1536 * 1536 + 2 * 1536 * 256 + 3 * 1536 * 8960 + 1536 * 151936
    flops = 3 * (2 * weights + 4 * 1536 * 8) * 128
    assert figures["tflops_gpu"] == pytest.approx(flops / figures["step_s"] / 1e12, abs=0.06)


def train_step():
    spec = importlib.util.spec_from_file_location("train_step", BENCHMARKS / "train_step.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def shape():
    module = train_step()
    return {**module.COMMON, **module.SHAPES["dense"], "num_hidden_layers": 1}


def test_variants_are_rows(tmp_path, capsys, monkeypatch):
    """Each differs from the first row in its own keys alone; one that fails leaves the others."""
    module, out = train_step(), tmp_path / "figures.json"
    speeds = {(): 100, ("mb_spec.max_tokens_per_mb=32", "optimizer.lr=0.5"): 150}

    def run(arguments, keys=()):
        assert arguments.set == ["disable_dropout=false", "megatron.fp8_config={recipe: delayed, param: false}"]
        if tuple(keys) not in speeds:
            raise module.EngineFailed("exit code 1")
        return {"tok_s_gpu": speeds[tuple(keys)], "tflops_gpu": 1.0, "peak_gib": 2.0, "predicted_gib": 1.96}

    monkeypatch.setattr(module, "run_engine", run)
    variants = [
        "--variant",
        "halves: mb_spec.max_tokens_per_mb=32, optimizer.lr=0.5",
        "--variant",
        "bad: optimizer.eps=1.0",
    ]
    options = ["--set", "disable_dropout=false", "--fp8", "delayed", "--json", str(out), *variants]
    monkeypatch.setattr(sys, "argv", ["train_step.py", *options])
    assert module.main() == 1
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert rows[1].startswith("| engine | 100 | 1.000 | 1.0 |") and rows[2].startswith("| halves | 150 | 1.500 |")
    assert rows[3].startswith("| bad | failed: exit code 1 |")
    assert rows[1].endswith("| 2.0 | 1.000 | 2.0 |")
    assert json.loads(out.read_text())["variants"]["halves"]["tok_s_gpu"] == 150


def test_a_wrong_key_is_said_before_anything_runs():
    done = call("train_step.py", *SMALL, "--set", "megatron.recompute_granularty=full")
    assert done.returncode == 1 and "did you mean recompute_granularity?" in done.stderr
    assert "Traceback" not in done.stderr and not done.stdout


def test_variants_are_read():
    read = train_step().read_variant
    assert read("a b: x=1, y={p: q, r: [1, 2]},z=") == ("a b", ["x=1", "y={p: q, r: [1, 2]}", "z="])
    for text in ("x=1", ": x=1", "a:", "a: x"):
        with pytest.raises(SystemExit, match="NAME: KEY=VALUE"):
            read(text)


@pytest.mark.parametrize("code", ["raise SystemExit('no GPU here')", "print('no GPU here')"])
def test_a_reference_that_fails_is_said(tmp_path, code):
    reference = tmp_path / "reference.py"
    reference.write_text(code)
    options = argparse.Namespace(reference=reference, model="dense", tokens=64, seq=16, micro=2, steps=1, layers=1)
    options.fp8 = None
    with pytest.raises(SystemExit, match=r"(?s)the reference failed.*no GPU here"):
        train_step().run_reference(options)


def test_attention_on_a_cpu(tmp_path):
    out = tmp_path / "figures.json"
    done = call("attention.py", "--device", "cpu", "--json", str(out))
    assert done.returncode == 0, done.stderr[-3000:]
    rows = {row["name"]: row for row in json.loads(out.read_text())["rows"]}
    assert rows.keys() == {"local", "flex"} and not any("failed" in row for row in rows.values())
    assert all(0 < row["error"] < 1e-5 for row in rows.values()), "float32 beside float64"
    assert rows["local"]["repeats"] and rows["flex"]["fwd_bwd_ms"] is None
    # 3.5 x 4 x heads x width x pairs of 70, 1 and 57 tokens
    pairs = 70 * 71 // 2 + 1 + 57 * 58 // 2
    flops = 14 * 4 * 16 * pairs
    assert rows["local"]["tflops"] == pytest.approx(flops / rows["local"]["layer_ms"] / 1e9)


def test_packing_of_the_length_mix(tmp_path):
    out = tmp_path / "figures.json"
    done = call("length_mix.py", "--json", str(out))
    assert done.returncode == 0, done.stderr
    rows = json.loads(out.read_text())["packing"]
    assert len(rows) == 6 and "512 sequences fill" in done.stdout
    assert all(
        0 <= have - least <= 1 for row in rows for have, least in zip(row["micro_batches"], row["fewest"], strict=True)
    )
    assert all(row["of_budget"] > 0.97 for row in rows if row["sequences"] >= 512)


@pytest.mark.slow
def test_training_on_a_small_length_mix(tmp_path):
    out = tmp_path / "figures.json"
    options = [
        "--device",
        "cpu",
        "--layers",
        "1",
        "--sequences",
        "4",
        "--longest",
        "80",
        "--budget",
        "96",
        "--steps",
        "1",
    ]
    done = call("length_mix.py", "--train", *options, "--json", str(out), timeout=280)
    assert out.exists(), done.stderr[-3000:]  # the exit code says whether a CPU is as fast on both: not looked at
    mix, even = json.loads(out.read_text())["training"]["rows"]
    assert mix["tokens"] == even["tokens"] and mix["sequences"] == 4
    # one layer of Qwen2.5-1.5B and its head; each sequence of n tokens has n * n / 2 pairs
    weights = 2 * 1536 * 1536 + 2 * 1536 * 256 + 3 * 1536 * 8960 + 1536 * 151936
    flops = 3 * (2 * weights + 4 * 1536 * 40) * even["tokens"]
    assert even["tflops"] == pytest.approx(flops / even["step_s"] / 1e12, abs=0.06)


@pytest.mark.slow
def test_the_log_probability_pass(tmp_path):
    """Small, on the CPU: the figures say the same as their table, and the three heads' log-probabilities agree."""
    out = tmp_path / "figures.json"
    small = ["--layers", "1", "--tokens", "64", "--seq", "16", "--steps", "1", "--matmul", "64", "--vocabulary", "999"]
    done = call("log_probs.py", "--device", "cpu", *small, "--json", str(out), timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    figures = json.loads(out.read_text())
    (row,) = figures["pass"]
    weights = 2 * 1536 * 1536 + 2 * 1536 * 256 + 3 * 1536 * 8960 + 1536 * 999
    flops = (2 * weights + 4 * 1536 * 8) * 128
    assert row["tflops"] == pytest.approx(flops / row["ms"] / 1e9, rel=0.02)
    assert row["share"] == pytest.approx(row["tflops"] / row["matmul_tflops"])
    assert f"| dense, 64 | {row['ms']:.1f} |" in done.stdout and not row["transformer_engine"]
    heads = figures["head"]
    assert set(heads) == {"areal_like", "torch"} and heads["torch"]["difference"] < 1e-4
    ratio = heads["torch"]["both_ms"] / heads["areal_like"]["both_ms"]
    assert f"| torch | {heads['torch']['forward_ms']:.2f} |" in done.stdout and f"| {ratio:.2f} |" in done.stdout
    assert {"date", "machine", "torch", "megatron-core"} <= set(figures)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["dense", "moe"])
def test_a_small_stream_of_weights(tmp_path, model):
    out = tmp_path / "figures.json"
    options = ["--device", "cpu", "--tiny", "--repeat", "1", "--model", model, "--json", str(out)]
    done = call("weights.py", *options, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(out.read_text())
    # float32; 64 wide, 4 heads and 2 of keys and values with 16 numbers each, 1,000 tokens, two layers
    attention = 64 * 64 * 2 + 2 * 64 * 32
    if model == "dense":
        layer, names = attention + 64 + 2 * 32 + 3 * 64 * 96 + 2 * 64, 12
        size, tensors = 1000 * 64 + 64 + 2 * layer, 2 + 2 * names
    else:
        layer, names = attention + 2 * 16 + 4 * 64 + 4 * 3 * 64 * 32 + 2 * 64, 9 + 4 * 3
        size, tensors = 2 * 1000 * 64 + 64 + 2 * layer, 3 + 2 * names
    assert (found["bytes"], found["tensors"], found["differing"]) == (4 * size, tensors, [])
    rows = found["rows"]
    assert list(rows) == ["device", "and views", "tensors", "AReaL", "copy", "host", "host AReaL", "host copy"]
    for name, row in rows.items():
        plain = rows["host copy" if name.startswith("host") else "copy"]
        assert row["share"] == pytest.approx(plain["seconds"] / row["seconds"])
        assert row["gb_s"] == pytest.approx(4 * size / row["seconds"] / 1e9)
        assert f"| {name} | {row['seconds'] * 1e3:.3f} | {row['gb_s']:.1f} | {row['share']:.3f} |" in done.stdout


@pytest.mark.slow
def test_a_small_layer_of_experts(tmp_path):
    out = tmp_path / "figures.json"
    shape = ["--hidden", "64", "--width", "32", "--experts", "8", "--topk", "2", "--tokens", "128", "--repeats", "2"]
    done = call("experts.py", "--device", "cpu", *shape, "--json", str(out), timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    theirs, ours = json.loads(out.read_text())
    assert (theirs["experts"], ours["experts"]) == ("SequentialMLP", "GroupedExperts")
    assert f"128 tokens: {theirs['ms'] / ours['ms']:.2f} times as fast" in done.stdout.splitlines()
    for row in (theirs, ours):
        assert 0 < row["host_ms"] <= row["ms"]
        assert row["tflops"] == pytest.approx(18 * 128 * 2 * 64 * 32 / row["ms"] / 1e9)


def test_a_few_groups_into_the_bank(tmp_path):
    """The exit code says whether a busy disk is as fast: not looked at. Bytes and fsyncs are what they have to be."""
    done = call("bank.py", "--groups", "8", "--folder", str(tmp_path))
    assert done.stderr == "" and not list(tmp_path.iterdir())
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in done.stdout.splitlines() if "|" in line]
    demo = {row[0]: row for row in rows[2:8]}
    assert demo["four files, 4 fsyncs"][3] == "32" and demo["JSON lines"][3] == "8"
    # making a bank: 3 of folders, 2 of the manifest; then 2 a group
    assert int(demo["bank, one by one"][3]) - 16 in range(3, 7)
    assert 2 <= int(demo["bank, in flight"][3]) <= 8 + 4
    assert demo["JSON lines"][6] == "1.00" and float(demo["bank, in flight"][6]) < 0.6
    assert demo["four files, 4 fsyncs"][4] == "1.00"
