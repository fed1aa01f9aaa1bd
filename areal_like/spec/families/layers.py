"""What the feed-forward part of a layer holds, and the sums over a layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from areal_like.spec.families.attention import attention_weights, core_flops
from areal_like.spec.families.parts import LayerParameters

if TYPE_CHECKING:
    from areal_like.spec.model import ModelSpec

__all__ = ["forward_flops", "layer_parameters"]


def layer_parameters(spec: ModelSpec, layer: int) -> LayerParameters:
    attention = attention_weights(spec, layer).total
    norms = spec.norms_per_layer * spec.hidden_size
    if not spec.is_moe or layer in spec.dense_layers:
        mlp = _gated_mlp(spec, spec.intermediate_size, bias=spec.mlp_bias)
        return LayerParameters(attention, mlp, 0, 0, 0, norms)
    experts = spec.num_experts * _gated_mlp(spec, spec.moe_intermediate_size, bias=spec.expert_bias)
    shared = _gated_mlp(spec, spec.shared_expert_intermediate_size) + (
        spec.hidden_size if spec.shared_expert_gate else 0
    )
    router = spec.num_experts * (spec.hidden_size + (1 if spec.router_bias else 0))
    return LayerParameters(attention, 0, experts, shared, router, norms)


def forward_flops(spec: ModelSpec, layer: int, context: int) -> float:
    """Forward operations of one layer for one token; elementwise work is left out."""
    flops = 2.0 * attention_weights(spec, layer).matrices + core_flops(spec, layer, context)
    if not spec.is_moe or layer in spec.dense_layers:
        return flops + 2.0 * _gated_mlp(spec, spec.intermediate_size)
    flops += 2.0 * spec.experts_per_token * _gated_mlp(spec, spec.moe_intermediate_size)
    flops += 2.0 * _gated_mlp(spec, spec.shared_expert_intermediate_size)
    outputs = spec.num_experts + (1 if spec.shared_expert_gate else 0)
    return flops + 2.0 * outputs * spec.hidden_size


def _gated_mlp(spec: ModelSpec, width: int, *, bias: bool = False) -> int:
    """Gate, up and down; every family here has the gate (SwiGLU or GeGLU)."""
    return 3 * spec.hidden_size * width + (2 * width + spec.hidden_size if bias else 0)
