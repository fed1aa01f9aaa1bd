"""The benchmarks of the CPU: at a small size, and what they make of known figures."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def load(name):
    spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
@pytest.mark.parametrize("model", ["qwen3", "qwen3-moe"])
def test_both_sides_agree_at_a_small_size(tmp_path, model):
    """The benchmark itself refuses to compare what differs in loss or gradient norm."""
    out = tmp_path / "figures.json"
    command = [sys.executable, str(BENCHMARKS / "cpu.py"), "--models", model, "--layers", "1", "--tokens", "96"]
    command += ["--mixes", "mixed", "groups", "--repeats", "1", "--json", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env={**os.environ})
    assert done.returncode in (0, 1), done.stderr[-3000:]
    found = json.loads(out.read_text())
    sides = {(r["mix"], r["engine"]) for r in found}
    shared = {("groups", "engine, shared")} if model == "qwen3" else set()
    assert sides == {("mixed", "engine"), ("groups", "engine")} | shared
    assert {r["measure"] for r in found} == {"forward+backward", "log-probabilities"}
    assert len(found) == 2 * len(sides) and all(r["ratio"] > 0 for r in found)
    held = all(r["ratio"] >= 0.9 for r in found)
    assert done.returncode == (not held) and done.stdout.splitlines()[-1] == ("held" if held else "not held")


def test_groups_share_their_prompt():
    cpu = load("cpu")
    batch = cpu.make_batch("groups", 1000, 500)
    sequences = batch.split_tokens(batch.input_ids)
    assert sum(map(len, sequences)) >= 500 and len(sequences) > 8
    for place, ids in enumerate(sequences):
        first = sequences[place - place % 8]
        assert ids[:46].equal(first[:46]) and 48 <= len(ids) <= 62
    assert not sequences[0][:46].equal(sequences[8][:46])


def test_the_fastest_way_of_transformers_counts():
    """By hand: medians 2 and 3 of Transformers, 4 of the engine; turns 2/4, 2/5, 4/4."""
    cpu = load("cpu")
    seconds = {"engine": [4, 5, 4], "padded": [2, 2, 4], "packed": [3, 3, 3]}
    found = cpu.compare({name: [cpu.Seconds(s, 2 * s) for s in row] for name, row in seconds.items()}, "engine")
    assert found["way"] == "padded" and (found["engine_s"], found["theirs_s"]) == (4, 2)
    assert (found["ratio"], found["lowest"], found["highest"]) == (0.5, 0.4, 1.0) and found["wall_ratio"] == 0.5


def test_what_differs_is_not_compared():
    cpu = load("cpu")
    one, other = (
        cpu.Way(train=lambda: 1.0, read=lambda: -cpu.torch.ones(2), norm=lambda norm=norm: norm) for norm in (1.0, 1.1)
    )
    cpu.agree({"engine": one, "padded": one}, "padded", "float32")
    with pytest.raises(SystemExit, match=r"engine computes .*1\.1"):
        cpu.agree({"engine": other, "padded": one}, "padded", "float32")


def test_shares_of_the_phases():
    demo = load("demo")
    steps = [
        {"seconds/generation": 1.0, "seconds/update": 4.0, "seconds/step": 6.0},
        {"seconds/generation": 3.0, "seconds/update": 2.0, "seconds/step": 6.0},
        {"seconds/generation": 2.0, "seconds/update": 3.0, "seconds/step": 5.5},
    ]
    found = demo.seconds_of_phases(steps)
    assert found == {"generation": 2.0, "update": 3.0, "step": 6.0, "others": 1.0}
    lines = demo.table({"new": found, "old": {"generation": 2.0, "update": 9.0, "step": 12.0, "others": 1.0}})
    assert lines[0] == "| phase | new: s | share | old: s | share | x |"
    assert "| update | 3.00 | 50% | 9.00 | 75% | 3.00 |" in lines


def test_a_run_that_fails_is_said(tmp_path):
    demo = load("demo")
    with pytest.raises(SystemExit, match=r"(?s)the run failed \(\d+\).*no-such-file"):
        demo.run(str(tmp_path / "no-such-file.yaml"), 2, [])
