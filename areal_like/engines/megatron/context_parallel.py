"""Packed sequences over context-parallel ranks: who holds which tokens, and how results become whole again.

Every sequence is padded to a multiple of 2c and cut into 2c equal chunks; rank r holds chunks r and 2c - 1 - r. With
causal attention the work of the two adds up to the same on every rank (the layout of TransformerEngine's packed
attention, and of "zig-zag" ring attention).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["gather_tokens", "local_tokens", "padded_to_gathered"]


def local_tokens(lengths: list[int], cp: int, rank: int) -> Tensor:
    """Which tokens of the padded packed row a rank holds, in the order in which it holds them.

    Args:
        lengths: padded lengths of the sequences, each a multiple of 2c (of any length when c is 1).
    """
    if cp == 1:
        return torch.arange(sum(lengths))
    parts, start = [torch.empty(0, dtype=torch.int64)], 0
    for length in lengths:
        chunk = length // (2 * cp)
        for number in (rank, 2 * cp - 1 - rank):
            parts.append(torch.arange(start + number * chunk, start + (number + 1) * chunk))
        start += length
    return torch.cat(parts)


def padded_to_gathered(lengths: list[int], cp: int) -> Tensor:
    """Where each token of the padded packed row is when the rows of all ranks are laid end to end."""
    gathered = torch.cat([local_tokens(lengths, cp, rank) for rank in range(cp)])
    places = torch.empty_like(gathered)
    places[gathered] = torch.arange(gathered.numel())
    return places


class _GatherTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, group: dist.ProcessGroup) -> Tensor:  # type: ignore[override]
        ctx.rank, ctx.rows = group.rank(), values.shape[0]
        shards = [torch.empty_like(values) for _ in range(group.size())]
        dist.all_gather(shards, values.contiguous(), group=group)
        return torch.cat(shards)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        start = ctx.rank * ctx.rows
        return grads[0][start : start + ctx.rows], None


def gather_tokens(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The rows of all ranks laid end to end: `[local tokens, ...]` to `[tokens, ...]`.

    For values from which every rank then computes the same (the loss over whole sequences): the gradient of a rank's
    own rows is that of its own copy, not the sum over the ranks, which would count it c times.
    """
    return values if group.size() == 1 else _GatherTokens.apply(values, group)
