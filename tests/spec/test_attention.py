"""Which attention, from the three things that decide it; the lengths that FlexAttention is compiled for."""

from __future__ import annotations

import itertools

import pytest

from areal_like.spec import ModelSpec, ModelSpecError, choose_attention, flex_length
from areal_like.spec import attention as module

BASE = {
    "model_type": "qwen2",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "vocab_size": 100,
}


@pytest.mark.parametrize("asked", ["fused", "flex"])
def test_what_is_asked_for_is_what_is_used(asked):
    for deterministic, cp, dropout, float32 in itertools.product((True, False), (1, 2), (True, False), (True, False)):
        assert choose_attention(asked, deterministic=deterministic, cp=cp, dropout=dropout, float32=float32) == asked


@pytest.mark.parametrize("faster", ["fused", "flex"])
def test_auto_takes_the_faster_of_those_that_can(monkeypatch, faster):
    monkeypatch.setattr(module, "FASTER", faster)
    assert choose_attention("auto", deterministic=False) == faster
    assert choose_attention("auto", deterministic=True) == "flex"
    assert choose_attention("auto", deterministic=False, cp=2) == "fused"
    assert choose_attention("auto", deterministic=False, dropout=True) == "fused"
    assert choose_attention("auto", deterministic=False, float32=True) == "fused"


def test_few_lengths_and_none_shorter():
    lengths = {flex_length(n) for n in range(1, 40_000, 7)}
    assert len(lengths) == 17 and all(n % 128 == 0 for n in lengths)
    assert all(n <= flex_length(n) < max(2 * n, 256) for n in range(1, 20_000, 13))


def test_dropout_is_read_from_the_model():
    assert ModelSpec.from_config(BASE).attention_dropout == 0.0
    assert ModelSpec.from_config({**BASE, "attention_dropout": 0.1}).attention_dropout == 0.1
    with pytest.raises(ModelSpecError, match=r"'attention_dropout' must be a number from 0 to 1, not '0\.1'"):
        ModelSpec.from_config({**BASE, "attention_dropout": "0.1"})
