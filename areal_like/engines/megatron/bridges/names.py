"""Parameter names: Megatron-Core's local layers and TransformerEngine's layers call the same weights differently.

mbridge maps Hugging Face names to the names of TransformerEngine layers with grouped experts; `canonical_name` gives a
parameter of either kind of layer that name, with the layer and expert numbers of the whole model.
"""

from __future__ import annotations

import re

__all__ = ["VALUE_HEAD", "canonical_name"]

VALUE_HEAD = "output_layer.score"
"""A value model's own parameter (`values.ValueHead`), which no bridge knows."""

_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")
_LOCAL_EXPERT = re.compile(r"\.mlp\.experts\.local_experts\.(\d+)\.(linear_fc[12])\.weight$")
_GROUPED_EXPERT = re.compile(r"\.mlp\.experts\.(linear_fc[12])\.weight(\d+)$")


def canonical_name(name: str, *, first_layer: int, first_expert: int, is_moe: bool) -> str:
    """The name in the whole model.

    Args:
        name: as `named_parameters` of a model chunk gives it.
        first_layer: number in the whole model of the chunk's first layer.
        first_expert: number in the whole model of the rank's first expert.
        is_moe: MoE layers keep a separate norm before the MLP; dense ones fold it into the first linear.
    """
    match = _LAYER.match(name)
    if match is None:
        return name
    layer = int(match.group(1)) + first_layer
    rest = name[match.end() :]
    if rest == "input_layernorm.weight":
        rest = "self_attention.linear_qkv.layer_norm_weight"
    elif rest == "pre_mlp_layernorm.weight" and not is_moe:
        rest = "mlp.linear_fc1.layer_norm_weight"
    full = f"decoder.layers.{layer}.{rest}"
    if match := _LOCAL_EXPERT.search(full):
        return f"{full[: match.start()]}.mlp.experts.{match.group(2)}.weight{int(match.group(1)) + first_expert}"
    if match := _GROUPED_EXPERT.search(full):
        return f"{full[: match.start()]}.mlp.experts.{match.group(1)}.weight{int(match.group(2)) + first_expert}"
    return full
