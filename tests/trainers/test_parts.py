"""Placement, settings and timers, by hand."""

from __future__ import annotations

import pytest

from areal_like.alloc import DiagnosticError
from areal_like.config import EvaluatorConfig, GenerationConfig, SaverConfig
from areal_like.rollout.episode import sample_seed
from areal_like.trainers.placement import place
from areal_like.trainers.recording import _set_aside
from areal_like.trainers.sampling import sampling_params
from areal_like.trainers.timers import Timer


@pytest.mark.parametrize(
    ("overrides", "cores", "actor", "rollout"),
    [
        ((), 8, 8, 8),  # they take turns
        (("actor.backend=megatron:d2",), 8, 4, 8),
        (("actor.backend=megatron:d2",), 2, 1, 2),
        (("actor.backend=megatron:d4",), 2, 1, 2),
        (("rollout.max_head_offpolicyness=1",), 8, 4, 4),  # at the same time
        (("rollout.max_head_offpolicyness=1", "rollout.backend=huggingface:d2"), 8, 4, 2),
        (("rollout.max_head_offpolicyness=1",), 1, 1, 1),
    ],
)
def test_threads(configure, overrides, cores, actor, rollout):
    placement = place(configure(*overrides), cores=cores)
    assert (placement.device, placement.actor.threads, placement.rollout.threads) == ("cpu", actor, rollout)


@pytest.mark.parametrize(
    ("actor", "rollout", "gpus", "sizes", "offset"),
    [
        ("megatron:d1", "huggingface:d1", 1, (1, 1), 0),  # one GPU is shared
        ("megatron:d1", "huggingface:d1", 2, (1, 1), 1),
        ("megatron:d4", "huggingface:d4", 8, (4, 4), 4),
        ("megatron:d8", "huggingface:d8", 8, (8, 8), 0),
        ("megatron:d*", "huggingface:d2", 8, (6, 2), 6),
        ("megatron:d4", "huggingface:d*", 8, (4, 4), 4),
    ],
)
def test_gpus(configure, actor, rollout, gpus, sizes, offset):
    config = configure(f"actor.backend={actor}", f"rollout.backend={rollout}", "device=auto")
    placement = place(config, cores=8, gpus=gpus)
    assert placement.device == "cuda"
    assert (placement.actor.allocation.world_size, placement.rollout.allocation.world_size) == sizes
    assert (placement.actor.gpu_offset, placement.rollout.gpu_offset) == (0, offset)


def test_gpus_that_are_not_there(configure):
    with pytest.raises(DiagnosticError, match="torch sees no GPU"):
        place(configure("device=cuda"), cores=2, gpus=0)
    with pytest.raises(DiagnosticError, match="needs 4 GPUs; torch sees 2"):
        place(configure("device=cuda", "actor.backend=megatron:d4"), cores=2, gpus=2)
    assert place(configure("device=auto"), cores=2, gpus=0).device == "cpu"


def test_the_reference_is_placed_only_when_it_is_used(configure):
    assert place(configure("ref={}"), cores=4).reference is None
    used = place(configure("ref={}", "actor.kl_ctl=0.1", "actor.backend=megatron:d2"), cores=4).reference
    assert used is not None and str(used.allocation) == "megatron:d2" and used.threads == 2


def test_sampling_parameters():
    section = GenerationConfig(max_new_tokens=50, min_new_tokens=20, max_tokens=30, top_k=5, stop=("x",))
    params = sampling_params(section, prompt_length=18, seed=1)
    assert (params.max_new_tokens, params.min_new_tokens, params.top_k, params.stop) == (12, 12, 5, ("x",))
    assert params.seed == 1 and not params.greedy
    assert sampling_params(GenerationConfig(temperature=0.0), 1, 0).greedy
    with pytest.raises(DiagnosticError, match="a prompt of 30 tokens leaves nothing of max_tokens 30"):
        sampling_params(section, prompt_length=30, seed=1)


def test_seeds_of_samples_differ_and_depend_on_nothing_else():
    seeds = {sample_seed(1, "rollout", p, s) for p in range(50) for s in range(8)}
    assert len(seeds) == 400 and all(0 <= seed < 2**31 for seed in seeds)
    assert sample_seed(1, "rollout", 3, 2) == sample_seed(1, "rollout", 3, 2) != sample_seed(2, "rollout", 3, 2)


@pytest.mark.parametrize(
    ("section", "due"),
    [
        (SaverConfig(), []),
        (SaverConfig(freq_steps=3), [3, 6, 9, 12]),
        (SaverConfig(freq_epochs=1), [4, 8, 12]),
        (EvaluatorConfig(freq_epochs=2, freq_steps=6), [6, 8, 12]),
    ],
)
def test_timers(section, due):
    timer = Timer(section)
    assert [step for step in range(1, 13) if timer.due(step, steps_per_epoch=4)] == due
    assert timer.active == bool(due)


def test_a_timer_of_seconds():
    now = [0.0]
    timer = Timer(SaverConfig(freq_secs=10), clock=lambda: now[0])
    found = []
    for step in range(1, 9):
        now[0] += 4
        found.append(timer.due(step, steps_per_epoch=100))
    assert found == [False, False, True, False, False, True, False, False]


def test_what_an_earlier_run_left_is_set_aside(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for text in ("first", "second"):
        path.write_text(text)
        _set_aside(path)
    assert not path.exists()
    assert [(tmp_path / f"metrics.jsonl.{i}").read_text() for i in (1, 2)] == ["first", "second"]
