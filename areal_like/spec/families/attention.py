"""What the attention of a layer holds and computes, for each kind. Biases and norms as the models of Transformers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from areal_like.spec.families.parts import LatentAttention, LinearAttention, Weights

if TYPE_CHECKING:
    from areal_like.spec.model import ModelSpec

__all__ = ["attention_weights", "core_flops"]


def attention_weights(spec: ModelSpec, layer: int) -> Weights:
    if spec.linear_attention is not None and layer in spec.linear_layers:
        if spec.linear_attention.kind == "lightning":
            return _lightning(spec, spec.linear_attention)
        return _gated_delta(spec, spec.linear_attention)
    return _latent(spec, spec.latent_attention) if spec.latent_attention is not None else _grouped(spec)


def core_flops(spec: ModelSpec, layer: int, context: int) -> float:
    """Operations of scores and values for one token that attends to `context` tokens on average.

    Linear attention does not depend on it: lightning adds an outer product to its state and reads it; the delta rule
    also reads what the state holds for the key before it writes.
    """
    linear = spec.linear_attention
    if linear is not None and layer in spec.linear_layers:
        state = linear.value_heads * linear.key_head_dim * linear.value_head_dim
        return (4.0 if linear.kind == "lightning" else 6.0) * state
    if layer in spec.sliding_layers:
        context = min(context, spec.sliding_window)
    value_dim = spec.latent_attention.v_head_dim if spec.latent_attention is not None else spec.head_dim
    return 2.0 * spec.num_attention_heads * (spec.head_dim + value_dim) * context


def _grouped(spec: ModelSpec) -> Weights:
    """Multi-head, grouped-query and multi-query attention."""
    q_width = spec.head_dim * spec.num_attention_heads
    kv_width = spec.head_dim * spec.num_key_value_heads
    # With an output gate the query projection is twice as wide: the second half gates the heads' outputs.
    qkv_width = q_width * (2 if spec.attention_output_gate else 1) + 2 * kv_width
    vectors = qkv_width if spec.qkv_bias else 0
    vectors += spec.hidden_size if spec.output_bias else 0
    if spec.qk_norm:
        vectors += q_width + kv_width if spec.qk_norm_over_heads else 2 * spec.head_dim
    vectors += spec.num_attention_heads if spec.attention_sinks else 0
    return Weights(spec.hidden_size * (qkv_width + q_width), vectors)


def _latent(spec: ModelSpec, latent: LatentAttention) -> Weights:
    hidden, heads = spec.hidden_size, spec.num_attention_heads
    q_width = heads * (latent.qk_nope_head_dim + latent.qk_rope_head_dim)
    if latent.q_lora_rank:
        matrices, vectors = latent.q_lora_rank * (hidden + q_width), latent.q_lora_rank
    else:
        matrices, vectors = hidden * q_width, 0
    matrices += hidden * (latent.kv_lora_rank + latent.qk_rope_head_dim)
    matrices += latent.kv_lora_rank * heads * (latent.qk_nope_head_dim + latent.v_head_dim)
    matrices += heads * latent.v_head_dim * hidden
    vectors += latent.kv_lora_rank
    if spec.qkv_bias:  # of the two down-projections
        vectors += latent.q_lora_rank + latent.kv_lora_rank + latent.qk_rope_head_dim
    vectors += hidden if spec.output_bias else 0
    return Weights(matrices, vectors)


def _lightning(spec: ModelSpec, linear: LinearAttention) -> Weights:
    """Queries, keys, values, an output gate and the output projection, all of the heads' width; a norm over it."""
    width = linear.value_heads * linear.value_head_dim
    return Weights(5 * spec.hidden_size * width, width)


def _gated_delta(spec: ModelSpec, linear: LinearAttention) -> Weights:
    keys = linear.key_heads * linear.key_head_dim
    values = linear.value_heads * linear.value_head_dim
    # Projections of q, k, v; the gate z; the two scalars of a head (write strength and decay); the output.
    matrices = spec.hidden_size * (2 * keys + values + values + 2 * linear.value_heads) + values * spec.hidden_size
    matrices += (2 * keys + values) * linear.conv_kernel
    return Weights(matrices, 2 * linear.value_heads + linear.value_head_dim)
