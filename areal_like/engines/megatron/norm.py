"""The norm of Megatron's layers, on every device."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

__all__ = ["RMSNorm", "ResidualRMSNorm"]


def _with_residual(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The norm of `x` `[..., width]`, and `x` for a connection around what follows."""
    if x.is_cuda:
        from areal_like.engines.megatron.kernels.rms_norm import FusedRMSNorm

        return FusedRMSNorm.apply(x, weight, eps)  # type: ignore[no-any-return]
    return F.rms_norm(x, (x.shape[-1],), weight, eps), x


class RMSNorm(torch.nn.Module):
    """Root-mean-square norm whose weight takes part in Megatron's sequence-parallel gradient reduction."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **kwargs: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        # With sequence parallelism each rank normalises its part of the tokens: gradients are summed over the ranks.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Any:
        return _with_residual(x, self.weight, self.eps)[0]


class ResidualRMSNorm(RMSNorm):
    """Returns the pair that Megatron's layer takes apart: the norm of `x`, and `x` for the residual connection.

    Both gradients of `x` meet in one kernel. Not under selective recompute of norms, which frees a norm's outputs.
    """

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return _with_residual(x, self.weight, self.eps)
