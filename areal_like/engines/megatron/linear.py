"""Linear layers of ranks that do not share them (t = 1): a matrix product and nothing around it.

TransformerEngine's layers spend 150-190 microseconds of the host on each pass, of which the product needs 20: with
8,192 tokens a micro-batch the host falls behind the GPU. They stay with FP8, and where t > 1 has traffic to overlap.
The parameters are those of Megatron-Core's own layers, which these are but for the forward pass.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from torch import Tensor

from areal_like.engines.megatron.gradients import add_weight_gradient

__all__ = ["ColumnProjection", "RowProjection"]


class _Product(torch.autograd.Function):
    """`x` `[..., in]`, `weight` `[out, in]` and `bias` `[out]` or None to `[..., out]`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, fused: bool) -> Tensor:  # type: ignore[override]
        rows = x.reshape(-1, x.shape[-1])
        ctx.save_for_backward(rows, weight)
        ctx.parameter = weight if fused and hasattr(weight, "main_grad") else None
        y = rows @ weight.t() if bias is None else torch.addmm(bias, rows, weight.t())
        return y.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        rows, weight = ctx.saved_tensors
        dy = grads[0].reshape(-1, weight.shape[0])
        dx = (dy @ weight).view(*grads[0].shape[:-1], -1) if ctx.needs_input_grad[0] else None
        dweight = None
        if ctx.needs_input_grad[1]:
            dweight = dy.t() @ rows if ctx.parameter is None else add_weight_gradient(ctx.parameter, dy, rows)
        return dx, dweight, dy.sum(dim=0) if ctx.needs_input_grad[2] else None, None


def _project(layer: Any, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor | None]:
    """The product, and the bias where it is added later (`skip_bias_add`)."""
    inside, later = (None, layer.bias) if layer.skip_bias_add else (layer.bias, None)
    return _Product.apply(x, weight, inside, layer.fuse_wgrad_accumulation), later


class ColumnProjection(ColumnParallelLinear):
    """See `_project`."""

    fuse_wgrad_accumulation = False
    """As TransformerEngine's layers have it: see `gradients.fuse_gradients`."""

    def forward(  # type: ignore[override]
        self, x: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Tensor, Tensor | None]:
        return _project(self, x, self.weight if weight is None else weight)


class RowProjection(RowParallelLinear):
    """See `_project`."""

    fuse_wgrad_accumulation = False

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        return _project(self, x, self.weight)
