"""`ModelSpec` against Transformers: its config.json files are read right, and its parameter counts are ours."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from areal_like.spec import SUPPORTED_ARCHITECTURES, ModelSpec, ModelSpecError

TINY = {
    "vocab_size": 131,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 77,
}
CONFIGS = {
    "llama": LlamaConfig(**TINY),
    "llama-tied": LlamaConfig(**TINY, tie_word_embeddings=True),
    "llama-head-dim": LlamaConfig(**TINY, head_dim=24),
    "qwen2": Qwen2Config(**TINY),
    "qwen2-tied": Qwen2Config(**TINY, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**TINY, head_dim=32),
    "qwen3_moe": Qwen3MoeConfig(
        **TINY, head_dim=16, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=24, norm_topk_prob=True
    ),
}
KNOWN = {
    "demo:smollm2-135m-instruct": 134_515_008,
    "HuggingFaceTB/SmolLM2-135M-Instruct": 134_515_008,
    "Qwen/Qwen2.5-1.5B-Instruct": 1_543_714_304,
    "Qwen/Qwen3-0.6B": 596_049_920,
    "Qwen/Qwen3-30B-A3B": 30_532_122_624,
}
"""Parameters as the model cards and the checkpoints' indices have them."""


def count(config) -> int:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("name", CONFIGS)
def test_what_transformers_writes_is_read(name, tmp_path):
    config = CONFIGS[name]
    config.save_pretrained(tmp_path)
    spec = ModelSpec.from_path(tmp_path)
    assert spec == ModelSpec.from_path(tmp_path / "config.json")
    assert spec.architecture == config.model_type in SUPPORTED_ARCHITECTURES
    assert (spec.num_layers, spec.hidden_size, spec.vocab_size) == (3, 64, 131)
    assert (spec.num_attention_heads, spec.num_key_value_heads) == (4, 2)
    assert spec.head_dim == getattr(config, "head_dim", None) or 16
    assert spec.tied_embeddings == config.tie_word_embeddings
    assert spec.max_position_embeddings == 77 and spec.rope_scaling == "default"
    assert spec.unsupported == ()
    assert spec.is_moe == (name == "qwen3_moe")
    assert (spec.num_experts, spec.experts_per_token, spec.moe_intermediate_size) == (
        (6, 2, 24) if spec.is_moe else (0, 0, 0)
    )
    assert spec.parameters() == count(config)


@pytest.mark.parametrize("name", KNOWN)
def test_bundled_models_have_the_parameters_of_transformers(name):
    spec = ModelSpec.bundled(name)
    assert spec is not None and spec.parameters() == KNOWN[name]
    shape = {
        "num_hidden_layers": spec.num_layers,
        "hidden_size": spec.hidden_size,
        "num_attention_heads": spec.num_attention_heads,
        "num_key_value_heads": spec.num_key_value_heads,
        "head_dim": spec.head_dim,
        "intermediate_size": spec.intermediate_size,
        "vocab_size": spec.vocab_size,
        "tie_word_embeddings": spec.tied_embeddings,
    }
    if spec.is_moe:
        shape |= {"num_experts": spec.num_experts, "moe_intermediate_size": spec.moe_intermediate_size}
    assert count(AutoConfig.for_model(spec.architecture, **shape)) == KNOWN[name]


def test_an_unknown_name_is_not_bundled():
    assert ModelSpec.bundled("Qwen/Qwen3-0.6") is None


def test_one_layer_by_hand():
    """SmolLM2: q and o 576 x 576, k and v 576 x 192, three times 576 x 1536, two norms."""
    spec = ModelSpec.bundled("demo:smollm2-135m-instruct")
    assert spec.layer_parameters() == 2 * 576 * 576 + 2 * 576 * 192 + 3 * 576 * 1536 + 2 * 576
    assert spec.layer_flops() == 2 * (spec.layer_parameters() - 2 * 576), "two operations a weight"
    assert spec.layer_flops(context=100) - spec.layer_flops() == 2 * 2 * 576 * 100, "scores and values"
    assert spec.head_flops() == 2 * 576 * 49152


def test_only_the_chosen_experts_compute():
    spec = ModelSpec.bundled("Qwen/Qwen3-30B-A3B")
    active = 48 * spec.layer_flops() / 2 + 2 * 151936 * 2048
    assert active == pytest.approx(3.3e9, rel=0.02), "the A3B of its name"


