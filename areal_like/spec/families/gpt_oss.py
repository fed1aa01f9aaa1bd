"""gpt-oss: biases everywhere, a learned sink for each head, a sliding window on every second layer."""

from __future__ import annotations

from typing import Any

from areal_like.spec.families.decoder import decoder_fields, every_nth_full, moe_fields, sliding_fields
from areal_like.spec.families.reader import ConfigReader

__all__ = ["from_config"]


def from_config(read: ConfigReader) -> dict[str, Any]:
    fields = decoder_fields(read, head_dim=64) | moe_fields(read, width="intermediate_size")
    fields |= sliding_fields(read, every_nth_full(fields["num_layers"], 2))
    bias = read.flag("attention_bias", True)
    return fields | {
        "qkv_bias": bias,
        "output_bias": bias,
        "attention_sinks": True,
        "router_bias": True,
        "expert_bias": True,
    }
