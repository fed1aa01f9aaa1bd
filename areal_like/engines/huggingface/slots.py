"""Keys and values of the sequences in generation: one slot a sequence, each as long as its own sequence.

A slot holds its sequence from column 0 on, so there is no left padding, a sequence can join or leave at any token, and
a mask hides what lies beyond its end. When one leaves, the last slot moves into its place: the live slots stay the
first `used`, and a finished sequence costs nothing from then on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

ROUND = 8
"""Columns read are rounded up to a multiple: what the masked kernels of CUDA want their rows aligned to."""


class SlotLayer(DynamicLayer):  # type: ignore[no-untyped-call]
    """Keys and values of one layer, `[slots, groups, columns, head]`; `update` writes one token in each live slot."""

    keys: Tensor
    values: Tensor

    def __init__(self, cache: SlotCache) -> None:
        super().__init__()
        self.cache = cache

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Take `[used, groups, 1, head]`, give `[used, groups, width, head]`, both views of the slots."""
        step = self.cache
        self.keys[step.index, :, step.positions] = key_states[:, :, 0]
        self.values[step.index, :, step.positions] = value_states[:, :, 0]
        return self.keys[: step.used, :, : step.width], self.values[: step.used, :, : step.width]


class SlotCache(Cache):
    """The slots of every layer.

    Attributes:
        used: live slots.
        lengths: tokens in each live slot.
        slots, columns: what there is room for.
    """

    def __init__(self, config: PretrainedConfig, dtype: torch.dtype, device: torch.device) -> None:
        self.slot_layers = [SlotLayer(self) for _ in range(config.num_hidden_layers)]
        super().__init__(layers=list(self.slot_layers))
        self.groups: int = config.num_key_value_heads
        self.head: int = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.dtype, self.device = dtype, device
        self.used = self.slots = self.columns = 0
        self.lengths: list[int] = []

    @property
    def bytes_per_token(self) -> int:
        """Of keys and values over all layers."""
        return 2 * len(self.slot_layers) * self.groups * self.head * self.dtype.itemsize

    def resize(self, slots: int, columns: int) -> None:
        """Make room for `slots` sequences of `columns` tokens, at least for what is there."""
        for layer in self.slot_layers:
            for name in ("keys", "values"):
                # Zeros, not whatever was there: the mask multiplies unused columns by 0, which leaves a NaN a NaN.
                room = torch.zeros(slots, self.groups, columns, self.head, dtype=self.dtype, device=self.device)
                if self.used:
                    longest = max(self.lengths)
                    room[: self.used, :, :longest] = getattr(layer, name)[: self.used, :, :longest]
                setattr(layer, name, room)
            layer.is_initialized = True
        self.slots, self.columns = slots, columns

    def insert(self, prefilled: DynamicCache, sources: Sequence[int], lengths: Sequence[int]) -> None:
        """Add sequences: number i has the first `lengths[i]` columns of row `sources[i]` of `prefilled`."""
        first, last = self.used, self.used + len(sources)
        rows = torch.tensor(sources, device=self.device)
        longest = max(lengths)
        for layer, filled in zip(self.slot_layers, prefilled.layers, strict=True):
            assert isinstance(filled, DynamicLayer) and filled.keys is not None and filled.values is not None
            layer.keys[first:last, :, :longest] = filled.keys[rows, :, :longest]
            layer.values[first:last, :, :longest] = filled.values[rows, :, :longest]
        self.used = last
        self.lengths += lengths

    def copy(self, sources: Sequence[int], lengths: Sequence[int]) -> None:
        """Add sequences: number i has the first `lengths[i]` columns of the live slot `sources[i]`."""
        first, last = self.used, self.used + len(sources)
        rows = torch.tensor(sources, device=self.device)
        longest = max(lengths)
        for layer in self.slot_layers:
            layer.keys[first:last, :, :longest] = layer.keys[rows, :, :longest]
            layer.values[first:last, :, :longest] = layer.values[rows, :, :longest]
        self.used = last
        self.lengths += lengths

    def remove(self, slot: int) -> None:
        """Free a slot; the last one, if it is another, takes its place."""
        last = self.used - 1
        if slot != last:
            length = self.lengths[last]
            for layer in self.slot_layers:
                layer.keys[slot, :, :length] = layer.keys[last, :, :length]
                layer.values[slot, :, :length] = layer.values[last, :, :length]
            self.lengths[slot] = self.lengths[last]
        self.lengths.pop()
        self.used = last

    def begin_token(self) -> tuple[Tensor, Tensor]:
        """Open one more column in each live slot.

        Returns:
            The position of the new token, int64 `[used, 1]`, and what it may look at, bool `[used, 1, 1, width]`.
        """
        self.width = min(self.columns, -(-(max(self.lengths) + 1) // ROUND) * ROUND)
        self.positions = torch.tensor(self.lengths, device=self.device)
        self.index = torch.arange(self.used, device=self.device)
        mask = torch.arange(self.width, device=self.device) <= self.positions[:, None]
        self.lengths = [length + 1 for length in self.lengths]
        return self.positions[:, None], mask[:, None, None]
