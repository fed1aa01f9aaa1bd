"""Mistral and Mixtral. Mixtral's `intermediate_size` is the width of an expert; no layer is dense."""

from __future__ import annotations

from typing import Any

from areal_like.spec.families.decoder import decoder_fields, moe_fields, sliding_fields
from areal_like.spec.families.reader import ConfigReader

__all__ = ["from_config"]


def from_config(read: ConfigReader) -> dict[str, Any]:
    fields = decoder_fields(read)
    if read.architecture == "mixtral":
        fields |= moe_fields(read, width="intermediate_size")
    return fields | sliding_fields(read, tuple(range(fields["num_layers"])))
