"""Sizes that FP8 kernels take."""

from __future__ import annotations

__all__ = ["fp8_alignment"]

_BLOCKS = {"blockwise": 128, "mxfp8": 32}


def fp8_alignment(recipe: str | None) -> int:
    """Both sizes of every FP8 matrix on a rank are multiples of it: the block of the recipe, 16 for scales of whole
    tensors (the requirement of cuBLASLt's FP8 products), 1 without FP8."""
    return 1 if recipe is None else _BLOCKS.get(recipe, 16)
