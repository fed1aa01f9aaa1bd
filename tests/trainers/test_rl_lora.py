"""The loop with adapters: Megatron-Core trains them, and the rollout engine takes them alone or merged."""

from __future__ import annotations

import json

import peft
import pytest
import torch
import toy_engines
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from areal_like.trainers.rl import RLTrainer

FILE = "model.safetensors"
ADAPTERS = (
    "actor.use_lora=true",
    "actor.lora_rank=8",
    "actor.lora_alpha=16",
    "actor.megatron.bridge_type=megatron-bridge",
    "actor.optimizer.lr=3e-2",
    "actor.optimizer.weight_decay=0.0",
    "gconfig.n_samples=8",
)


def run(config, rows):
    with RLTrainer(config, rows, toy_engines.share_of_b) as trainer:
        trainer.train()
    return [json.loads(line) for line in (trainer.job.folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_adapters_alone_reach_the_rollout_engine(configure, rows, tiny_model, tmp_path):
    steps = run(configure(*ADAPTERS, "rollout.use_lora=true", "saver.freq_epochs=1"), rows)
    rewards = [s["reward/mean"] for s in steps]
    assert sum(rewards[-3:]) / 3 > rewards[0] + 0.03
    # on-policy: the rollout engine draws with what the actor has become
    assert all(s["rollout/log_prob_difference_max"] < 1e-3 for s in steps)

    saved = tmp_path / "runs" / "toy" / "t"
    base = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    model = peft.PeftModel.from_pretrained(base, saved / "adapters" / "step-000008").merge_and_unload()
    model.save_pretrained(tmp_path / "merged")
    merged = load_file(saved / "checkpoints" / "step-000008" / FILE)
    for name, theirs in load_file(tmp_path / "merged" / FILE).items():
        assert (merged[name] - theirs).abs().max() < 1e-5, name
    assert (
        max(float((merged[name] - theirs).abs().max()) for name, theirs in load_file(tiny_model / FILE).items()) > 0.02
    )


@pytest.mark.slow
def test_merged_weights_reach_a_rollout_engine_without_adapters(configure, rows):
    steps = run(configure(*ADAPTERS, "total_train_steps=3", "actor.init_from_scratch=true"), rows)
    assert all(s["rollout/log_prob_difference_max"] < 1e-3 for s in steps)
    other = run(
        configure(
            *ADAPTERS,
            "total_train_steps=3",
            "actor.init_from_scratch=true",
            "rollout.use_lora=true",
            "trial_name=adapters",
        ),
        rows,
    )
    for merged, alone in zip(steps, other, strict=True):
        assert merged["reward/mean"] == pytest.approx(alone["reward/mean"], abs=1e-6)
        assert merged["actor/grad_norm"] == pytest.approx(alone["actor/grad_norm"], rel=1e-3)
