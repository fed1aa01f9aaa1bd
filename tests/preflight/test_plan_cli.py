"""`areal-like plan` as a user calls it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from areal_like.alloc import ModelAllocation
from areal_like.cli import main
from areal_like.cli import plan as command
from areal_like.config import load_config
from areal_like.preflight import check
from areal_like.preflight.hardware import Hardware
from areal_like.preflight.planner import Request, plan
from areal_like.spec import ModelSpec

EXAMPLE = Path(__file__).parents[2] / "examples" / "math" / "gsm8k_grpo_megatron.yaml"
JOB = ["--gpus", "16", "--gpu-memory", "80GiB", "--seq", "32768", "--batch", "256"]


@pytest.fixture
def call(capsys):
    def run(*arguments: str) -> tuple[int, str, str]:
        status = main(["plan", *arguments])
        output = capsys.readouterr()
        return status, output.out, output.err

    return run


def test_the_table(call):
    status, out, err = call("--model", "Qwen/Qwen3-30B-A3B", *JOB)
    assert status == 0 and err == ""
    title, _, header, *rows = out.splitlines()
    assert title.startswith("Qwen/Qwen3-30B-A3B on 16 H100 (80.0 GiB, 8 a node): 256 sequences of 32768 tokens")
    for word in ("backend", "step s", "compute %", "bubble %", "tensor %", "experts %", "peak GiB", "free GiB"):
        assert word in header
    assert len(rows) == 10 and [row.split()[0] for row in rows] == [str(n) for n in range(1, 11)]
    for row in rows:
        assert ModelAllocation.parse(row.split()[1]).world_size == 16


def test_a_name_without_its_organisation(call):
    assert call("--model", "Qwen3-30B-A3B", *JOB) == call("--model", "Qwen/Qwen3-30B-A3B", *JOB)


def test_json(call):
    status, out, _ = call("--model", "Qwen3-30B-A3B", *JOB, "--json", "--top", "3")
    plans = json.loads(out)
    assert status == 0 and len(plans) == 3
    for found in plans:
        assert sum(found["share"].values()) == pytest.approx(1.0)
        assert found["peak_gib"] + found["headroom_gib"] == pytest.approx(80.0)
        assert found["seconds"] == found["training_seconds"] and found["rollout"] is None
    assert [p["seconds"] for p in plans] == sorted(p["seconds"] for p in plans)


@pytest.mark.parametrize("rollout", ["sglang", "vllm", "huggingface", None])
def test_the_yaml_loads(call, rollout):
    more = [] if rollout is None else ["--rollout", rollout]
    model = ["--model", "Qwen/Qwen2.5-1.5B", "--gpus", "8", "--seq", "4096", "--batch", "64"]
    status, out, _ = call(*model, "--yaml", *more)
    assert status == 0
    block = yaml.safe_load(out)
    config = load_config(EXAMPLE, [f"{key}={json.dumps(value)}" for key, value in block.items()])
    best = json.loads(call(*model, "--json", "--top", "1", *more)[1])[0]
    assert config.actor.backend == best["backend"] and config.actor.path == "Qwen/Qwen2.5-1.5B"
    assert config.actor.mb_spec.max_tokens_per_mb == best["micro_tokens"]
    assert config.actor.gradient_checkpointing == best["recompute"]
    assert config.cluster.n_gpus_per_node == 8
    if rollout is not None:
        assert config.rollout.backend == best["rollout"]
        worlds = [ModelAllocation.parse(text).world_size for text in (config.actor.backend, config.rollout.backend)]
        assert sum(worlds) == 8


def test_the_check_finds_no_error_in_a_plan(call):
    model = ["--model", "Qwen/Qwen2.5-1.5B", "--gpus", "8", "--seq", "4096", "--batch", "64"]
    block = yaml.safe_load(call(*model, "--yaml", "--rollout", "huggingface", "--gpu-memory", "80GiB")[1])
    overrides = [f"{key}={json.dumps(value)}" for key, value in block.items()]
    found = check(load_config(EXAMPLE, [*overrides, "gconfig.max_new_tokens=3072"]))
    assert [d.render() for d in found if d.severity == "error"] == []


def test_the_yaml_of_a_folded_layout_loads():
    """Colons, brackets and bars in a string."""
    asked = Request(ModelSpec.find("Qwen3-30B-A3B"), 16, Hardware.find("H200"), 64, 8192)
    folded = ModelAllocation.parse("megatron:(attn:d4t2p2|ffn:t2e4)")
    best = replace(plan(asked, top=1)[0], allocation=folded)
    block = yaml.safe_load(command._yaml(best, asked, "Qwen/Qwen3-30B-A3B"))
    config = load_config(EXAMPLE, [f"{key}={json.dumps(value)}" for key, value in block.items()])
    assert ModelAllocation.parse(config.actor.backend) == folded


def test_numbers_of_the_machine_can_be_given(call):
    model = ["--model", "Qwen3-30B-A3B", "--gpus", "16", "--seq", "8192", "--batch", "64", "--json", "--top", "1"]

    def seconds(*more: str) -> float:
        return json.loads(call(*model, "--gpu", "H200", *more)[1])[0]["seconds"]

    assert seconds("--tflops", "2000") < seconds()
    assert seconds("--nvlink", "50") > seconds()
    assert seconds("--network", "5") >= seconds()
    assert seconds("--gpus-per-node", "1") > seconds()


def test_a_gpu_that_is_not_known(call):
    assert call("--model", "Qwen3-30B-A3B", *JOB, "--gpu", "V100")[0] == 2
    assert "unknown GPU 'V100'" in call("--model", "Qwen3-30B-A3B", *JOB, "--gpu", "V100")[2]


def test_a_model_that_is_not_known(call):
    status, out, err = call("--model", "Qwen3-30B-A4B", *JOB)
    assert status == 2 and out == "" and "Qwen/Qwen3-30B-A3B" in err


def test_a_sequence_longer_than_the_budget(call):
    status, _, err = call("--model", "Qwen3-30B-A3B", *JOB, "--micro-tokens", "1000")
    assert status == 2 and "does not fit into a micro-batch of 1000" in err


def test_nothing_fits(call):
    status, out, err = call("--model", "Qwen3-30B-A3B", "--gpus", "2", "--seq", "4096", "--batch", "8")
    assert status == 1 and out == "" and "nothing fits" in err


def test_a_model_for_another_engine(call):
    job = ["--model", "Kimi-K2-Base", "--gpus", "512", "--gpu", "H200", "--seq", "8192", "--batch", "512"]
    status, out, err = call(*job)
    assert status == 1 and out == "" and "no layout is legal: architecture" in err and "--engine any" in err
    assert call(*job, "--engine", "any")[0] == 0
