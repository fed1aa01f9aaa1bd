"""The figures on disk: readable after every step, whatever they are."""

from __future__ import annotations

import json
import math
import warnings
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from areal_like.observe import MetricsWriter, read_metrics


def test_each_step_is_on_disk_before_the_next(tmp_path):
    with MetricsWriter(tmp_path / "run") as writer:
        for step in (1, 2):
            writer.write(step, {"reward/mean": step / 4, "actor/loss": torch.tensor(-0.5), "n": 3})
            lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
            assert len(lines) == step
            last = json.loads(lines[-1])
            assert last.pop("time") > 1e9
            assert last == {"step": step, "reward/mean": step / 4, "actor/loss": -0.5, "n": 3}


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, torch.tensor(float("nan")), 10**400])
def test_what_is_not_finite_becomes_null_with_a_warning(tmp_path, bad):
    with MetricsWriter(tmp_path) as writer:
        with pytest.warns(RuntimeWarning, match=r"step 7: not finite, written as null: actor/grad_norm"):
            written = writer.write(7, {"actor/grad_norm": bad, "actor/loss": 1.0})
        assert written == {"actor/grad_norm": None, "actor/loss": 1.0}
    line = (tmp_path / "metrics.jsonl").read_text()
    assert '"actor/grad_norm": null' in line and "NaN" not in line and "Infinity" not in line


def test_finite_figures_warn_of_nothing(tmp_path):
    with warnings.catch_warnings(), MetricsWriter(tmp_path) as writer:
        warnings.simplefilter("error")
        writer.write(1, {"a": 0.0, "b": -1, "c": True, "d": 10**400 // 10**399})


@pytest.mark.parametrize("bad", ["0.5", None, [1.0], torch.ones(2), {}])
def test_what_is_no_number_is_refused_by_name(tmp_path, bad):
    with MetricsWriter(tmp_path) as writer, pytest.raises(TypeError, match="the figure 'actor/loss' is"):
        writer.write(1, {"actor/loss": bad})
    assert read_metrics(tmp_path) == []


def test_a_torn_line_is_ended_and_left_out(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        writer.write(1, {"a": 1})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "a"')  # killed here
    with MetricsWriter(tmp_path) as writer:
        writer.write(2, {"a": 2})
    assert [(s["step"], s["a"]) for s in read_metrics(tmp_path)] == [(1, 1), (2, 2)]


def test_tensorboard_has_the_same_figures(tmp_path):
    with MetricsWriter(tmp_path, tensorboard=tmp_path / "events") as writer, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        writer.write(1, {"reward/mean": 0.25, "actor/loss": math.nan})
        writer.write(2, {"reward/mean": 0.5, "actor/loss": -1.5})
    events = EventAccumulator(str(tmp_path / "events")).Reload()
    assert [(e.step, e.value) for e in events.Scalars("reward/mean")] == [(1, 0.25), (2, 0.5)]
    assert [(e.step, e.value) for e in events.Scalars("actor/loss")] == [(2, -1.5)]


def test_a_full_disk_is_said():
    writer = MetricsWriter.__new__(MetricsWriter)
    writer._events, writer._file = None, Path("/dev/full").open("w")  # noqa: SIM115
    with pytest.raises(OSError, match="No space left"):
        writer.write(1, {"a": 1})
    with pytest.raises(OSError):
        writer.close()
