"""Phi-3, Phi-3.5 and Phi-4 (dense): a Llama whose projections are stored fused, which changes no count."""

from __future__ import annotations

from typing import Any

from areal_like.spec.families.decoder import decoder_fields, sliding_fields
from areal_like.spec.families.reader import ConfigReader

__all__ = ["from_config"]


def from_config(read: ConfigReader) -> dict[str, Any]:
    fields = decoder_fields(read)
    return fields | sliding_fields(read, tuple(range(fields["num_layers"])))
