"""Parameter names: Megatron-Core's local layers and TransformerEngine's layers call the same weights differently.

megatron-bridge knows the names of both. mbridge maps Hugging Face names to the names of TransformerEngine's layers with
grouped experts; `canonical_name` gives a parameter of either kind of layer that name. All names have the numbers of
layers and experts of the whole model.
"""

from __future__ import annotations

import re

from areal_like.spec import ModelSpec

__all__ = ["VALUE_HEAD", "canonical_name", "parameter_names", "whole_name"]

VALUE_HEAD = "output_layer.score"
"""A value model's own parameter (`values.ValueHead`), which no bridge knows."""

_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")
_ANY_EXPERT = re.compile(r"(\.mlp\.experts\.(?:local_experts\.|linear_fc[12]\.(?:weight|bias)))(\d+)")
_LOCAL_EXPERT = re.compile(r"\.mlp\.experts\.local_experts\.(\d+)\.(linear_fc[12])\.weight$")


def whole_name(name: str, *, first_layer: int, first_expert: int) -> str:
    """The name of either kind of layer, with the numbers of the whole model. For the arguments see `canonical_name`."""
    name = _LAYER.sub(lambda m: f"decoder.layers.{int(m[1]) + first_layer}.", name)
    return _ANY_EXPERT.sub(lambda m: f"{m[1]}{int(m[2]) + first_expert}", name)


def canonical_name(name: str, *, first_layer: int, first_expert: int, is_moe: bool) -> str:
    """The name in the whole model.

    Args:
        name: as `named_parameters` of a model chunk gives it.
        first_layer: number in the whole model of the chunk's first layer.
        first_expert: number in the whole model of the rank's first expert.
        is_moe: MoE layers keep a separate norm before the MLP; dense ones fold it into the first linear.
    """
    name = whole_name(name, first_layer=first_layer, first_expert=first_expert)
    if name.endswith(".input_layernorm.weight"):
        return name.replace(".input_layernorm.weight", ".self_attention.linear_qkv.layer_norm_weight")
    if name.endswith(".pre_mlp_layernorm.weight") and not is_moe:
        return name.replace(".pre_mlp_layernorm.weight", ".mlp.linear_fc1.layer_norm_weight")
    return _LOCAL_EXPERT.sub(r".mlp.experts.\2.weight\1", name)


def parameter_names(spec: ModelSpec) -> list[str]:
    """Canonical names of all parameters of the whole model; a tied model has no output layer of its own."""
    names = ["embedding.word_embeddings.weight", "decoder.final_layernorm.weight"]
    names += [] if spec.tied_embeddings else ["output_layer.weight"]
    attention = ["linear_proj.weight", "linear_qkv.weight", "linear_qkv.layer_norm_weight"]
    attention += ["linear_qkv.bias"] if spec.qkv_bias else []
    attention += ["q_layernorm.weight", "k_layernorm.weight"] if spec.qk_norm else []
    parts = [f"self_attention.{a}" for a in attention]
    if spec.is_moe:
        parts += ["pre_mlp_layernorm.weight", "mlp.router.weight"]
        parts += [f"mlp.experts.linear_fc{i}.weight{e}" for i in (1, 2) for e in range(spec.num_experts)]
    else:
        parts += ["mlp.linear_fc1.weight", "mlp.linear_fc2.weight", "mlp.linear_fc1.layer_norm_weight"]
    return names + [f"decoder.layers.{layer}.{part}" for layer in range(spec.num_layers) for part in parts]
