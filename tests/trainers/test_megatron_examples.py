"""The example files of the Megatron engine on tiny models, with fewer ranks, on this machine's CPU."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import toy_engines

from areal_like.config import load_config
from areal_like.trainers.rl import RLTrainer

EXAMPLES = Path(__file__).parents[2] / "examples" / "math"


@pytest.mark.slow
@pytest.mark.parametrize(
    "backend", ["megatron:(attn:d1t2|ffn:e2)", "megatron:(attn:d1p2t2c2|ffn:d1p2t1e4)"], ids=["2 ranks", "8 ranks"]
)
def test_the_mixture_of_experts_trains(tiny_moe, rows, tmp_path, backend):
    """Two steps of the whole loop; the auxiliary losses are reported, and training agrees with generation."""
    overrides = (
        *toy_engines.SMALL_RUN,
        f"actor.backend={backend}",
        f"actor.path={tiny_moe}",
        f"cluster.fileroot={tmp_path}",
    )
    config = load_config(EXAMPLES / "gsm8k_grpo_megatron_moe.yaml", overrides)
    with RLTrainer(config, rows, toy_engines.share_of_b) as trainer:
        trainer.train()
    steps = [json.loads(line) for line in (trainer.job.folder / "metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == [1, 2]
    for step in steps:
        assert step["actor/updated"] == 1 and math.isfinite(step["actor/grad_norm"])
        assert 0.9 < step["actor/moe/load_balancing_loss"] < 8, "1 is balance, 8 / 2 is all tokens at two experts"
        assert step["actor/moe/z_loss"] > 0 and step["actor/moe/busiest_expert"] >= 1
        assert step["rollout/log_prob_difference_max"] < 1e-3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "backend"),
    [
        ("gsm8k_grpo_megatron.yaml", "megatron:p2"),
        ("gsm8k_grpo_megatron.yaml", "megatron:c2"),
        ("gsm8k_grpo_megatron_fp8.yaml", "megatron:t2"),
    ],
)
def test_the_dense_example_trains(tiny_model, rows, tmp_path, file, backend):
    """(FP8 itself needs a GPU: without it the rest of that file has to run.)"""
    overrides = (
        *toy_engines.SMALL_RUN,
        f"actor.backend={backend}",
        f"actor.path={tiny_model}",
        f"cluster.fileroot={tmp_path}",
    )
    config = load_config(EXAMPLES / file, (*overrides, "actor.megatron.fp8_config=null"))
    with RLTrainer(config, rows, toy_engines.share_of_b) as trainer:
        trainer.train()
    steps = [json.loads(line) for line in (trainer.job.folder / "metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == [1, 2]
    assert all(step["actor/updated"] == 1 and step["rollout/log_prob_difference_max"] < 1e-3 for step in steps)
