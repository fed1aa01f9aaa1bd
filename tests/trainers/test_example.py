"""examples/math/gsm8k_rl.py as its users call it: faults are said in a few lines, without a traceback or a process."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples" / "math"


@pytest.fixture
def example(monkeypatch, capsys, tmp_path):
    spec = importlib.util.spec_from_file_location("gsm8k_rl", EXAMPLES / "gsm8k_rl.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(subprocess, "Popen", lambda *a, **k: pytest.fail("a process was started"))

    def call(*overrides: str, file: str = "gsm8k_grpo_cpu.yaml"):
        config = str(EXAMPLES / file)
        monkeypatch.setattr(
            sys, "argv", ["gsm8k_rl.py", "--config", config, f"cluster.fileroot={tmp_path}", *overrides]
        )
        return module.main(), capsys.readouterr().err

    return call


def test_a_layout_that_does_not_fit_the_model(example):
    status, errors = example("actor.backend=megatron:d1t2")
    assert status == 2
    assert "9" in errors and "actor.backend" in errors and "Traceback" not in errors


def test_a_row_without_an_answer(example, tmp_path):
    rows = [{"question": "1 + 1?", "answer": "2"}, {"question": "2 + 2?"}]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    status, errors = example(f"train_dataset.path={tmp_path}/train.jsonl", file="gsm8k_grpo_gpu.yaml")
    assert status == 2
    assert "train.jsonl, row 2: the column 'answer' is missing" in errors and "Traceback" not in errors


def test_a_missing_model(example):
    status, errors = example("actor.path=/nowhere/model")
    assert status == 2
    assert "/nowhere/model" in errors and "actor.path" in errors


def test_several_faults_of_the_file_at_once(example):
    status, errors = example("actor.ppo_n_minibatchs=2", "rollout.backend=megatron:d1")
    assert status == 2
    assert "ppo_n_minibatches" in errors and "rollout.backend" in errors


@pytest.mark.slow
@pytest.mark.parametrize(
    "file", ["gsm8k_grpo_cpu.yaml", "gsm8k_grpo_cpu_ahead.yaml", "gsm8k_grpo_cpu_environments.yaml"]
)
def test_the_files_for_a_laptop_take_two_steps(tmp_path, file):
    small = ["total_train_steps=2", "gconfig.n_samples=2", "train_dataset.batch_size=4", f"cluster.fileroot={tmp_path}"]
    if "environments" in file:
        small.append("evaluator={freq_steps: 2, prompts_per_environment: 2}")
    command = [sys.executable, str(EXAMPLES / "gsm8k_rl.py"), "--config", str(EXAMPLES / file), *small]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, cwd=EXAMPLES.parents[1])
    assert done.returncode == 0, done.stderr
    (lines,) = tmp_path.glob("gsm8k-grpo/*/metrics.jsonl")
    steps = [json.loads(line) for line in lines.read_text().splitlines()]
    assert [step["step"] for step in steps] == [1, 2]
    assert ("evaluation/problems" in steps[1]) == ("environments" in file)
