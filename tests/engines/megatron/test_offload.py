"""Offload and onload on the CPU, where device memory is storage too: freed, restored bit by bit, training unchanged."""

from __future__ import annotations

import engine_views
import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from areal_like.algorithms.sft import SFTLoss
from areal_like.alloc import ModelAllocation
from areal_like.config import FP8Config
from areal_like.runtime.local import WorkerGroup
from areal_like.spec import ModelSpec
from areal_like.spec.memory import PARTS, MemoryJob, predict

LENGTHS = [90, 5, 17, 2, 31, 44, 8]
EVERYTHING = {"parameters": True, "gradients": True, "optimizer": True}
OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True, "bucket_size": 2000}

CASES = {
    "d2": ("megatron:d2", "qwen3", {}),
    "d2-overlap": ("megatron:d2", "qwen3", {"ddp": OVERLAP}),
    "d2-bf16": ("megatron:d2", "qwen3", {"dtype": "bfloat16", "ddp": {"grad_reduce_in_fp32": False}}),
    "t2-unsharded": ("megatron:t2", "llama-tied", {"ddp": {"use_distributed_optimizer": False}}),
    "p2": ("megatron:p2", "llama-tied", {"dtype": "bfloat16"}),
    "e2": ("megatron:d2e2", "qwen3-moe", {}),
    "e2-grouped": ("megatron:d2e2", "qwen3-moe", {"megatron": {"moe_grouped_gemm": True}}),
}


def ask(ranks, function, *args):
    return ranks.group.call("ask", function, *args)


def predicted(text, folder, options, rank):
    """What `areal-like explain` says that each part weighs on that rank."""
    spec, allocation = ModelSpec.from_path(folder), ModelAllocation.parse(text)
    ddp = options.get("ddp", {})
    job = MemoryJob(
        96,
        96,
        dtype=options.get("dtype", "float32"),
        distributed_optimizer=ddp.get("use_distributed_optimizer", True),
        grad_reduce_in_fp32=ddp.get("grad_reduce_in_fp32", True),
    )
    phase = predict(spec, allocation, job).ranks[allocation.mesh().coordinates(rank).pp].phase("update")
    return {part: phase.parts[row] for part, row in PARTS.items()}


@pytest.mark.parametrize("case", CASES)
def test_training_goes_on_as_if_nothing_had_been(pair, models, helpers, case):
    text, kind, options = CASES[case]
    batches = [helpers.random_batch(LENGTHS, seed) for seed in range(3)]
    pair.build(text, models(kind), **options)
    expected = [pair.train(batch) for batch in batches]
    expected_weights, (expected_log_probs, _) = pair.weights(), pair.forward(batches[0])

    pair.build(text, models(kind), **options)
    found = [pair.train(batches[0])]
    if "overlap_param_gather" in options.get("ddp", {}):  # or the others' shards arrive between the two readings
        pair.weights()
    before, sizes = ask(pair, engine_views.bits), ask(pair, engine_views.part_bytes)
    live = ask(pair, engine_views.live_bytes)
    freed = pair.group.call("do", "offload")
    assert freed == sizes
    for rank in range(2):
        assert freed[rank] == pytest.approx(predicted(text, models(kind), options, rank), rel=0.05)
    assert ask(pair, engine_views.part_bytes) == [dict.fromkeys(EVERYTHING, 0)] * 2
    # What lives in the process shrinks by as much: nothing else held these bytes, and no other copy was made.
    shrunk = [a - b for a, b in zip(live, ask(pair, engine_views.live_bytes), strict=True)]
    assert all(sum(f.values()) <= s for f, s in zip(freed, shrunk, strict=True)), (freed, shrunk)
    assert pair.group.call("do", "offload") == [{}, {}]

    pair.group.call("do", "onload")
    assert ask(pair, engine_views.bits) == before and ask(pair, engine_views.part_bytes) == sizes
    assert ask(pair, engine_views.broken_views) == [[], []]
    found.append(pair.train(batches[1]))
    host = ask(pair, engine_views.host_bytes)
    pair.group.call("do", "offload")
    pair.group.call("do", "onload")
    pair.group.call("do", "onload")
    assert ask(pair, engine_views.host_bytes) == host, "host copies are not reused"
    found.append(pair.train(batches[2]))
    assert found == expected
    pair.group.call("do", "offload", parameters=False)  # a forward pass and an export need no more than the parameters
    weights = pair.weights()
    assert weights.keys() == expected_weights.keys()
    assert all(torch.equal(weights[name], expected_weights[name]) for name in weights)
    assert torch.equal(pair.forward(batches[0])[0], expected_log_probs)