def test_the_other_names_of_a_key():
    """Transformers 5 writes num_local_experts; both names mean the same, the first one wins."""
    config = CONFIGS["qwen3_moe"].to_dict()
    experts = config.pop("num_experts", None) or config.pop("num_local_experts")
    config.pop("num_local_experts", None)
    for name in ("num_experts", "num_local_experts"):
        assert ModelSpec.from_config(config | {name: experts}).num_experts == 6
    assert ModelSpec.from_config(config | {"num_experts": 6, "num_local_experts": 3}).num_experts == 6


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({}, "default"),
        ({"rope_parameters": None}, "default"),
        ({"rope_scaling": None}, "default"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, "default"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "llama3"),
        ({"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2.0}}, "linear"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "yarn"),
    ],
    ids=str,
)
def test_rope_scaling_in_all_its_spellings(change, kind):
    config = {k: v for k, v in CONFIGS["llama"].to_dict().items() if k not in ("rope_parameters", "rope_scaling")}
    assert ModelSpec.from_config(config | change).rope_scaling == kind


@pytest.mark.parametrize(
    ("name", "change", "word"),
    [
        ("qwen2", {"use_sliding_window": True}, "use_sliding_window"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act"),
        ("llama", {"mlp_bias": True}, "mlp_bias"),
        ("llama", {"attention_bias": True}, "attention_bias"),
        ("qwen3", {"attention_bias": True}, "attention_bias"),
        ("qwen3_moe", {"mlp_only_layers": [0]}, "mlp_only_layers"),
        ("qwen3_moe", {"decoder_sparse_step": 2}, "decoder_sparse_step"),
        ("qwen3_moe", {"norm_topk_prob": False}, "norm_topk_prob"),
    ],
)
def test_features_that_no_engine_computes_are_named(name, change, word):
    (feature,) = ModelSpec.from_config(CONFIGS[name].to_dict() | change).unsupported
    assert word in feature


@pytest.mark.parametrize(
    "key",
    ["num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "vocab_size", "model_type"],
)
def test_a_missing_key_is_named(key):
    config = CONFIGS["llama"].to_dict()
    del config[key]
    with pytest.raises(ModelSpecError, match=f"here.json has no '{key}'"):
        ModelSpec.from_config(config, source="here.json")


def test_a_missing_width_of_the_experts_is_named():
    config = CONFIGS["qwen3_moe"].to_dict()
    del config["moe_intermediate_size"]
    with pytest.raises(ModelSpecError, match="has no 'moe_intermediate_size'"):
        ModelSpec.from_config(config)


@pytest.mark.parametrize("value", ["64", 64.0, True, -1, [64], {}])
@pytest.mark.parametrize("key", ["hidden_size", "num_key_value_heads", "head_dim"])
def test_a_value_that_is_no_number_is_named(key, value):
    with pytest.raises(ModelSpecError, match=f"'{key}' must be a whole number"):
        ModelSpec.from_config(CONFIGS["llama"].to_dict() | {key: value})


def test_numbers_that_must_be_positive():
    for key in ("num_attention_heads", "hidden_size"):
        with pytest.raises(ModelSpecError, match=f"'{key}'"):
            ModelSpec.from_config(CONFIGS["llama"].to_dict() | {key: 0})


def test_files_that_are_no_model(tmp_path):
    with pytest.raises(ModelSpecError, match=r"no config\.json at"):
        ModelSpec.from_path(tmp_path)
    with pytest.raises(ModelSpecError, match=r"no config\.json at"):
        ModelSpec.from_path(tmp_path / "absent")
    file = tmp_path / "config.json"
    for content, words in ((b"{", "is not JSON"), (b"\xff\xfe", "is not JSON"), (b"[1]", "holds a list")):
        file.write_bytes(content)
        with pytest.raises(ModelSpecError, match=words):
            ModelSpec.from_path(tmp_path)
    file.write_text(json.dumps({"model_type": "gemma3", "text_config": {"hidden_size": 1}}))
    with pytest.raises(ModelSpecError, match="multimodal"):
        ModelSpec.from_path(tmp_path)


def test_reading_a_model_needs_neither_torch_nor_transformers():
    code = (
        "import sys; from areal_like.spec import ModelSpec; import areal_like.preflight;"
        "assert ModelSpec.bundled('Qwen/Qwen3-0.6B');"
        "print([m for m in ('torch', 'transformers', 'megatron') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
