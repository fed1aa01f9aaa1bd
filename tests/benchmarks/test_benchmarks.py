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
    done = call("train_step.py", *SMALL, "--json", str(out), "--reference", str(reference), timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    figures = json.loads(out.read_text())["engine"]
    lines = done.stdout.splitlines()
    assert figures == json.loads(lines[0]) and json.loads(lines[1])["tok_s_gpu"] == 1000
    assert f"tokens/s: {figures['tok_s_gpu'] / 1000:.3f} x reference" in lines
    assert figures["micro_batches"] == 2 and figures["tok_s_gpu"] > 0 and figures["step_s"] > 0
    assert not figures["transformer_engine"]
    # one layer of Qwen2.5-1.5B and its head: 3 x (2 x weights + attention) x tokens / time
    weights = 2 * 1536 * 1536 + 2 * 1536 * 256 + 3 * 1536 * 8960 + 1536 * 151936
    flops = 3 * (2 * weights + 4 * 1536 * 8) * 128
    assert figures["tflops_gpu"] == pytest.approx(flops / figures["step_s"] / 1e12, abs=0.06)


@pytest.mark.parametrize("code", ["raise SystemExit('no GPU here')", "print('no GPU here')"])
def test_a_reference_that_fails_is_said(tmp_path, code):
    spec = importlib.util.spec_from_file_location("train_step", BENCHMARKS / "train_step.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    reference = tmp_path / "reference.py"
    reference.write_text(code)
    options = argparse.Namespace(reference=reference, model="dense", tokens=64, seq=16, micro=2, steps=1, layers=1)
    with pytest.raises(SystemExit, match=r"(?s)the reference failed.*no GPU here"):
        module.run_reference(options)
