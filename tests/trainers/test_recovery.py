"""A run that is killed and started again is the run that was never interrupted."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import toy_engines

from areal_like.alloc import DiagnosticError
from areal_like.spec.recovery import latest_checkpoint
from areal_like.trainers.rl import RLTrainer

HERE = str(Path(__file__).parent)
SCRIPT = """
    import sys
    from dataclasses import replace
    sys.path.insert(0, {here!r})
    import toy_engines
    from areal_like.alloc import get_backend
    from areal_like.config import load_config
    from areal_like.data.rows import Row
    from areal_like.trainers import roles, startup
    from areal_like.trainers.rl import RLTrainer

    def slow(prompt, completion, row):
        import time
        time.sleep({delay})
        return toy_engines.share_of_b(prompt, completion, row)

    if __name__ == "__main__":
        if {toy}:
            engines = {{"megatron": "toy_engines:ToyTrain", "huggingface": "toy_engines:ToyInference"}}
            for module in (roles, startup):
                module.get_backend = lambda name: replace(get_backend(name), engine=engines[name])
        letters = "abcdefghijklmnop"
        rows = [Row(f"{{letters[2 + i % 6]}} {{letters[3 + i % 5]}}", "b", index=i, dataset="toy") for i in range(64)]
        with RLTrainer(load_config({path!r}, {overrides!r}), rows, slow) as trainer:
            trainer.train()
