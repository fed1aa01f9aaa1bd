"""Names of parameters in the whole model, from either kind of layer."""

from __future__ import annotations

import pytest

from areal_like.engines.megatron.bridges.names import canonical_name

DENSE = [
    # outside the layers nothing changes
    ("embedding.word_embeddings.weight", "embedding.word_embeddings.weight"),
    ("decoder.final_layernorm.weight", "decoder.final_layernorm.weight"),
    ("output_layer.weight", "output_layer.weight"),
    # local layers keep norms beside the linears
    ("decoder.layers.0.input_layernorm.weight", "decoder.layers.4.self_attention.linear_qkv.layer_norm_weight"),
    ("decoder.layers.11.pre_mlp_layernorm.weight", "decoder.layers.15.mlp.linear_fc1.layer_norm_weight"),
    # TransformerEngine has them inside already
    (
        "decoder.layers.1.self_attention.linear_qkv.layer_norm_weight",
        "decoder.layers.5.self_attention.linear_qkv.layer_norm_weight",
    ),
    ("decoder.layers.1.mlp.linear_fc1.layer_norm_weight", "decoder.layers.5.mlp.linear_fc1.layer_norm_weight"),
    ("decoder.layers.0.self_attention.linear_qkv.bias", "decoder.layers.4.self_attention.linear_qkv.bias"),
    ("decoder.layers.0.self_attention.q_layernorm.weight", "decoder.layers.4.self_attention.q_layernorm.weight"),
    ("decoder.layers.0.mlp.linear_fc2.weight", "decoder.layers.4.mlp.linear_fc2.weight"),
]
MOE = [
    ("decoder.layers.0.pre_mlp_layernorm.weight", "decoder.layers.4.pre_mlp_layernorm.weight"),
    ("decoder.layers.0.input_layernorm.weight", "decoder.layers.4.self_attention.linear_qkv.layer_norm_weight"),
    ("decoder.layers.2.mlp.router.weight", "decoder.layers.6.mlp.router.weight"),
    # local layers: one module an expert; TransformerEngine: one module for all
    (
        "decoder.layers.2.mlp.experts.local_experts.3.linear_fc1.weight",
        "decoder.layers.6.mlp.experts.linear_fc1.weight67",
    ),
    ("decoder.layers.2.mlp.experts.linear_fc2.weight10", "decoder.layers.6.mlp.experts.linear_fc2.weight74"),
]


@pytest.mark.parametrize(("name", "expected"), DENSE)
def test_dense(name, expected):
    assert canonical_name(name, first_layer=4, first_expert=0, is_moe=False) == expected


@pytest.mark.parametrize(("name", "expected"), MOE)
def test_moe(name, expected):
    assert canonical_name(name, first_layer=4, first_expert=64, is_moe=True) == expected


def test_both_kinds_of_layer_meet_in_one_name():
    common = {"first_layer": 0, "first_expert": 8, "is_moe": True}
    local = canonical_name("decoder.layers.0.mlp.experts.local_experts.1.linear_fc2.weight", **common)
    grouped = canonical_name("decoder.layers.0.mlp.experts.linear_fc2.weight1", **common)
    assert local == grouped == "decoder.layers.0.mlp.experts.linear_fc2.weight9"


def test_no_two_parameters_share_a_name():
    names = [
        f"decoder.layers.{i}.mlp.experts.local_experts.{e}.linear_fc{f}.weight"
        for i in range(3)
        for e in range(3)
        for f in (1, 2)
    ]
    canonical = {canonical_name(n, first_layer=3, first_expert=3, is_moe=True) for n in names}
    assert len(canonical) == len(names)
