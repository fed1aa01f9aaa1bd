"""SwiGLU on CUDA: one pass forward, one pass backward. With the projections of a row laid out `[gate | up]`:

    y     = p silu(gate) up,  silu(z) = z s(z),  s the logistic function           arXiv 2002.05202, equation 6
    dgate = p dy up s (1 + gate (1 - s))
    dup   = p dy silu(gate)
    dp    = sum over columns of dy silu(gate) up

p is the weight of a row, 1 where none is given (experts' rows have the router's). The backward pass that Megatron-Core
compiles reads its inputs twice, because it writes through a concatenation.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["FusedSwiGLU", "WeightedSwiGLU"]

BLOCK = 1024


@triton.jit
def _forward(x_ptr, p_ptr, y_ptr, width, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    gate = tl.load(x_ptr + row * 2 * width + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * 2 * width + width + columns, mask=inside, other=0.0).to(tl.float32)
    y = gate * tl.sigmoid(gate) * up
    if WEIGHTED:
        y *= tl.load(p_ptr + row).to(tl.float32)
    tl.store(y_ptr + row * width + columns, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _backward(x_ptr, dy_ptr, dx_ptr, width, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    gate = tl.load(x_ptr + row * 2 * width + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * 2 * width + width + columns, mask=inside, other=0.0).to(tl.float32)
    dy = tl.load(dy_ptr + row * width + columns, mask=inside, other=0.0).to(tl.float32)
    s = tl.sigmoid(gate)
    dgate = dy * up * s * (1 + gate * (1 - s))
    dup = dy * gate * s
    tl.store(dx_ptr + row * 2 * width + columns, dgate.to(dx_ptr.dtype.element_ty), mask=inside)
    tl.store(dx_ptr + row * 2 * width + width + columns, dup.to(dx_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _weighted_backward(  # type: ignore[no-untyped-def]
    x_ptr, p_ptr, dy_ptr, dx_ptr, dp_ptr, width, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    p = tl.load(p_ptr + row).to(tl.float32)
    dp = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, width, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < width
        gate = tl.load(x_ptr + row * 2 * width + columns, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(x_ptr + row * 2 * width + width + columns, mask=inside, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + row * width + columns, mask=inside, other=0.0).to(tl.float32)
        s = tl.sigmoid(gate)
        dp += dy * gate * s * up
        dgate = p * dy * up * s * (1 + gate * (1 - s))
        dup = p * dy * gate * s
        tl.store(dx_ptr + row * 2 * width + columns, dgate.to(dx_ptr.dtype.element_ty), mask=inside)
        tl.store(dx_ptr + row * 2 * width + width + columns, dup.to(dx_ptr.dtype.element_ty), mask=inside)
    tl.store(dp_ptr + row, tl.sum(dp, axis=0).to(dp_ptr.dtype.element_ty))


def _swiglu(x: Tensor, p: Tensor | None) -> Tensor:
    rows, width = x.numel() // x.shape[-1], x.shape[-1] // 2
    y = x.new_empty(*x.shape[:-1], width)
    if rows:
        grid = (rows, triton.cdiv(width, BLOCK))
        _forward[grid](x, x if p is None else p, y, width, WEIGHTED=p is not None, BLOCK=BLOCK)
    return y


class FusedSwiGLU(torch.autograd.Function):
    """`[..., 2 width]` to `[..., width]`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        x = x.contiguous()
        ctx.save_for_backward(x)
        return _swiglu(x, None)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        dx = torch.empty_like(x)
        rows, width = x.numel() // x.shape[-1], x.shape[-1] // 2
        if rows:
            _backward[(rows, triton.cdiv(width, BLOCK))](x, grads[0].contiguous(), dx, width, BLOCK=BLOCK)
        return dx


class WeightedSwiGLU(torch.autograd.Function):
    """`[rows, 2 width]` and a weight for each row, `[rows]` or `[rows, 1]`, to `[rows, width]`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, p: Tensor) -> Tensor:  # type: ignore[override]
        x, p = x.contiguous(), p.contiguous()
        ctx.save_for_backward(x, p)
        return _swiglu(x, p)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x, p = ctx.saved_tensors
        dx, dp = torch.empty_like(x), torch.empty_like(p)
        rows, width = x.shape[0], x.shape[-1] // 2
        if rows:
            block = min(BLOCK, triton.next_power_of_2(width))
            _weighted_backward[(rows,)](x, p, grads[0].contiguous(), dx, dp, width, BLOCK=block)
        return dx, dp
