"""Attention of one new token a sequence, without copying keys and values for grouped queries.

Transformers' scaled-dot-product attention repeats keys and values to the number of query heads whenever a mask is
given; in decoding that copy costs more than the attention. One new token a sequence has one query position, so the
query heads of a group can stand in its place: `[rows, groups, heads / groups, head]` against `[rows, groups, width,
head]`, with the same mask for all of them.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

ATTENTION = "areal_like_grouped_sdpa"
"""The name under which Transformers knows it (`attn_implementation`)."""


def grouped_sdpa(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Transformers' attention function.

    Args:
        query: `[rows, heads, tokens, head]`.
        key, value: `[rows, groups, width, head]`.
        attention_mask: bool, broadcast to `[rows, 1, tokens, width]`; None: causal.

    Returns:
        `[rows, tokens, heads, head]` and no attention weights.
    """
    rows, heads, tokens, head = query.shape
    groups = key.shape[1]
    if tokens > 1 or heads == groups:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    grouped = query.reshape(rows, groups, heads // groups, head)
    output = F.scaled_dot_product_attention(grouped, key, value, attn_mask=attention_mask, scale=kwargs.get("scaling"))
    return output.reshape(rows, 1, heads, head), None


def register() -> None:
    """Make it known to Transformers; doing so twice changes nothing."""
    AttentionInterface.register(ATTENTION, grouped_sdpa)
    AttentionMaskInterface.register(ATTENTION, sdpa_mask)
