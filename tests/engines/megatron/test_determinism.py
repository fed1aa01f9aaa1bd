"""Deterministic mode: the environment, the switches, the built model, and the bits of two runs in new processes."""

from __future__ import annotations

import os
import types

import pytest
import torch

from areal_like.algorithms.sft import SFTLoss
from areal_like.alloc import ModelAllocation
from areal_like.engines.megatron import determinism
from areal_like.runtime.determinism import deterministic_environment
from areal_like.runtime.dispatch import scatter
from areal_like.runtime.local import WorkerGroup
from areal_like.trainers import trial
from areal_like.trainers.trial import run_trial


@pytest.mark.parametrize(
    ("chosen", "kept"), [(None, "Ring"), ("", "Ring"), ("NVLS", "Ring"), ("Tree", "Tree"), ("^NVLS", "^NVLS")]
)
def test_a_choice_of_reductions_is_kept_if_it_repeats(monkeypatch, chosen, kept):
    monkeypatch.delenv("NCCL_ALGO", raising=False)
    if chosen is not None:
        monkeypatch.setenv("NCCL_ALGO", chosen)
    environment = deterministic_environment()
    assert environment["NCCL_ALGO"] == kept
    assert (
        environment["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] == "0" and environment["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    )


def test_a_process_that_used_the_gpu_before_is_told_what_was_missing(monkeypatch):
    for name in deterministic_environment():
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(RuntimeError, match="NVTE_ALLOW_NONDETERMINISTIC_ALGO=0 CUBLAS_WORKSPACE_CONFIG=:4096:8"):
        determinism.prepare_process("cuda")
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ and not torch.are_deterministic_algorithms_enabled()


def module(kind="Linear", **config):
    made = type(kind, (torch.nn.Module,), {})()
    if config:
        made.config = types.SimpleNamespace(**config)
    return made


@pytest.mark.parametrize(
    ("layer", "words"),
    [
        (module(deterministic_mode=False), "0 was built without deterministic_mode"),
        (module("TEDotProductAttention", deterministic_mode=True), "0 is TEDotProductAttention"),
        (module("DotProductAttention"), "0 is DotProductAttention"),
    ],
)
def test_a_module_that_was_built_otherwise_is_found(layer, words):
    with pytest.raises(RuntimeError, match=words):
        determinism.verify([torch.nn.Sequential(layer)])


def test_a_model_built_for_it_is_accepted():
    determinism.verify([torch.nn.Sequential(module(deterministic_mode=True), module("DocumentAttention"), module())])


def test_two_runs_in_new_processes_under_t2():
    report = run_trial("megatron:t2", steps=2, device="cpu", deterministic=True)
    assert report.passed and report.repeats == [], "\n" + report.render()
    assert "second run: loss, gradient norm and weights of 2 steps are bit-equal" in report.render()
    assert len({s.digest for s in report.steps}) == 2 and all(len(s.digest) == 64 for s in report.steps)


@pytest.mark.slow
def test_another_second_run_fails_the_trial(monkeypatch):
    batches = trial._batch
    calls = []

    def other(step, allocation, vocabulary):
        calls.append(step)
        return batches(step if len(calls) < 2 else step + 50, allocation, vocabulary)

    monkeypatch.setattr(trial, "_batch", other)
    report = run_trial("megatron:d1", steps=1, device="cpu", deterministic=True)
    assert not report.passed and "bit-equal in" not in report.render()
    assert report.failures == [f"step 1: {what} of the second run has other bits" for what in _ALL]


_ALL = ("loss", "gradient norm", "weights")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("kind", "text"), [("qwen3", "megatron:p2t2"), ("qwen3-moe", "megatron:(attn:d1p2t2|ffn:e2)")])
def test_ten_steps_on_four_ranks_have_the_same_bits(models, helpers, kind, text):
    runs = [ten_steps(models(kind), helpers, text) for _ in range(2)]
    assert runs[0][0] == runs[1][0] and len(runs[0][0]) == 10
    assert runs[0][1].keys() == runs[1][1].keys()
    assert all(torch.equal(runs[0][1][n], runs[1][1][n]) for n in runs[0][1])


def ten_steps(folder, helpers, text):
    allocation = ModelAllocation.parse(text)
    config = helpers.engine_config(text, folder, megatron={"use_deterministic_algorithms": True})
    kwargs = {"allocation": allocation, "config": config, "device": "cpu", "seed": 1, "total_steps": None}
    factory = "areal_like.engines.megatron.engine:MegatronEngine"
    with WorkerGroup.start("again", factory, kwargs, 4, environment=deterministic_environment()) as group:
        group.call("initialize")
        figures = []
        for step in range(10):
            shards = scatter(helpers.random_batch([50, 33, 7, 90, 21], step), allocation.mesh()).shards
            figures.append(group.call_each("train_batch", [(shard, SFTLoss()) for shard in shards])[0])
        weights = {n: t for bucket in group.stream("weights") for n, t in bucket.tensors.items()}
    return [(f["loss"], f["grad_norm"]) for f in figures], weights
