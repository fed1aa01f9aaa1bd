"""DeepSeek-V2, V3 and R1, and Kimi-K2, which is built as V3: latent attention and fine-grained experts."""

from __future__ import annotations

from typing import Any

from areal_like.spec.families.decoder import decoder_fields, moe_fields
from areal_like.spec.families.parts import LatentAttention
from areal_like.spec.families.reader import ConfigReader

__all__ = ["from_config"]


def from_config(read: ConfigReader) -> dict[str, Any]:
    latent = LatentAttention(
        q_lora_rank=read.number("q_lora_rank", 0),
        kv_lora_rank=read.number("kv_lora_rank"),
        qk_nope_head_dim=read.number("qk_nope_head_dim"),
        qk_rope_head_dim=read.number("qk_rope_head_dim"),
        v_head_dim=read.number("v_head_dim"),
    )
    fields = decoder_fields(read) | moe_fields(read)
    bias = read.flag("attention_bias")
    # `head_dim` in these files is the rotary part alone (Transformers writes it so); a head of queries has both parts.
    fields |= {
        "head_dim": latent.qk_nope_head_dim + latent.qk_rope_head_dim,
        "latent_attention": latent,
        "qkv_bias": bias,
        "output_bias": bias,
        "mtp_layers": read.number("num_nextn_predict_layers", 0),
    }
    if "num_experts" not in fields:
        return fields
    shared = read.number("n_shared_experts", 0) * fields["moe_intermediate_size"]
    first, step = read.number("first_k_dense_replace", 0), read.number("moe_layer_freq", 1) or 1
    dense = tuple(layer for layer in range(fields["num_layers"]) if layer < first or layer % step)
    return fields | {
        "dense_layers": dense,
        "shared_expert_intermediate_size": shared,
        "router_correction_bias": read.architecture != "deepseek_v2",
    }
