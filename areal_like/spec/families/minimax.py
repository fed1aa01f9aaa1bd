"""MiniMax-Text-01 and M1 (seven layers of lightning attention to one of softmax), and M2 (softmax alone)."""

from __future__ import annotations

from typing import Any

from areal_like.spec.families.decoder import decoder_fields, moe_fields
from areal_like.spec.families.parts import LinearAttention
from areal_like.spec.families.reader import ConfigReader, ModelSpecError

__all__ = ["from_config"]


def from_config(read: ConfigReader) -> dict[str, Any]:
    fields = decoder_fields(read) | moe_fields(read, width="intermediate_size")
    if read.architecture == "minimax_m2":
        modules = read.number("num_mtp_modules", 0) if read.flag("use_mtp") else 0
        return fields | {
            "qk_norm": read.flag("use_qk_norm", True),
            "qk_norm_over_heads": True,
            "router_correction_bias": True,
            "mtp_layers": modules * read.number("mtp_transformer_layers", 1),
        }
    heads, head_dim = fields["num_attention_heads"], fields["head_dim"]
    return fields | {
        "linear_layers": _lightning_layers(read, fields["num_layers"]),
        "linear_attention": LinearAttention("lightning", heads, heads, head_dim, head_dim),
    }


def _lightning_layers(read: ConfigReader, layers: int) -> tuple[int, ...]:
    """`layer_types` as Transformers has it, or `attn_type_list` of the original files (0 is lightning)."""
    listed = read.layers("layer_types", "linear_attention", layers)
    if listed is None:
        listed = read.layers("attn_type_list", 0, layers)
    if listed is None:
        raise ModelSpecError(
            f"{read.source} has neither 'layer_types' nor 'attn_type_list', which say what is lightning"
        )
    return listed
