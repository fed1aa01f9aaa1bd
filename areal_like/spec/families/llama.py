"""Llama and those that write the same file (SmolLM2), SmolLM3, and any plain decoder that no other module knows."""

from __future__ import annotations

from typing import Any

from areal_like.spec.families.decoder import decoder_fields, moe_fields
from areal_like.spec.families.reader import ConfigReader

__all__ = ["from_config"]


def from_config(read: ConfigReader) -> dict[str, Any]:
    bias = read.flag("attention_bias")
    fields = decoder_fields(read, tied=read.architecture == "smollm3") | moe_fields(read)
    return fields | {"qkv_bias": bias, "output_bias": bias, "mlp_bias": read.flag("mlp_bias")}
