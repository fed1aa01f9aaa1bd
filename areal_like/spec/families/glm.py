"""GLM-4.5 and 4.6: grouped-query attention with biases, fine-grained experts as in DeepSeek-V3."""

from __future__ import annotations

from typing import Any

from areal_like.spec.families.decoder import decoder_fields, moe_fields
from areal_like.spec.families.reader import ConfigReader

__all__ = ["from_config"]


def from_config(read: ConfigReader) -> dict[str, Any]:
    fields = decoder_fields(read) | moe_fields(read)
    return fields | {
        "qkv_bias": read.flag("attention_bias"),
        "qk_norm": read.flag("use_qk_norm"),
        "dense_layers": tuple(range(min(read.number("first_k_dense_replace", 1), fields["num_layers"]))),
        "shared_expert_intermediate_size": read.number("n_shared_experts", 1) * fields.get("moe_intermediate_size", 0),
        "router_correction_bias": True,
        "mtp_layers": read.number("num_nextn_predict_layers", 0),
    }
