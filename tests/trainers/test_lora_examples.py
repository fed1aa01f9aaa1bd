"""The example files with adapters: checked as they are, and run on tiny models on this machine's CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import toy_engines
from safetensors import safe_open

from areal_like.config import load_config
from areal_like.preflight import check
from areal_like.trainers.rl import RLTrainer

EXAMPLES = Path(__file__).parents[2] / "examples" / "math"
DENSE, MOE = "gsm8k_grpo_megatron_lora.yaml", "gsm8k_grpo_megatron_lora_moe.yaml"
ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}


@pytest.mark.parametrize("file", [DENSE, MOE])
def test_the_check_finds_no_fault(file):
    config = load_config(EXAMPLES / file, ())
    config.ensure_runnable()
    assert [d.render() for d in check(config) if d.severity != "info"] == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "model", "backend", "layers"),
    [
        (
            DENSE,
            "tiny_model",
            "megatron:d2",
            {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"},
        ),
        (MOE, "tiny_moe", "megatron:(attn:t2|ffn:e2)", ATTENTION),
    ],
)
def test_the_example_trains(request, rows, tmp_path, file, model, backend, layers):
    """Two steps of the whole loop; training agrees with generation, and both folders are there."""
    folder = request.getfixturevalue(model)
    overrides = (
        *toy_engines.SMALL_RUN,
        "saver.freq_steps=2",
        f"actor.backend={backend}",
        f"actor.path={folder}",
        f"cluster.fileroot={tmp_path}",
    )
    config = load_config(EXAMPLES / file, overrides)
    with RLTrainer(config, rows, toy_engines.share_of_b) as trainer:
        trainer.train()
    run = trainer.job.folder
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == [1, 2]
    assert all(step["actor/grad_norm"] > 0 and step["rollout/log_prob_difference_max"] < 1e-3 for step in steps)
    with safe_open(run / "adapters" / "step-000002" / "adapter_model.safetensors", "pt") as file:
        assert {name.split(".lora_")[0].rsplit(".", 1)[1] for name in file.keys()} == layers  # noqa: SIM118
    assert (run / "checkpoints" / "step-000002" / "model.safetensors").is_file()
