"""The trace that is written holds the steps, ranks and ranges that were asked for, and nothing else."""

from __future__ import annotations

import gzip
import json
import pickle

import engine_views
import pytest
import torch

from areal_like.algorithms.sft import SFTLoss
from areal_like.config import ProfilerConfig
from areal_like.runtime.local import WorkerGroup

LENGTHS = [90, 60, 80]  # three micro-batches of at most 96 tokens


def ranges(path):
    """Named ranges of a trace, in order of their beginning: (name, begin, end)."""
    with gzip.open(path, "rt") as file:
        events = json.load(file)["traceEvents"]
    found = [(e["name"], e["ts"], e["ts"] + e["dur"]) for e in events if e.get("cat") == "user_annotation"]
    return sorted(found, key=lambda e: (e[1], -e[2]))


def inside(found, name):
    """Names of the ranges within the only range of that name."""
    [(_, begin, end)] = [f for f in found if f[0] == name]
    return [n for n, b, e in found if begin <= b and e <= end and n != name]


def three_steps(ranks, helpers, text, folder, **changes):
    ranks.build(text, folder, **changes)
    figures = []
    for seed in range(3):
        batch = helpers.random_batch(LENGTHS, seed)
        ranks.forward(batch)
        figures.append(ranks.train(batch))
        ranks.weights()
    return figures


def test_a_pipeline(pair, models, helpers, tmp_path):
    plain = three_steps(pair, helpers, "megatron:p2", models("llama-tied"))
    profiler = {"ranks": [1], "step_start": 2, "step_end": 2, "save_path": str(tmp_path / "traces")}
    recorded = three_steps(pair, helpers, "megatron:p2", models("llama-tied"), profiler=ProfilerConfig(**profiler))
    assert recorded == plain, "recording changes nothing"
    assert [p.name for p in (tmp_path / "traces").iterdir()] == ["rank1-steps2-2.json.gz"]
    found = ranges(tmp_path / "traces" / "rank1-steps2-2.json.gz")
    calls = [n for n, *_ in found if n.split(",")[0] in ("train_batch", "forward", "weights")]
    assert calls == ["forward", "train_batch, step 2", "weights"]
    step = inside(found, "train_batch, step 2")
    numbers = range(1, 4)
    assert [n for n in step if n.startswith("forward ")] == [f"forward {i}" for i in numbers]
    assert [n for n in step if n.startswith("backward ")] == [f"backward {i}" for i in numbers]
    assert step.count("optimizer step") == 1 and "optimizer-inner-step" in inside(found, "optimizer step")
    assert any("recv" in n for n in step), "exchanges between the stages"
    # The operators are there too, those of the backward pass included.
    with gzip.open(tmp_path / "traces" / "rank1-steps2-2.json.gz", "rt") as file:
        names = {e.get("name") for e in json.load(file)["traceEvents"]}
    assert "aten::mm" in names and "SiluBackward0" in names


def test_several_ranks_and_steps_and_a_run_that_ends_early(pair, models, helpers, tmp_path):
    profiler = ProfilerConfig(ranks=[0, 1], step_start=1, step_end=2, save_path=str(tmp_path), with_stack=True)
    pair.build("megatron:d2", models("qwen3"), profiler=profiler)
    for seed in range(2):
        pair.train(helpers.random_batch(LENGTHS, seed))
    assert not list(tmp_path.iterdir())
    pair.train(helpers.random_batch(LENGTHS, 2))  # where the next pass begins, the recording ends
    assert sorted(p.name for p in tmp_path.iterdir()) == ["rank0-steps1-2.json.gz", "rank1-steps1-2.json.gz"]
    for rank in range(2):
        found = [n for n, *_ in ranges(tmp_path / f"rank{rank}-steps1-2.json.gz")]
        assert [n for n in found if n.startswith("train_batch")] == ["train_batch, step 1", "train_batch, step 2"]
        assert found.count("optimizer step") == 2
    for path in tmp_path.iterdir():
        path.unlink()
    pair.build("megatron:d2", models("qwen3"), profiler=profiler)
    pair.train(helpers.random_batch(LENGTHS))
    pair.group.call("ask", engine_views.finish_profile)  # what `close` does
    found = [n for n, *_ in ranges(tmp_path / "rank0-steps1-2.json.gz")]
    assert "train_batch, step 1" in found and "train_batch, step 2" not in found


def test_a_model_that_is_not_trained(solo, models, helpers, tmp_path):
    profiler = ProfilerConfig(step_start=2, step_end=2, save_path=str(tmp_path))
    solo.build("megatron:d1", models("qwen2"), optimizer=None, profiler=profiler)
    for _ in range(3):
        solo.forward(helpers.random_batch(LENGTHS))
    found = [n for n, *_ in ranges(tmp_path / "rank0-steps2-2.json.gz")]
    assert [n for n in found if "step" in n] == ["forward, step 2"]


def test_without_a_profiler_nothing_is_asked(solo, models, helpers):
    """No timers in Megatron's configurations, no range opened: counted over a step."""
    solo.build("megatron:d1", models("qwen3"))
    assert solo.group.call("ask", engine_views.profiling_calls, helpers.random_batch(LENGTHS), SFTLoss()) == [(0, [])]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"ranks": [1]}, "profiler.ranks: there is no rank 1 among 1"),
        ({"step_start": 3, "step_end": 2}, "profiler.step_end 2 is before step_start 3"),
        ({"memory": True}, "profiler.memory records CUDA's memory"),
        ({"save_path": None}, "profiler.save_path"),
    ],
)
def test_what_cannot_be_recorded(solo, models, helpers, tmp_path, changes, words):
    profiler = ProfilerConfig(**({"save_path": str(tmp_path)} | changes))
    [(kind, text)] = solo.refuses("megatron:d1", models("qwen3"), profiler=profiler)
    assert kind == "ValueError" and words in text


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_kernels_and_memory_on_a_gpu(models, helpers, tmp_path):
    profiler = ProfilerConfig(step_start=1, step_end=1, save_path=str(tmp_path), memory=True)
    section = helpers.engine_config("megatron:d1", models("qwen3"), dtype="bfloat16", profiler=profiler)
    with WorkerGroup.start("engine", "megatron_hosts:EngineHost", {}, 1, "cuda") as group:
        group.call("build", "megatron:d1", section, device="cuda")
        group.call("do", "train_batch", helpers.random_batch(LENGTHS), SFTLoss())
        group.call("ask", engine_views.finish_profile)
    with gzip.open(tmp_path / "rank0-steps1-1.json.gz", "rt") as file:
        events = json.load(file)["traceEvents"]
    assert any(e.get("cat") == "kernel" for e in events)
    snapshot = pickle.loads((tmp_path / "rank0-steps1-1.memory.pickle").read_bytes())
    assert any(event["action"] == "alloc" for trace in snapshot["device_traces"] for event in trace)
