"""SwiGLU for Megatron's dense MLP on CUDA."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["SwiGLU"]


class SwiGLU(torch.nn.Module):
    """What `MLP` calls with the output of its first projection, `[..., 2 width]`, to get `[..., width]`.

    Takes the place of TransformerEngine's activation (`use_te_activation_func`): Megatron-Core's one way to change it.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()

    def forward(self, x: Tensor) -> Tensor:
        from areal_like.engines.megatron.kernels.swiglu import FusedSwiGLU

        return FusedSwiGLU.apply(x)  # type: ignore[no-any-return]
