"""The loop with the real engines: Megatron-Core trains, Transformers generates, on a tiny random model."""

from __future__ import annotations

import json

import pytest
import torch
import toy_engines
from transformers import AutoModelForCausalLM, AutoTokenizer

from areal_like.trainers.rl import RLTrainer

ON_REAL_ENGINES = ("actor.optimizer.lr=1e-2", "actor.optimizer.weight_decay=0.0", "gconfig.n_samples=8")


def run(config, rows):
    with RLTrainer(config, rows, toy_engines.share_of_b) as trainer:
        trainer.train()
    return [json.loads(line) for line in (trainer.job.folder / "metrics.jsonl").read_text().splitlines()]


def test_the_reward_rises_and_another_layout_takes_the_same_first_step(configure, rows, tmp_path):
    steps = run(configure(*ON_REAL_ENGINES, "saver.freq_epochs=1"), rows)
    rewards = [s["reward/mean"] for s in steps]
    assert sum(rewards[-2:]) / 2 > rewards[0] + 0.3
    # on-policy: what Megatron computes is what Transformers drew with, whatever the weights have become
    assert all(s["rollout/log_prob_difference_max"] < 1e-3 for s in steps)

    other = configure(*ON_REAL_ENGINES, "total_train_steps=1", "trial_name=d2", "actor.backend=megatron:d2")
    first = run(other, rows)[0]
    assert first["reward/mean"] == rewards[0]
    for name in ("actor/loss", "actor/grad_norm"):
        assert first[name] == pytest.approx(steps[0][name], rel=1e-4, abs=1e-7)

    folder = tmp_path / "runs" / "toy" / "t" / "checkpoints" / "step-000008"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.encode("b c") == [1, 2]
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(folder)(**tokenizer("c d", return_tensors="pt")).logits
    assert float(logits[0, -1].softmax(0)[1]) > 0.3  # the letter b has become likely