"""


class Run:
    """A run in a process of its own, whose files are under `name`."""

    def __init__(self, tmp_path: Path, name: str, overrides: tuple[str, ...], *, toy: bool = True, delay: float = 0.0):
        self.folder = tmp_path / "runs" / "toy" / name
        self.script = tmp_path / f"{name}.py"
        path, settings = str(tmp_path / "run.yaml"), [f"trial_name={name}", *overrides]
        text = SCRIPT.format(here=HERE, path=path, overrides=settings, toy=toy, delay=delay)
        self.script.write_text(textwrap.dedent(text))

    def lines(self) -> list[dict[str, float]]:
        path = self.folder / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def start(self) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, str(self.script)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def to_the_end(self) -> str:
        process = self.start()
        output, _ = process.communicate(timeout=600)
        assert process.returncode == 0, output
        return output

    def killed_after(self, step: int) -> None:
        process = self.start()
        deadline = time.monotonic() + 600
        while not any(line["step"] == step for line in self.lines()):
            assert process.poll() is None and time.monotonic() < deadline, process.communicate()[0]
            time.sleep(0.01)
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()


def figures(lines: list[dict[str, float]]) -> list[dict[str, float]]:
    """What does not depend on when and how fast."""
    return [
        {n: v for n, v in line.items() if not n.startswith(("seconds/", "speed/", "time", "flow/"))} for line in lines
    ]


RECOVER = ("recover.mode=auto", "recover.freq_steps=2", "rollout.dump_to_file=true", "train_dataset.drop_last=false")


@pytest.fixture
def train(toy_backends, configure, rows, tmp_path):
    """`train(...)`: a run with these overrides in this process, to its end; its figures."""

    def run(*overrides: str) -> list[dict[str, float]]:
        with RLTrainer(configure(*RECOVER, *overrides), rows, toy_engines.share_of_b) as trainer:
            trainer.train()
        lines = (trainer.job.folder / "metrics.jsonl").read_text().splitlines()
        return figures([json.loads(line) for line in lines])

    return run


def test_a_killed_run_goes_on_as_if_it_had_not_been(train, configure, tmp_path, capsys):
    # an epoch ends with a batch of one prompt
    settings = ("train_dataset.batch_size=7", "total_train_epochs=2", "total_train_steps=13")
    unbroken = train("trial_name=unbroken", *settings)
    assert [line["step"] for line in unbroken] == list(range(1, 14))
    run = Run(tmp_path, "killed", (*RECOVER, *settings), delay=0.05)
    run.killed_after(5)
    assert len(run.lines()) >= 5 and latest_checkpoint(run.folder / "recover").state.step >= 4
    capsys.readouterr()
    assert train("trial_name=killed", *settings) == unbroken
    assert "going on after step" in capsys.readouterr().out
    samples = [(tmp_path / "runs" / "toy" / n / "samples.jsonl").read_text() for n in ("killed", "unbroken")]
    assert samples[0] == samples[1] and samples[0].count("\n") > 100
    assert sorted(p.name for p in (run.folder / "recover").iterdir()) == ["step-000012", "step-000013"]
    assert not list(run.folder.glob("*.1")), "nothing was set aside"
    # it is complete: started again it has nothing to do
    assert train("trial_name=killed", *settings) == unbroken
    assert "nothing is left to do" in capsys.readouterr().out


@pytest.mark.slow
def test_a_torn_checkpoint_is_left_for_the_one_before_it(train, configure, rows, tmp_path, capsys):
    unbroken = train("trial_name=a", "actor.megatron.async_save=true")
    root = tmp_path / "runs" / "toy" / "b" / "recover"
    train("trial_name=b", "total_train_steps=6", "actor.megatron.async_save=true", "recover.keep=3")
    assert sorted(p.name for p in root.iterdir()) == ["step-000002", "step-000004", "step-000006"]
    (root / "step-000006" / "actor" / "logits.json").unlink()
    (root / "step-000008").mkdir()
    capsys.readouterr()
    assert train("trial_name=b") == unbroken
    output = capsys.readouterr().out.replace("\n", "")
    assert "not used for recovery" in output and "step-000006/actor lacks the file logits.json" in output
    assert "going on after step 4" in output
    assert latest_checkpoint(root).state.step == 8

    # another layout may go on; other data and another model may not
    shutil.rmtree(root / "step-000008")
    assert train("trial_name=b", "actor.backend=megatron:d2")[-1]["actor/loss"] == pytest.approx(
        unbroken[-1]["actor/loss"], abs=1e-6
    )
    for change, text in (
        ("seed=5", "seed is 3 in the checkpoint and 5 here"),
        ("actor.dtype=bfloat16", "dtype is float32 in the checkpoint and bfloat16 here"),
    ):
        with pytest.raises(DiagnosticError, match=text):
            train("trial_name=b", change)
    with pytest.raises(DiagnosticError, match="loader with rows 64; this one has 60"):
        RLTrainer(configure(*RECOVER, "trial_name=b"), rows[:60], toy_engines.share_of_b)

    # a run without recovery begins anew and loses nothing of the old one
    assert train("trial_name=b", "recover.mode=off", "total_train_steps=1") == unbroken[:1]
    assert (root.parent / "recover.1" / "step-000008").is_dir() and not root.exists()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_real_engines_go_on_under_another_layout(configure, rows, tmp_path):
    settings = (
        *RECOVER,
        "total_train_steps=4",
        "actor.optimizer.lr=1e-2",
        "actor.optimizer.lr_scheduler_type=cosine",
        "actor.ppo_n_minibatches=2",
        "gconfig.n_samples=4",
        "actor.megatron.async_save=true",
    )

    def train(*overrides: str) -> list[dict[str, float]]:
        with RLTrainer(configure(*settings, *overrides), rows, toy_engines.share_of_b) as trainer:
            trainer.train()
        return figures([json.loads(line) for line in (trainer.job.folder / "metrics.jsonl").read_text().splitlines()])

    whole = train("trial_name=unbroken")
    run = Run(tmp_path, "killed", settings, toy=False)
    run.killed_after(3)
    continued = train("trial_name=killed", "actor.backend=megatron:t2")
    assert [line["step"] for line in continued] == [1, 2, 3, 4]
    for one, other in zip(whole, continued, strict=True):
        assert one["reward/mean"] == other["reward/mean"]
        for name in ("actor/loss", "actor/grad_norm", "actor/learning_rate"):
            assert one[name] == pytest.approx(other[name], rel=1e-4, abs=1e-6), (one["step"], name)
