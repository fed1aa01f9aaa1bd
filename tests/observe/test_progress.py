"""Lines and bar, on a terminal and without one; timers and samples."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from areal_like.observe import PhaseTimers, Progress, Sample, SampleWriter
from areal_like.observe.progress import figures_line
from areal_like.observe.samples import best_and_worst, one_line

FIGURES = {
    "actor/grad_norm": 1.23456,
    "reward/mean": 0.25,
    "actor/loss": -0.01234,
    "actor/approx_kl": 0.00123,
    "actor/entropy": 1.5,
    "speed/tokens_per_second": 812.4,
    "reward/std": 0.4,
    "seconds/generation": 9.12,
    "seconds/log_probs": 2.0,
}


def test_the_line_by_hand():
    assert figures_line(3, 13, FIGURES) == (
        "step 3/13  reward 0.250  loss -0.0123  grad norm 1.23  KL 0.0012  entropy 1.500  tokens/s 812  "
        "generation 9.1 s  log probs 2.0 s"
    )
    assert figures_line(3, None, {"reward/mean": None}) == "step 3  reward n/a"


def test_without_a_terminal_there_are_plain_lines_only():
    out = io.StringIO()
    with Progress(2, console=Console(file=out, force_terminal=False, width=40)) as progress:
        progress.phase("generation")
        progress.step(1, FIGURES)
        progress.note("[bold]model [/] output \\boxed{1}")
    assert out.getvalue().splitlines() == [figures_line(1, 2, FIGURES), "[bold]model [/] output \\boxed{1}"]


def test_on_a_terminal_there_is_a_bar_that_ends_with_the_run():
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=100, color_system=None)
    with pytest.raises(KeyboardInterrupt), Progress(4, first_step=1, console=console) as progress:
        progress.phase("log_probs")
        progress.step(2, {"reward/mean": 0.5})
        progress._bar.refresh()
        assert progress._bar.tasks[0].completed == 2
        raise KeyboardInterrupt
    assert progress._bar is None
    assert "step 2/4  reward 0.500" in out.getvalue() and "2/4" in out.getvalue() and "log probs" in out.getvalue()


def test_timers_by_a_clock_of_our_own():
    now = iter([0.0, 2.0, 10.0, 10.5, 20.0, 21.0])
    timers = PhaseTimers(clock=lambda: next(now))
    with timers.phase("generation"):
        pass
    with pytest.raises(ValueError), timers.phase("update"):
        raise ValueError
    with timers.phase("generation"):
        pass
    assert timers.take() == {"seconds/generation": 3.0, "seconds/update": 0.5}
    assert timers.take() == {}


def test_samples_are_written_whole_and_shown_short(tmp_path):
    shown: list[str] = []
    samples = [
        Sample("What is 1 + 1?", "2" + "x" * 300, 1.0, "2"),
        Sample("p", "a\n\x1b[31m\udc80", 0.0),
        Sample("q", "", 0.5),
    ]
    with SampleWriter(tmp_path, show=shown.append, shown=2, width=40) as writer:
        writer.write(5, samples)
        lines = [json.loads(x) for x in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert [x["completion"] for x in lines] == [s.completion for s in samples]
    assert lines[0] | {"completion": ""} == {
        "step": 5, "prompt": "What is 1 + 1?", "completion": "", "reward": 1.0, "answer": "2", "version": 0, "group": 0,
        "finish_reason": "",
    }  # fmt: skip
    assert shown == [
        "  +1.00  What is 1 + 1? -> 2xxxxxxxxxxxxxxxxx...xxxxxxxxxxxxxxxxxxx",
        "  +0.00  p -> a\\n\\x1b[31m\\udc80",
    ]


def test_which_are_shown():
    samples = [Sample("", str(i), r) for i, r in enumerate([0.1, 0.9, 0.5, 0.0])]
    assert [s.completion for s in best_and_worst(samples, 3)] == ["1", "3", "2"]
    assert best_and_worst([], 2) == [] and best_and_worst(samples, 0) == []
    assert len(one_line("y" * 99, 10)) == 10
