"""Gemma 2 and the text part of Gemma 3: norms before and after each part, sliding windows on most layers."""

from __future__ import annotations

from typing import Any

from areal_like.spec.families.decoder import decoder_fields, every_nth_full, sliding_fields
from areal_like.spec.families.reader import ConfigReader

__all__ = ["from_config"]


def from_config(read: ConfigReader) -> dict[str, Any]:
    fields = decoder_fields(read, tied=True, head_dim=256)
    bias = read.flag("attention_bias")
    gemma3 = read.architecture == "gemma3_text"
    interval = (read.number("sliding_window_pattern", 6) or 6) if gemma3 else 2
    fields |= sliding_fields(read, every_nth_full(fields["num_layers"], interval))
    return fields | {"norms_per_layer": 4, "qk_norm": gemma3, "qkv_bias": bias, "output_bias": bias}