def test_a_resumed_model_moves_as_well(pair, models, helpers, tmp_path):
    """What a checkpoint has put in place of the optimizer's tensors; and a checkpoint that is still being written."""
    options = {"dtype": "bfloat16", "megatron": {"async_save": True}}
    batches = [helpers.random_batch(LENGTHS, seed) for seed in range(3)]
    pair.build("megatron:d2", models("qwen3"), **options)
    pair.train(batches[0])
    pair.group.call("do", "save_checkpoint", str(tmp_path / "one"), step=1)
    pair.group.call("do", "offload")
    pair.group.call("do", "finish_checkpoint", wait=True)
    words = "save_checkpoint needs the parameters and optimizer: offloaded"
    [(kind, text), _] = pair.group.call("attempt", "save_checkpoint", str(tmp_path / "two"), step=2)
    assert kind == "OffloadedError" and text.startswith(words)
    pair.group.call("do", "onload")
    expected = [pair.train(batch) for batch in batches[1:]]
    pair.build("megatron:d2", models("qwen3"), **options)
    assert pair.group.call("do", "load_checkpoint", str(tmp_path / "one")) == [1, 1]
    found = []
    for batch in batches[1:]:
        freed = pair.group.call("do", "offload")
        assert freed[0] == pytest.approx(predicted("megatron:d2", models("qwen3"), {"dtype": "bfloat16"}, 0), rel=0.05)
        pair.group.call("do", "onload")
        found.append(pair.train(batch))
    assert found == expected


def test_moments_that_come_later_are_moved_too(solo, models, helpers):
    """Adam makes its state in the first step; the host's room grows by exactly that."""
    solo.build("megatron:d1", models("qwen3"), dtype="bfloat16")
    (first,) = solo.group.call("do", "offload")
    solo.group.call("do", "onload")
    solo.train(helpers.random_batch(LENGTHS))
    (second,) = solo.group.call("do", "offload")
    numbers = first["parameters"] / 2
    assert first["optimizer"] == pytest.approx(4 * numbers, rel=0.01)  # the buffer's padding has no copy
    assert second["optimizer"] == pytest.approx(12 * numbers, rel=0.01)
    (host,) = ask(solo, engine_views.host_bytes)
    assert host["optimizer"] == pytest.approx(12 * numbers, rel=0.02)  # pieces begin at multiples of 64 bytes


CALLS = [
    ("parameters", "save", ("unused",)),
    ("parameters", "load", ("unused",)),
    ("parameters", "ask", (engine_views.weights,)),
    ("optimizer", "load", ("unused",)),
]


def test_a_call_that_needs_what_is_away_says_so(solo, models, helpers, tmp_path):
    solo.build("megatron:d1", models("qwen3"))
    for part in EVERYTHING:
        solo.group.call("do", "offload", **{p: p == part for p in EVERYTHING})
        words = f"needs the {part}: offloaded; call onload({part}=True) first"
        assert solo.attempt_training(helpers.random_batch([9])) == [("OffloadedError", f"train_batch {words}")]
        for needed, call, args in CALLS:
            if needed == part:
                name = args[0].__name__ if call == "ask" else call
                assert solo.attempt(call, *args) == [("OffloadedError", f"{name} {words}")]
        solo.group.call("do", "onload", **{p: p == part for p in EVERYTHING})
    solo.group.call("do", "offload", gradients=False)
    [(kind, text)] = solo.attempt_training(helpers.random_batch([9]))
    assert kind == "OffloadedError" and "parameters and optimizer" in text
    assert "onload(parameters=True, optimizer=True)" in text
    [(kind, text)] = solo.attempt("forward", helpers.random_batch([9]))
    assert kind == "OffloadedError" and text.startswith("forward needs the parameters: offloaded")
    solo.group.call("do", "onload")
    solo.train(helpers.random_batch([9]))


