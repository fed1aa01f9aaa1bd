"""The estimate of generation, by hand on a small model."""

from __future__ import annotations

from dataclasses import replace

import pytest

from areal_like.alloc import ModelAllocation
from areal_like.preflight.generation_cost import generation_cost
from areal_like.preflight.hardware import GIB, Hardware
from areal_like.spec import ModelSpec

DENSE = {
    "model_type": "llama",
    "num_hidden_layers": 4,
    "hidden_size": 1024,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "intermediate_size": 4096,
    "vocab_size": 32768,
    "tie_word_embeddings": False,
}
MOE = DENSE | {
    "model_type": "qwen3_moe",
    "head_dim": 128,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 512,
    "norm_topk_prob": True,
}
TOY = Hardware("toy", 1e15, 80 * GIB, 1e12, 100e9, 10e9, 8)  # 700 GB/s of memory and 80 GB/s of links are reached
WEIGHTS = 2 * (4 * (16 * 2**20 + 2048) + 2 * 2**25 + 1024)
CACHE = 2 * 4 * 1024 * 2 * 1024  # keys and values, layers, width, bf16, tokens: of one sequence


def cost(text: str, config=DENSE, hardware=TOY, sequences=4):
    spec = ModelSpec.from_config(config)
    return generation_cost(spec, ModelAllocation.parse(text), hardware, sequences=sequences, sequence_length=1024)


def test_decoding_reads_weights_and_half_of_the_cache():
    found = cost("sglang:d1")
    assert (found.concurrent, found.weights, found.cache) == (4, WEIGHTS, 4 * CACHE)
    assert found.seconds == pytest.approx(1024 * (WEIGHTS + 4 * CACHE / 2) / 700e9)


def test_tensor_ranks_share_the_reading_and_reduce_twice_a_layer():
    found = cost("sglang:t2")
    reading = (WEIGHTS / 2 + 4 * CACHE / 2 / 2) / 700e9
    sent = 2 * 1 / 2 * 4 * 1024 * 2 / 80e9
    assert found.seconds == pytest.approx(1024 * (reading + 8 * (20e-6 + sent)))


def test_replicas_share_the_sequences():
    assert cost("sglang:d4").concurrent == 1
    assert cost("sglang:d4").seconds == pytest.approx(1024 * (WEIGHTS + CACHE / 2) / 700e9)


def test_a_cache_that_is_too_small_makes_waves():
    free = replace(TOY, memory=(3 * GIB + 2 * CACHE) / 0.9 + WEIGHTS + 1)
    found = cost("sglang:d1", hardware=free)
    assert found.concurrent == 2
    assert found.seconds == pytest.approx(2 * 1024 * (WEIGHTS + 2 * CACHE / 2) / 700e9)
    assert cost("huggingface:d1", hardware=free) is None, "it takes half of what is free"
    assert cost("sglang:d1", hardware=replace(TOY, memory=WEIGHTS)) is None


def test_few_sequences_touch_few_experts():
    experts = 4 * 3 * 1024 * 512 * 8
    all_weights = cost("sglang:d1", MOE).weights
    read = all_weights - 2 * experts * (1 - 2 / 8)  # one sequence: its two of eight
    assert cost("sglang:d1", MOE, sequences=1).seconds == pytest.approx(1024 * (read + CACHE / 2) / 700e9)


def test_compute_bounds_a_large_batch():
    slow = replace(TOY, flops=1e9)
    flops = 4 * (8 * 2**20 + 24 * 2**20) + 2 * 2**25
    assert cost("sglang:d1", hardware=slow).seconds == pytest.approx(1024 * 4 * flops / 0.46e9)
