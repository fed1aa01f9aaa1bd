"""OLMo 2: norms after attention and MLP (two a layer), and of queries and keys over all heads at once."""

from __future__ import annotations

from typing import Any

from areal_like.spec.families.decoder import decoder_fields
from areal_like.spec.families.reader import ConfigReader

__all__ = ["from_config"]


def from_config(read: ConfigReader) -> dict[str, Any]:
    bias = read.flag("attention_bias")
    return decoder_fields(read) | {
        "qk_norm": True,
        "qk_norm_over_heads": True,
        "qkv_bias": bias,
        "output_bias": bias,
    }
