"""What is computed again in the backward pass, and that it changes nothing."""

from __future__ import annotations

import pytest

LENGTHS = [90, 5, 17, 2, 31, 44, 8]
FIELDS = ["recompute_granularity", "recompute_method", "recompute_num_layers", "recompute_modules"]


def selective(*modules):
    method = {"recompute_method": None, "recompute_num_layers": None}
    return method | {"recompute_granularity": "selective", "recompute_modules": modules or None}


@pytest.mark.parametrize(
    ("kind", "megatron", "counted", "calls"),
    [
        ("qwen3", selective(), "PackedAttention", (3, 6)),
        ("qwen3", selective("mlp"), "MLP", (3, 6)),
        ("qwen3", selective("mlp"), "PackedAttention", (3, 3)),
        ("qwen3-moe", selective("moe"), "PackedRouter", (3, 6)),
        ("qwen3", {"recompute_granularity": "full"}, "PackedAttention", (3, 6)),
        ("qwen3", {"recompute_method": "block", "recompute_num_layers": 2}, "PackedAttention", (3, 5)),
    ],
    ids=str,
)
def test_parts_run_again_and_gradients_are_the_same(solo, models, helpers, kind, megatron, counted, calls):
    """`calls` of a module a micro-batch of three layers: without and with gradient_checkpointing."""
    batch, results = helpers.random_batch(LENGTHS), []
    for on, expected in zip((False, True), calls, strict=True):
        solo.build("megatron:d1", models(kind), gradient_checkpointing=on, megatron=megatron)
        solo.group.call("count_calls", counted)
        figures = solo.train(batch)
        assert solo.group.call("calls") == [expected * figures["micro_batches"]]
        results.append((figures, solo.group.call("gradients")[0]))
    (plain, wanted), (figures, gradients) = results
    assert figures == pytest.approx(plain, rel=1e-6)
    assert all((gradients[n] - wanted[n]).abs().max() <= 1e-6 * wanted[n].abs().max() for n in wanted)


def test_norms_need_transformer_engine(solo, models):
    options = selective("core_attn", "layernorm")
    (error,) = solo.refuses("megatron:d1", models("qwen3"), gradient_checkpointing=True, megatron=options)
    assert error is not None and error[0] == "ValueError" and "layernorm needs TransformerEngine" in error[1]


def test_nothing_is_recomputed_unless_asked_for(solo, models):
    """The keys have defaults for the case that gradient_checkpointing is on."""
    solo.build("megatron:d1", models("qwen3"))
    assert solo.group.call("settings_of_chunks", FIELDS) == [[[None, None, None, ["core_attn"]]]]
    solo.build("megatron:d1", models("qwen3"), gradient_checkpointing=True)
    assert solo.group.call("settings_of_chunks", FIELDS) == [[["full", "uniform", 1, ["core_attn"]]]]
    options = selective("mlp", "core_attn")
    solo.build("megatron:d1", models("qwen3"), gradient_checkpointing=True, megatron=options)
    assert solo.group.call("settings_of_chunks", FIELDS) == [[["selective", None, None, ["mlp", "core_attn"]]]]
