"""Small random models made on the spot, shaped so that a layout can be tried on them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from areal_like.alloc import ModelAllocation

__all__ = ["TINY_MODELS", "make_tiny_model"]

TINY_MODELS = ("tiny-dense", "tiny-moe")


def make_tiny_model(
    name: str,
    allocation: ModelAllocation,
    folder: Path,
    *,
    dtype: torch.dtype,
    width_multiple: int = 1,
    also: ModelAllocation | None = None,
) -> None:
    """Write a random model as a Hugging Face folder.

    The widths are multiples of what the layout cuts them into, so that every layout whose own numbers agree can be
    tried; the vocabulary is a prime, so that it never divides and padding is always exercised. `width_multiple`: what
    the widths on a rank have to be multiples of (at most 128, for FP8). `also`: another layout that it has to fit.
    """
    layouts = [allocation, also or allocation]
    tp = math.lcm(*(a.tp for a in layouts))
    heads = 2 * tp
    layers = max(4, *(max(2 * a.pp, a.pp * a.vpp) for a in layouts))
    shape: dict[str, Any] = {
        "vocab_size": 131,
        "hidden_size": max(64, width_multiple),
        "intermediate_size": max(32, width_multiple) * tp,
        "num_hidden_layers": layers if all(a.pp == 1 for a in layouts) else layers + 1,  # uneven stages
        "num_attention_heads": 2 * heads,
        "num_key_value_heads": heads,
        "head_dim": max(16, width_multiple // 4),  # four heads a rank
        "max_position_embeddings": 512,
        "initializer_range": 0.1,
    }
    torch.manual_seed(0)
    model: Any
    if name == "tiny-dense":
        model = Qwen3ForCausalLM(Qwen3Config(**shape, tie_word_embeddings=True))
    else:
        config = Qwen3MoeConfig(
            **shape,
            tie_word_embeddings=False,
            num_experts=math.lcm(4, *(a.ep for a in layouts)),
            num_experts_per_tok=2,
            moe_intermediate_size=max(16, width_multiple) * math.lcm(*(a.etp for a in layouts)),
            norm_topk_prob=True,
        )
        model = Qwen3MoeForCausalLM(config)
    model.to(dtype).save_pretrained(folder)
