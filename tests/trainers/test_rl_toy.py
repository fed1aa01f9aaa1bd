"""The whole loop over real processes with toy engines: it learns, in the right order, and fails clearly."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import toy_engines

from areal_like.alloc import DiagnosticError
from areal_like.rollout.pipeline import EpisodesFailedError
from areal_like.runtime.local import WorkerError
from areal_like.trainers.rl import RLTrainer

HERE = str(Path(__file__).parent)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def run(config, rows, reward=toy_engines.share_of_b, valid_rows=None):
    with RLTrainer(config, rows, reward, valid_rows) as trainer:
        trainer.train()
        pids = trainer._engines.actor.workers.process_ids + trainer._engines.rollout.process_ids
    assert not any(map(alive, pids))
    lines = (trainer.job.folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_it_learns_saves_and_evaluates_whatever_the_layout(toy_backends, configure, rows, tmp_path):
    config = configure(
        "saver.freq_steps=3",
        "evaluator.freq_steps=5",
        "valid_dataset.path=reasoning_gym/chain_sum",
        "valid_dataset.batch_size=3",
        "eval_gconfig={greedy: true, max_new_tokens: 8}",
    )
    steps = run(config, rows, valid_rows=rows[:7])
    assert [s["step"] for s in steps] == list(range(1, 9))  # 64 rows, 8 a step, one epoch
    rewards = [s["reward/mean"] for s in steps]
    assert rewards[0] < 0.35 and sum(rewards[-3:]) / 3 > rewards[0] + 0.4
    # on-policy: nothing is older than its update, and before it the trainer's log-probabilities are the rollout's
    assert all(s["rollout/lag_max"] == 0 for s in steps)
    assert all(s["rollout/log_prob_difference_max"] < 1e-5 for s in steps)
    assert all(s["actor/importance_weight"] == pytest.approx(1.0, abs=1e-5) for s in steps)
    folder = tmp_path / "runs" / "toy" / "t"
    assert sorted(p.name for p in (folder / "checkpoints").iterdir()) == ["step-000003", "step-000006", "step-000008"]
    assert [s["step"] for s in steps if "evaluation/reward_mean" in s] == [5, 8]
    assert steps[7]["evaluation/problems"] == 7 and steps[7]["evaluation/reward_mean"] == 1.0

    other = configure(
        "trial_name=d2",
        "total_train_steps=3",
        "actor.backend=megatron:d2",
        "actor.kl_ctl=1e-9",
        "ref.backend=megatron:d1",
    )
    for a, b in zip(steps, run(other, rows), strict=False):
        assert a["reward/mean"] == b["reward/mean"]
        assert a["actor/loss"] == pytest.approx(b["actor/loss"], abs=1e-6)
        assert a["actor/grad_norm"] == pytest.approx(b["actor/grad_norm"], rel=1e-4)
    assert (tmp_path / "runs" / "toy" / "d2" / "logs" / "ref-0.log").exists()


def test_running_ahead_records_older_versions_and_still_learns(toy_backends, configure, rows):
    ahead = ("rollout.max_head_offpolicyness=2", "rollout.max_concurrent_rollouts=16")
    steps = run(configure("total_train_epochs=3", "actor.ppo_n_minibatches=2", *ahead), rows)
    lags = [s["rollout/lag_max"] for s in steps]
    assert lags[0] == 0 and 1 <= max(lags) <= 2
    assert sum(s["reward/mean"] for s in steps[-3:]) / 3 > steps[0]["reward/mean"] + 0.2


@pytest.mark.slow
def test_models_are_on_their_devices_only_while_they_work(toy_backends, configure, rows):
    """The order of uses and moves of one step; a call without what it needs would raise."""
    changes = ("actor.kl_ctl=0.1", "ref={}", "actor.recompute_logprob=true", "saver.freq_steps=1")
    moves = {}
    switches = "{param_offload: true, optimizer_offload: true}"
    for name, offload in (
        ("none", ()),
        ("all", ("enable_offload=true",)),
        ("some", (f"actor.megatron={switches}",)),
        ("ref", ("ref.megatron.param_offload=true",)),
    ):
        config = configure("total_train_steps=1", "actor.ppo_n_minibatches=2", f"trial_name={name}", *changes, *offload)
        with RLTrainer(config, rows, toy_engines.share_of_b) as trainer:
            trainer.train()
            engines = trainer._engines
            (actor,) = engines.actor.workers.call("history")
            (reference,) = engines.reference.workers.call("history")
        moves[name] = (" ".join(actor), " ".join(reference))
    assert moves["none"] == ("forward train train weights save", "forward")
    assert moves["all"] == ("-pgo +p forward +pgo train train -go +p weights +p save -pgo", "-p +p forward -p")
    assert moves["some"] == ("-po +p forward +po train train -o +p weights +p save -po", "forward")
    assert moves["ref"] == ("forward train train weights save", "-p +p forward -p")


def test_a_worker_that_dies_in_the_middle_of_a_step(toy_backends, configure, rows):
    toy_backends("DyingTrain")
    trainer = RLTrainer(configure("actor.backend=megatron:d2"), rows, toy_engines.share_of_b)
    started = time.monotonic()
    message = r"actor rank 1, train_batch: the process was killed by SIGKILL"
    with pytest.raises(WorkerError, match=message) as caught, trainer:
        trainer.train()
    assert "the machine is on fire" in str(caught.value)
    assert time.monotonic() - started < 120, "an error, not a time-out"
    pids = trainer._engines.actor.workers.process_ids + trainer._engines.rollout.process_ids
    assert not any(map(alive, pids))


def test_a_reward_that_raises_stops_the_run(toy_backends, configure, rows):
    trainer = RLTrainer(configure(), rows, toy_engines.raising_reward)
    with pytest.raises(EpisodesFailedError, match=r"raising_reward of row \d+ of toy raised LookupError"), trainer:
        trainer.train()


def test_faults_are_found_before_any_process_starts(configure, rows, monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", lambda *a, **k: pytest.fail("a process was started"))
    with pytest.raises(DiagnosticError, match="4 attention heads"):
        RLTrainer(configure("actor.backend=megatron:d1t3"), rows, toy_engines.share_of_b)
    with pytest.raises(DiagnosticError, match="batch_size is 100 but there are 64 rows"):
        RLTrainer(configure("train_dataset.batch_size=100"), rows, toy_engines.share_of_b)
    with pytest.raises(DiagnosticError, match="all 64 prompts are longer than max_length 1"):
        RLTrainer(configure("train_dataset.max_length=1"), rows, toy_engines.share_of_b)


SCRIPT = """
    import sys
    from dataclasses import replace
    sys.path.insert(0, {here!r})
    from areal_like.alloc import get_backend
    from areal_like.config import load_config
    from areal_like.data.rows import Row
    from areal_like.trainers import roles, startup
    from areal_like.trainers.rl import RLTrainer

    def slow(prompt, completion, row):
        import time
        time.sleep(0.02)
        return float(len(completion))

    if __name__ == "__main__":
        engines = {{"megatron": "toy_engines:ToyTrain", "huggingface": "toy_engines:ToyInference"}}
        for module in (roles, startup):
            module.get_backend = lambda name: replace(get_backend(name), engine=engines[name])
        rows = [Row("c d", "b", index=i) for i in range(64)]
        with RLTrainer(load_config({path!r}), rows, slow) as trainer:
            trainer.train()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGKILL, marks=pytest.mark.slow)])
def test_an_interrupted_run_ends_at_once_and_leaves_no_process(configure, tmp_path, number):
    configure()
    script = tmp_path / "script.py"  # its reward function is in __main__
    script.write_text(textwrap.dedent(SCRIPT.format(here=HERE, path=str(tmp_path / "run.yaml"))))
    process = subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell lets what it starts in the background ignore Ctrl-C, and so would this child of the tests.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    metrics = tmp_path / "runs" / "toy" / "t" / "metrics.jsonl"
    deadline = time.monotonic() + 60
    while not (metrics.exists() and metrics.read_text()) and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.1)
    children = [int(p) for p in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]
    tasks = Path(f"/proc/{process.pid}/task").iterdir()
    children += [int(p) for task in tasks for p in (task / "children").read_text().split()]
    assert len(set(children)) == 3  # actor, rollout, reward
    os.kill(process.pid, number)
    _, errors = process.communicate(timeout=10)
    assert process.returncode in (-number, 130, 1), errors
    time.sleep(0.3)
    assert not any(map(alive, children))
