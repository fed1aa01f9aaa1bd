"""The text part of Qwen3.5: three layers of Gated DeltaNet to one of gated attention, dense or with experts."""

from __future__ import annotations

from typing import Any

from areal_like.spec.families.decoder import decoder_fields, every_nth_full, moe_fields
from areal_like.spec.families.parts import LinearAttention
from areal_like.spec.families.reader import ConfigReader

__all__ = ["from_config"]


def from_config(read: ConfigReader) -> dict[str, Any]:
    moe = read.architecture == "qwen3_5_moe_text"
    fields = decoder_fields(read, head_dim=256, intermediate_size=0 if moe else None)
    bias = read.flag("attention_bias")
    fields |= {"qk_norm": True, "attention_output_gate": True, "qkv_bias": bias, "output_bias": bias}
    layers = fields["num_layers"]
    linear = read.layers("layer_types", "linear_attention", layers)
    if linear is None:
        linear = every_nth_full(layers, read.number("full_attention_interval", 4) or 4)
    fields |= {
        "linear_layers": linear,
        "linear_attention": LinearAttention(
            kind="gated_delta",
            key_heads=read.number("linear_num_key_heads"),
            value_heads=read.number("linear_num_value_heads"),
            key_head_dim=read.number("linear_key_head_dim"),
            value_head_dim=read.number("linear_value_head_dim"),
            conv_kernel=read.number("linear_conv_kernel_dim"),
        ),
        "mtp_layers": read.number("mtp_num_hidden_layers", 0),
    }
    if moe:
        width = read.number("shared_expert_intermediate_size")
        fields |= moe_fields(read) | {"shared_expert_intermediate_size": width, "shared_expert_gate": True}
    return fields
