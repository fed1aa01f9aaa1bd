"""Which attention computes packed sequences, and the lengths that it computes."""

from __future__ import annotations

from typing import Literal

__all__ = ["FLEX_BLOCK", "AttentionBackend", "choose_attention", "flex_length"]

AttentionBackend = Literal["auto", "fused", "flex"]
"""`fused`: TransformerEngine's (cuDNN's fused kernel in 16 bits). `flex`: compiled FlexAttention with a mask of
documents, whose gradients repeat bit for bit."""

FLEX_BLOCK = 128
"""Queries and keys of one tile of FlexAttention."""


FASTER: Literal["fused", "flex"] = "fused"
"""What `auto` takes where both can do it; see `choose_attention` for the measurements."""


def choose_attention(
    asked: AttentionBackend, *, deterministic: bool, cp: int = 1, dropout: bool = False, float32: bool = False
) -> Literal["fused", "flex"]:
    """What computes attention beside TransformerEngine's layers (without them there is one attention, on CPUs).

    Forward and backward pass of one layer on one H200, bfloat16, milliseconds (`python benchmarks/attention.py`):

    | heads, key-value heads, width | 16,384 tokens in | fused | flex |
    |---|---|---|---|
    | 12, 2, 128 | 16 sequences of 1,024 | 1.30 | 0.95 |

    FlexAttention is compiled once a process for each of few lengths (`flex_length`), with and without gradients: 5 to
    10 seconds each. It has no dropout and no context parallelism; TransformerEngine's gradients do not repeat.

    Args:
        asked: `attention_backend`. What is asked for is what is used: the check refuses what cannot be (AL536).
        deterministic: the same bits again.
        cp: context-parallel ranks.
        dropout: attention drops weights.
        float32: the model's type; TransformerEngine's fused kernel is for 16 bits, and it computes float32 without it.
    """
    if asked != "auto":
        return asked
    if deterministic:
        return "flex"
    return "fused" if cp > 1 or dropout or float32 else FASTER


def flex_length(tokens: int) -> int:
    """The next of 128, 256, 384, 512, 768, 1024, 1536, ...: few lengths, since each is compiled once.

    Padding costs copies, not attention: its blocks are not computed, except those on the diagonal.
    """
    size = FLEX_BLOCK
    while size < tokens:
        if size % (2 * FLEX_BLOCK) == 0 and size * 3 // 2 >= tokens:
            return size * 3 // 2
        size *= 2
    return size
