"""Every rule with a layout that breaks it and one that does not."""

from __future__ import annotations

import pytest

from areal_like.alloc import ModelAllocation
from areal_like.preflight import check_layout
from areal_like.spec import ModelSpec

BASE = {
    "model_type": "llama",
    "num_hidden_layers": 4,
    "hidden_size": 576,
    "num_attention_heads": 12,
    "num_key_value_heads": 6,
    "intermediate_size": 1536,
    "vocab_size": 131,
}
MOE = BASE | {
    "model_type": "qwen3_moe",
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "norm_topk_prob": True,
}


def findings(text, config):
    return check_layout(ModelAllocation.parse(text), ModelSpec.from_config(config))


CASES = [
    # code, layout and changes that break the rule, layout and changes that do not, words of message and help
    ("AL301", "megatron:d1", {"model_type": "gpt2"}, "megatron:d1", {}, "'gpt2'", "llama, qwen2, qwen3, qwen3_moe"),
    ("AL302", "megatron:d1", {"mlp_bias": True}, "megatron:d1", {"mlp_bias": False}, "mlp_bias", "another model"),
    ("AL302", "megatron:d1", {"rope_scaling": {"type": "yarn"}}, "megatron:d1", {}, "'yarn'", "without rope scaling"),
    (
        "AL303",
        "megatron:t5",
        {"intermediate_size": 1535},
        "megatron:t6",
        {},
        "12 attention heads do not divide by t5",
        "t can be 1",
    ),
    ("AL304", "megatron:t4", {}, "megatron:t3", {}, "6 key-value heads do not divide by t4", "t can be 1, 2, 3, 6, 12"),
    (
        "AL305",
        "megatron:t2",
        {"intermediate_size": 1535},
        "megatron:t5",
        {"intermediate_size": 1535, "num_attention_heads": 10, "num_key_value_heads": 5},
        "the MLP width 1535 does not divide by t2",
        "t can be 1",
    ),
    ("AL307", "megatron:d2e2", {}, "megatron:d2", {}, "no experts for e2", "leave the experts' letters out"),
    ("AL307", "megatron:(attn:d2|ffn:t2)", {}, "megatron:t2", {}, "the experts' t2", "leave the experts' letters out"),
    ("AL309", "megatron:p5", {}, "megatron:p4", {}, "4 layers cannot fill the 5 stages of p5", "use p4 or less"),
]
MOE_CASES = [
    (
        "AL306",
        "megatron:(attn:d5|ffn:t5)",
        "megatron:(attn:d3|ffn:t3)",
        "the expert width 12 does not divide by the experts' t5",
        "t can be 1, 2, 3, 4, 6, 12",
    ),
    ("AL308", "megatron:d4e4", "megatron:d6e6", "6 experts do not divide by e4", "e can be 1, 2, 3, 6"),
]


@pytest.mark.parametrize(("code", "bad", "changes", "good", "good_changes", "message", "help"), CASES)
def test_a_dense_model(code, bad, changes, good, good_changes, message, help):
    (found,) = findings(bad, BASE | changes)
    assert (found.code, found.severity) == (code, "error")
    assert message in found.message and help in found.help
    assert found.source == str(ModelAllocation.parse(bad))
    assert findings(good, BASE | good_changes) == []


@pytest.mark.parametrize(("code", "bad", "good", "message", "help"), MOE_CASES)
def test_a_mixture_of_experts(code, bad, good, message, help):
    (found,) = findings(bad, MOE)
    assert (found.code, found.severity) == (code, "error")
    assert message in found.message and help in found.help
    assert findings(good, MOE) == []


@pytest.mark.parametrize(
    "text",
    ["megatron:d1", "megatron:d2", "megatron:d1t3", "megatron:d1p2", "megatron:d1p2t3", "megatron:p30"],
)
def test_what_the_demo_model_can_do(text):
    assert check_layout(ModelAllocation.parse(text), ModelSpec.bundled("demo:smollm2-135m-instruct")) == []


@pytest.mark.parametrize("text", ["megatron:d2t4p2e8", "megatron:(attn:d4t2p2|ffn:e8p2)", "megatron:t4p12"])
def test_what_a_large_mixture_can_do(text):
    assert check_layout(ModelAllocation.parse(text), ModelSpec.bundled("Qwen/Qwen3-30B-A3B")) == []


def test_the_demo_model_has_nine_heads():
    (found,) = check_layout(ModelAllocation.parse("megatron:d1t2"), ModelSpec.bundled("demo:smollm2-135m-instruct"))
    assert found.code == "AL303" and found.message == "9 attention heads do not divide by t2"
    assert found.help == "t can be 1, 3"


def test_independent_faults_are_all_found():
    codes = [d.code for d in findings("megatron:d2p5t5e2c2", BASE | {"mlp_bias": True})]
    assert codes == ["AL302", "AL303", "AL305", "AL307", "AL309"]
