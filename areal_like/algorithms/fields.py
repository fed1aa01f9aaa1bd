"""Reading the fields of a packed batch, and reducing per-token values to one value a sequence."""

from __future__ import annotations

import torch
from torch import Tensor

from areal_like.data.batch import PackedBatch


def token_field(batch: PackedBatch, name: str, needed_for: str) -> Tensor:
    """The per-token field `name` `[tokens]`; ValueError that names the field, the reader and what the batch has."""
    if name not in batch.tokens:
        have = ", ".join(sorted(batch.tokens)) or "none"
        raise ValueError(f"{needed_for} needs the token field {name!r}; the batch has: {have}")
    return batch.tokens[name]


def sequence_field(batch: PackedBatch, name: str, needed_for: str) -> Tensor:
    """The per-sequence field `name` `[sequences]`; ValueError as `token_field`."""
    if name not in batch.sequences:
        have = ", ".join(sorted(batch.sequences)) or "none"
        raise ValueError(f"{needed_for} needs the sequence field {name!r}; the batch has: {have}")
    return batch.sequences[name]


def loss_mask(batch: PackedBatch, needed_for: str) -> Tensor:
    """Boolean `[tokens]`: the tokens that count."""
    return token_field(batch, "loss_mask", needed_for) != 0


def sequence_index(batch: PackedBatch) -> Tensor:
    """int64 `[tokens]`: which sequence each token belongs to."""
    lengths = batch.cu_seqlens[1:] - batch.cu_seqlens[:-1]
    return torch.repeat_interleave(torch.arange(len(batch), device=lengths.device), lengths)


def sum_by_sequence(values: Tensor, batch: PackedBatch) -> Tensor:
    """Sum of `values` `[tokens]` over each sequence, `[sequences]`; differentiable."""
    zeros = torch.zeros(len(batch), dtype=values.dtype, device=values.device)
    return zeros.index_add(0, sequence_index(batch), values)


def mean_by_sequence(values: Tensor, mask: Tensor, batch: PackedBatch) -> Tensor:
    """Mean of `values` over the masked tokens of each sequence, `[sequences]`; 0 for a sequence without any."""
    count = sum_by_sequence(mask.to(values.dtype), batch).clamp(min=1)
    return sum_by_sequence(torch.where(mask, values, 0), batch) / count


def max_by_sequence(values: Tensor, mask: Tensor, batch: PackedBatch) -> Tensor:
    """Largest of `values` over the masked tokens of each sequence, `[sequences]`; -inf for a sequence without any."""
    lowest = torch.full((len(batch),), float("-inf"), dtype=values.dtype, device=values.device)
    masked = values.masked_fill(~mask, float("-inf"))
    return lowest.scatter_reduce(0, sequence_index(batch), masked, reduce="amax")
