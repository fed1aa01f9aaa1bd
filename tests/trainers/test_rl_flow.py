"""The loop ahead of itself: modes, environments, the bank; over real processes with toy engines."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections import Counter
from pathlib import Path

import pytest
import toy_engines
from test_recovery import RECOVER, Run, figures

from areal_like.alloc import DiagnosticError
from areal_like.data.rows import Row
from areal_like.rollout.agents.base import GroupedRolloutGenerator
from areal_like.rollout.agents.environment_file import Environments
from areal_like.rollout.agents.workflow import WorkflowAgent
from areal_like.rollout.bank import BankReader
from areal_like.rollout.pipeline import EpisodesFailedError
from areal_like.trainers.rl import RLTrainer

AHEAD = ("rollout.submission_granularity=R", "rollout.consumption_granularity=G", "rollout.generation_lag=1")


def read(folder: Path, name: str) -> list[dict]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def train(config, rows=None, reward=None) -> list[dict]:
    with RLTrainer(config, rows, reward) as trainer:
        trainer.train()
    return read(trainer.job.folder, "metrics.jsonl")


def trained(folder: Path, samples: int = 4) -> list[int]:
    """Numbers of the problems that were trained on, once for each group."""
    counts = Counter((line["step"], line["group"]) for line in read(folder, "samples.jsonl"))
    assert set(counts.values()) == {samples}
    return [group for _, group in sorted(counts)]


@pytest.mark.parametrize("at_update", ["interrupt", "finish"])
def test_rollouts_in_groups_out(toy_backends, configure, rows, tmp_path, capsys, at_update):
    changes = ("total_train_epochs=3", "rollout.dump_to_file=true", f"rollout.requests_at_update={at_update}")
    steps = train(configure(*AHEAD, *changes), rows, toy_engines.share_of_b)
    assert "generation R/G: 64 rollouts in flight" in capsys.readouterr().out.replace("\n", " ")
    assert steps[0]["rollout/lag_max"] == 0 and max(s["rollout/lag_max"] for s in steps) >= 1
    assert sum(s["reward/mean"] for s in steps[-3:]) / 3 > steps[0]["reward/mean"] + 0.2
    assert all(0 <= s["flow/utilisation"] <= 1 for s in steps)
    assert all(s["flow/waiting_groups"] <= 16 + 16 for s in steps)  # queue_size, and what was open when it was reached
    assert len(set(trained(tmp_path / "runs" / "toy" / "t"))) == 24 * 8


def test_equal_rewards_are_replaced_until_there_is_nothing_else(toy_backends, configure, rows):
    """The policy learns to answer b alone; then every group has the same reward."""
    changes = ("total_train_epochs=30", "rollout.filter_groups_with_same_reward=true", "actor.optimizer.lr=40.0")
    with pytest.raises(EpisodesFailedError, match="groups in a row were dropped"):
        train(configure(*changes), rows, toy_engines.share_of_b)


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_replica_that_is_killed_comes_back(toy_backends, configure, rows, replicas):
    """With its weights at once, where they are kept; with the next update, where another replica goes on."""
    keep = f"rollout.keep_weights={str(replicas == 1).lower()}"
    backend = f"rollout.backend=huggingface:d{replicas}"
    config = configure(backend, keep, "rollout.generation_lag=1", "total_train_epochs=4")
    with RLTrainer(config, rows, toy_engines.share_of_b) as trainer:
        killed = []

        def kill() -> None:
            lines = trainer.job.folder / "metrics.jsonl"
            while not (lines.exists() and lines.read_text()):
                time.sleep(0.005)
            killed.append(trainer._engines.rollout.process_ids[-1])
            os.kill(killed[0], signal.SIGKILL)

        thread = threading.Thread(target=kill)
        thread.start()
        trainer.train()
        thread.join()
        assert trainer._generation._model.replicas.restarted == 1
        assert killed[0] not in trainer._engines.rollout.process_ids
    assert len(read(trainer.job.folder, "metrics.jsonl")) == 32


ENVIRONMENTS = """
- {name: sums, agent_type: reasoning_gym, agent_args: {task: chain_sum}, weight: 3}
- {name: tool, agent_type: calculator, agent_args: {max_turns: 2}, weight: 1}
- {name: measured, agent_type: reasoning_gym, agent_args: {task: chain_sum}, evaluation_only: true}
"""


def test_environments_of_a_file(toy_backends, configure, tmp_path):
    """The policy of letters knows no sums: what counts is who was asked how often, and what was measured."""
    (tmp_path / "environments.yaml").write_text(ENVIRONMENTS)
    changes = [
        f"rollout.environments={tmp_path / 'environments.yaml'}",
        "train_dataset={path: null, batch_size: 4}",
        "total_train_steps=2",
        "evaluator.freq_steps=1",
        "rollout.dump_to_file=true",
        "eval_gconfig={n_samples: 2, max_new_tokens: 4}",
    ]
    with RLTrainer(configure(*changes)) as trainer:
        trainer.train()
        assert [(agent.name, groups) for agent, groups in trainer.job.environments] == [("sums", 3), ("tool", 1)]
        state = trainer._state(2, trainer._generation)
    assert state.environments == {
        "sums": {"position": 6, "settled": []},
        "tool": {"position": 2, "settled": []},
    }
    for step in read(trainer.job.folder, "metrics.jsonl"):
        assert step["reward/sums"] == step["reward/tool"] == 0.0
        assert step["evaluation/problems"] == 32 and step["evaluation/attempts"] == 64
        assert step["evaluation/pass@1"] == step["evaluation/pass@2"] == 0.0

    with pytest.raises(DiagnosticError, match="total_train_steps"):
        RLTrainer(configure(*changes, "total_train_steps=null"))


class Letters(GroupedRolloutGenerator):
    """Two turns, the second going on from the first."""

    name = "letters"

    def problem(self, index):
        return Row("c d", "b", index=index)

    async def run(self, episode):
        first = await episode.generate([2, 3])
        second = await episode.generate([*first.prompt_ids, *first.token_ids, 4, 5], max_new_tokens=3)
        episode.figures["first"] = first.text.count("b") / 8
        return second.text.count("b") / 3


async def areal_style(engine, data):
    """As a workflow of AReaL: a row and an engine."""
    answer = await engine.agenerate([2, 3])
    return answer.text.count("b") / 8


def test_environments_of_a_script(toy_backends, configure, tmp_path):
    changes = ("rollout.environments=code", "train_dataset={path: null, batch_size: 8}", "total_train_steps=6")
    workflow = WorkflowAgent(areal_style, [Row("c d", "", index=i) for i in range(5)])
    environments = Environments.of(Letters(), workflow)
    with RLTrainer(configure(*changes, "rollout.dump_to_file=true"), environments=environments) as trainer:
        trainer.train()
    steps = read(trainer.job.folder, "metrics.jsonl")
    name = workflow.name
    assert steps[-1]["reward/letters"] > steps[0]["reward/letters"] + 0.2
    assert steps[-1][f"reward/{name}"] > steps[0][f"reward/{name}"] + 0.2
    for step in steps:
        assert step["rollout/turns"] == 1.5 and step["rollout/sequences"] == 32, "two turns are one row"
        assert step["environment/first"] >= 0
    with pytest.raises(ValueError, match="gives no environments"):
        RLTrainer(configure(*changes))


def test_a_killed_run_goes_on_with_its_bank(toy_backends, configure, rows, tmp_path, capsys):
    """On-policy, so that it is the unbroken run to the last digit, whatever was restored."""
    settings = (*RECOVER, "rollout.bank={}", "total_train_steps=8")
    train(configure(*settings, "trial_name=unbroken"), rows, toy_engines.share_of_b)
    run = Run(tmp_path, "killed", settings, delay=0.02)
    run.killed_after(5)
    with BankReader(run.folder / "rollout_bank") as reader:
        assert reader.verify().damages == [] and len(reader.contents.entries) >= 8  # a batch after the checkpoint
    train(configure(*settings, "trial_name=killed"), rows, toy_engines.share_of_b)
    lines = {name: read(tmp_path / "runs" / "toy" / name, "metrics.jsonl") for name in ("unbroken", "killed")}
    assert figures(lines["killed"]) == figures(lines["unbroken"])


@pytest.mark.slow
def test_nothing_is_trained_on_twice_when_running_ahead(toy_backends, configure, rows, tmp_path):
    settings = (*RECOVER, *AHEAD, "rollout.bank={}", "total_train_epochs=2", "total_train_steps=12")
    configure()  # writes the file that the script reads
    run = Run(tmp_path, "ahead", settings, delay=0.02)
    run.killed_after(3)
    run.killed_after(7)
    train(configure(*settings, "trial_name=ahead"), rows, toy_engines.share_of_b)
    numbers = trained(run.folder)
    assert len(numbers) == len(set(numbers)) == 12 * 8
