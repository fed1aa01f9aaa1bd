"""Qwen2, Qwen2.5, Qwen3, and their mixtures of experts."""

from __future__ import annotations

from typing import Any

from areal_like.spec.families.decoder import decoder_fields, moe_fields, sliding_fields
from areal_like.spec.families.reader import ConfigReader, ModelSpecError

__all__ = ["from_config"]


def from_config(read: ConfigReader) -> dict[str, Any]:
    architecture = read.architecture
    fields = decoder_fields(read, head_dim=128 if architecture.startswith("qwen3") else None)
    layers = fields["num_layers"]
    if architecture.endswith("_moe"):
        fields |= moe_fields(read) | {"dense_layers": _dense_layers(read, layers)}
    if architecture in ("qwen2", "qwen2_moe"):
        # Biases of queries, keys and values are part of Qwen2 whatever the file says; Qwen2-MoE can leave them out.
        fields["qkv_bias"] = architecture == "qwen2" or read.flag("qkv_bias", True)
    else:
        bias = read.flag("attention_bias")
        fields |= {"qk_norm": True, "qkv_bias": bias, "output_bias": bias}
    if architecture == "qwen2_moe":
        width = read.number("shared_expert_intermediate_size")
        fields |= {"shared_expert_intermediate_size": width, "shared_expert_gate": True}
    if read.flag("use_sliding_window"):
        first = read.number("max_window_layers", 28)
        fields |= sliding_fields(read, tuple(range(min(first, layers), layers)))
    return fields


def _dense_layers(read: ConfigReader, layers: int) -> tuple[int, ...]:
    listed = read.config.get("mlp_only_layers") or []
    if not isinstance(listed, list) or not all(isinstance(layer, int) for layer in listed):
        raise ModelSpecError(f"{read.source}: 'mlp_only_layers' must be a list of layer numbers, not {listed!r}")
    step = read.number("decoder_sparse_step", 1) or 1
    return tuple(layer for layer in range(layers) if layer in listed or (layer + 1) % step)
