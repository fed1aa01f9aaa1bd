"""Adapters as numbers; the engine's tests compare them with built models and with PEFT."""

from __future__ import annotations

from dataclasses import replace

import pytest

from areal_like.alloc import ModelAllocation
from areal_like.spec import ModelSpec
from areal_like.spec.lora import adapter_elements, adapter_matrices, lora_targets
from areal_like.spec.memory import LoRA, MemoryJob, predict

DENSE = ModelSpec.bundled("Qwen/Qwen3-0.6B")
MOE = ModelSpec.bundled("Qwen/Qwen3-30B-A3B")


def test_all_linear_is_the_four_targets():
    assert lora_targets(["all-linear"]) == ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
    assert lora_targets(["linear_fc2", "linear_qkv"]) == ("linear_qkv", "linear_fc2")


@pytest.mark.parametrize(("name", "words"), [("router", "router cannot"), ("q_proj", "called 'q_proj'")])
def test_a_name_that_is_no_target(name, words):
    with pytest.raises(ValueError, match=words):
        lora_targets(["linear_qkv", name])


def test_names_and_rows_of_a_layer():
    parts = {m.target: m.parts for m in adapter_matrices(DENSE, ["all-linear"], [3])}
    at = "model.layers.3"
    assert parts["linear_qkv"] == tuple(
        (f"{at}.self_attn.{n}_proj", rows) for n, rows in (("q", 2048), ("k", 1024), ("v", 1024))
    )
    assert parts["linear_proj"] == ((f"{at}.self_attn.o_proj", 1024),)
    assert parts["linear_fc1"] == ((f"{at}.mlp.gate_proj", 3072), (f"{at}.mlp.up_proj", 3072))
    assert parts["linear_fc2"] == ((f"{at}.mlp.down_proj", 1024),)


def test_elements_by_hand():
    """Qwen3-0.6B: hidden 1024, 16 heads and 8 groups of 128, width 3072. A and B of every matrix, rank 8."""
    one_layer = 8 * ((1024 + 4096) + (2048 + 1024) + (1024 + 6144) + (3072 + 1024))
    for text, tp in (("megatron:d1", 1), ("megatron:d2t4", 4)):
        found = adapter_elements(DENSE, ModelAllocation.parse(text), ["all-linear"], 8, range(28))
        assert found == (28 * one_layer // tp, 0)


def test_elements_of_experts_by_hand():
    """Qwen3-30B-A3B: 128 experts of width 768, hidden 2048, 32 heads and 4 groups of 128."""
    allocation = ModelAllocation.parse("megatron:(attn:d4t2|ffn:d1e8)")
    found = adapter_elements(MOE, allocation, ["all-linear"], 8, range(2))
    assert found.dense == 2 * 8 * ((2048 + 5120) + (4096 + 2048)) // 2
    assert found.experts == 2 * 16 * 8 * ((2048 + 1536) + (768 + 2048))
    attention = adapter_elements(MOE, allocation, ["linear_qkv", "linear_proj"], 8, range(2))
    assert attention == (found.dense, 0) and attention.total == found.dense


def test_memory_of_adapters():
    """Only adapters have gradients (float32) and optimizer states; the model's own weights are there once."""
    job = MemoryJob(micro_tokens=4096, seq=1024)
    adapters = replace(job, lora=LoRA(8, ("linear_qkv", "linear_proj"), "bfloat16"))
    allocation = ModelAllocation.parse("megatron:d2t2")

    def states(j):
        return predict(DENSE, allocation, j).ranks[0].phase("update").parts

    whole, low_rank = states(job), states(adapters)
    elements = adapter_elements(DENSE, allocation, ["linear_qkv", "linear_proj"], 8, range(28)).total
    assert low_rank["weights"] == whole["weights"] + 2 * elements
    assert low_rank["gradients"] == 4 * elements
    assert low_rank["optimizer"] == 12 * elements // 2
    in_float32 = replace(job, lora=LoRA(8, ("linear_qkv", "linear_proj"), "float32"))
    found = states(in_float32)
    assert found["weights"] == whole["weights"] + 4 * elements and found["optimizer"] == 8 * elements // 2
