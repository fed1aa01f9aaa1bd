"""Supervised fine-tuning: cross-entropy of the loss tokens, averaged per token over the whole global batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from areal_like.algorithms.fields import loss_mask
from areal_like.data.batch import PackedBatch

if TYPE_CHECKING:
    from areal_like.algorithms.outputs import TokenOutputsLike


@dataclass(frozen=True)
class SFTLoss:
    """-log p summed over the tokens of `loss_mask`, satisfying `engines.base.Loss`; equals `torch.nn.functional.
    cross_entropy` (mean) on the same tokens once the engine has divided by the weight."""

    temperature: float = 1.0

    @property
    def needs_entropy(self) -> bool:
        return False

    def weight(self, batch: PackedBatch) -> Tensor:
        """The loss tokens of the batch, a float32 scalar."""
        return loss_mask(batch, "SFTLoss").sum().float()

    def __call__(self, outputs: TokenOutputsLike, batch: PackedBatch) -> tuple[Tensor, dict[str, Tensor]]:
        mask = loss_mask(batch, "SFTLoss")
        return -torch.where(mask, outputs.log_probs, 0.0).sum(), {}
