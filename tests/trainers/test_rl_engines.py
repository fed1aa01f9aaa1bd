"""The loop with the real engines: Megatron-Core trains, Transformers generates, on a tiny random model."""

from __future__ import annotations

import gzip
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


@pytest.mark.slow
def test_offload_and_profiler_change_nothing_but_time(configure, rows, tmp_path):
    """A run whose models leave the device between uses, recorded: step for step the figures of one without."""
    common = (*ON_REAL_ENGINES, "total_train_steps=3", "actor.kl_ctl=0.01", "ref={}", "saver.freq_steps=1")
    plain = run(configure(*common), rows)
    switches = ("enable_offload=true", "trial_name=away", "actor.profiler={step_start: 2, step_end: 2}")
    away = run(configure(*common, *switches, "ref.profiler={step_start: 3, step_end: 3}"), rows)
    timing = ("time", "speed", "seconds")
    for one, other in zip(plain, away, strict=True):
        assert {k: v for k, v in one.items() if not any(t in k for t in timing)} == {
            k: v for k, v in other.items() if not any(t in k for t in timing)
        }
    folder = tmp_path / "runs" / "toy" / "away"
    names = trace_names(folder / "profile" / "actor" / "rank0-steps2-2.json.gz")
    expected = ["forward", "onload", "train_batch, step 2", "offload", "onload", "weights"]
    assert [n for n in names if n.split(",")[0] in set(expected) | {"train_batch"}] == expected
    assert "forward, step 3" in trace_names(folder / "profile" / "ref" / "rank0-steps3-3.json.gz")
    assert "each used once" in (folder / "logs" / "actor-0.log").read_text()


def trace_names(path):
    """Named ranges in order of their beginning."""
    with gzip.open(path, "rt") as file:
        events = json.load(file)["traceEvents"]
    found = [e for e in events if e.get("cat") == "user_annotation"]
    return [e["name"] for e in sorted(found, key=lambda e: e["ts"])]
