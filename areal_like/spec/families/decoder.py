"""The numbers that every family writes under the same keys, and the features no engine of this version computes."""

from __future__ import annotations

from typing import Any

from areal_like.spec.families.reader import ConfigReader

__all__ = ["decoder_fields", "every_nth_full", "moe_fields", "rope_scaling", "sliding_fields"]


def decoder_fields(
    read: ConfigReader, *, tied: bool = False, head_dim: int | None = None, intermediate_size: int | None = None
) -> dict[str, Any]:
    """Fields of a plain decoder. `tied`, `head_dim`, `intermediate_size`: values of the family where the key is absent.

    Raises:
        ModelSpecError: see `ConfigReader`.
    """
    heads, hidden = read.positive("num_attention_heads"), read.positive("hidden_size")
    return {
        "architecture": read.architecture,
        "num_layers": read.number("num_hidden_layers"),
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": read.number("num_key_value_heads", heads),
        "head_dim": read.number("head_dim", hidden // heads if head_dim is None else head_dim),
        "intermediate_size": read.number("intermediate_size", intermediate_size),
        "vocab_size": read.number("vocab_size"),
        "tied_embeddings": read.flag("tie_word_embeddings", tied),
        "max_position_embeddings": read.number("max_position_embeddings", 0),
        "rope_scaling": rope_scaling(read),
        "attention_dropout": read.fraction("attention_dropout", 0.0),
        "unsupported": tuple(_unsupported(read)),
    }


def moe_fields(read: ConfigReader, *, width: str = "moe_intermediate_size") -> dict[str, Any]:
    """Fields of routed experts; `width` is the key of their width. Empty without experts."""
    # Transformers 5 writes `num_local_experts` where older files have `num_experts` or `n_routed_experts`.
    experts = read.number("num_experts", read.number("n_routed_experts", read.number("num_local_experts", 0)))
    if not experts:
        return {}
    return {
        "num_experts": experts,
        "experts_per_token": read.number("num_experts_per_tok", 0),
        "moe_intermediate_size": read.number(width),
    }


def sliding_fields(read: ConfigReader, layers: tuple[int, ...]) -> dict[str, Any]:
    """Fields of sliding-window attention on the layers that `layer_types` names, or on `layers` without it."""
    window = read.number("sliding_window", 0)
    if not window:
        return {}
    listed = read.layers("layer_types", "sliding_attention", read.number("num_hidden_layers"))
    sliding = layers if listed is None else listed
    return {"sliding_window": window, "sliding_layers": sliding} if sliding else {}


def every_nth_full(count: int, n: int) -> tuple[int, ...]:
    """The other layers: numbers of the layers that are not the last of each run of `n`."""
    return tuple(layer for layer in range(count) if (layer + 1) % n)


def rope_scaling(read: ConfigReader) -> str:
    """The kind of rotary scaling ("default" when there is none)."""
    # Transformers 5 writes `rope_parameters` (for Gemma 3 one for each kind of layer); earlier versions `rope_scaling`,
    # with `type` or `rope_type`.
    for key in ("rope_parameters", "rope_scaling"):
        value = read.config.get(key)
        if isinstance(value, dict) and isinstance(value.get("full_attention"), dict):
            value = value["full_attention"]
        if isinstance(value, dict):
            kind = value.get("rope_type", value.get("type"))
            if kind:
                return str(kind)
    return "default"


def _unsupported(read: ConfigReader) -> list[str]:
    config, architecture = read.config, read.architecture
    found = []
    if config.get("use_sliding_window"):
        found.append("sliding-window attention (use_sliding_window)")
    if config.get("hidden_act", "silu") != "silu":
        found.append(f"activation {config['hidden_act']!r} (hidden_act)")
    if config.get("mlp_bias"):
        found.append("biases in the MLP (mlp_bias)")
    if config.get("attention_bias") and architecture in ("llama", "qwen3", "qwen3_moe"):
        found.append("biases in the attention projections (attention_bias)")
    if config.get("mlp_only_layers"):
        found.append("dense layers between MoE layers (mlp_only_layers)")
    if config.get("decoder_sparse_step", 1) not in (None, 1):
        found.append("dense layers between MoE layers (decoder_sparse_step)")
    if architecture == "qwen3_moe" and not config.get("norm_topk_prob", False):
        # Megatron's softmax after the top-k equals normalised probabilities; unnormalised ones are another function.
        found.append("router probabilities that are not normalised over the chosen experts (norm_topk_prob: false)")
    rope = config.get("rope_parameters")
    partial = config.get("partial_rotary_factor") or (
        rope.get("partial_rotary_factor") if isinstance(rope, dict) else None
    )
    if partial not in (None, 1, 1.0):
        found.append(f"positions on a part of each head (partial_rotary_factor: {partial})")
    return found