def test_fp8_copies_go_with_the_parameters(solo, models):
    solo.build("megatron:d1", models("qwen3"))
    (layers,) = ask(solo, engine_views.give_fp8_copies)
    solo.group.call("do", "offload", parameters=False)
    assert ask(solo, engine_views.fp8_copies) == [layers] and layers > 5
    solo.group.call("do", "offload")
    assert ask(solo, engine_views.fp8_copies) == [0]


def test_a_model_that_is_not_trained(pair, models, helpers):
    batch = helpers.random_batch(LENGTHS)
    pair.build("megatron:t2", models("qwen2"), optimizer=None)
    expected, _ = pair.forward(batch)
    sizes = ask(pair, engine_views.part_bytes)
    assert pair.group.call("do", "offload") == sizes and sizes[0]["optimizer"] == sizes[0]["gradients"] == 0
    assert ask(pair, engine_views.part_bytes) == [dict.fromkeys(EVERYTHING, 0)] * 2
    pair.group.call("do", "onload")
    assert torch.equal(pair.forward(batch)[0], expected)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_gets_back_what_explain_predicts(helpers, tmp_path):
    """bfloat16 with Adam: `torch.cuda.memory_allocated` falls by the prediction, part after part, within 5 %."""
    config = Qwen3Config(
        vocab_size=32_000,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=4,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=64,
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path)
    sizes = predicted("megatron:d1", tmp_path, {"dtype": "bfloat16"}, 0)
    section = helpers.engine_config("megatron:d1", tmp_path, dtype="bfloat16")
    with WorkerGroup.start("engine", "megatron_hosts:EngineHost", {}, 1, "cuda") as group:
        group.call("build", "megatron:d1", section, device="cuda")
        batch = helpers.random_batch([90, 60])
        first = group.call("do", "train_batch", batch, SFTLoss())
        before, bits = group.call("ask", engine_views.cuda_bytes)[0], group.call("ask", engine_views.bits)
        here = before
        for part, expected in sizes.items():
            (freed,) = group.call("do", "offload", **{p: p == part for p in EVERYTHING})
            (now,) = group.call("ask", engine_views.cuda_bytes)
            assert here - now == pytest.approx(expected, rel=0.05) and freed[part] == pytest.approx(expected, rel=0.05)
            here = now
        assert before - here == pytest.approx(sum(sizes.values()), rel=0.05)
        assert group.call("ask", engine_views.host_is_pinned) == [True]
        group.call("do", "onload")
        assert group.call("ask", engine_views.bits) == bits
        assert group.call("ask", engine_views.cuda_bytes)[0] == pytest.approx(before, rel=0.01)
        assert group.call("do", "train_batch", batch, SFTLoss())[0]["loss"] < first[0]["loss"]


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0), reason="needs a GPU with FP8"
)
@pytest.mark.parametrize("param", [False, True])
def test_fp8_on_a_gpu(helpers, tmp_path, param):
    """Quantized parameters, and FP8 copies of others, leave too; the model says the same afterwards."""
    config = Qwen3Config(
        vocab_size=32_000,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=4,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=64,
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path)
    megatron = {"fp8_config": FP8Config(recipe="tensorwise", param=param)}
    section = helpers.engine_config("megatron:d1", tmp_path, dtype="bfloat16", megatron=megatron)
    batch = helpers.random_batch([90, 60])
    with WorkerGroup.start("engine", "megatron_hosts:EngineHost", {}, 1, "cuda") as group:
        group.call("build", "megatron:d1", section, device="cuda")
        group.call("do", "train_batch", batch, SFTLoss())
        said = group.call("do", "forward", batch)[0].log_probs
        (before,) = group.call("ask", engine_views.cuda_bytes)
        freed = sum(group.call("do", "offload")[0].values())
        (after,) = group.call("ask", engine_views.cuda_bytes)
        assert before - after >= freed > 0.8 * before
        group.call("do", "onload")
        assert torch.allclose(group.call("do", "forward", batch)[0].log_probs, said, atol=1e-3)
        assert group.call("do", "train_batch", batch, SFTLoss())[0]["updated"] == 1.0
