"""RMSNorm on CUDA: one pass forward, one pass backward.

    y   = x r w,  r = 1 / sqrt(mean(x^2) + eps)                              arXiv 1910.07467, equation 4
    dx  = r (g - x r^2 mean(g x)) + dresidual,  g = dy w
    dw  = sum over rows of dy x r

TransformerEngine's kernels are tuned for some widths only and know no residual. Sums have a fixed order: results repeat
bit for bit.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["FusedRMSNorm"]

PROGRAMS_PER_PROCESSOR = 4
"""Of the backward pass, each of which sums the weight's gradient over its rows before anything is written."""


@triton.jit
def _forward(  # type: ignore[no-untyped-def]
    x_ptr, w_ptr, y_ptr, r_ptr, rows, width, eps, TILE: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)[:, None]
    columns = tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (columns < width)
    place = row.to(tl.int64) * width + columns
    x = tl.load(x_ptr + place, mask=inside, other=0.0).to(tl.float32)
    w = tl.load(w_ptr + columns, mask=columns < width, other=0.0).to(tl.float32)
    r = tl.rsqrt(tl.sum(x * x, axis=1, keep_dims=True) / width + eps)
    tl.store(r_ptr + row, r, mask=row < rows)
    tl.store(y_ptr + place, (x * r * w).to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _backward(  # type: ignore[no-untyped-def]
    dy_ptr,
    dres_ptr,
    x_ptr,
    w_ptr,
    r_ptr,
    dx_ptr,
    dw_ptr,
    rows,
    width,
    HAS_RESIDUAL: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    columns = tl.arange(0, BLOCK)[None, :]
    w = tl.load(w_ptr + columns, mask=columns < width, other=0.0).to(tl.float32)
    dw = tl.zeros([TILE, BLOCK], dtype=tl.float32)
    for first in range(tl.program_id(0) * TILE, rows, tl.num_programs(0) * TILE):
        row = first + tl.arange(0, TILE)[:, None]
        inside = (row < rows) & (columns < width)
        place = row.to(tl.int64) * width + columns
        x = tl.load(x_ptr + place, mask=inside, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + place, mask=inside, other=0.0).to(tl.float32)
        r = tl.load(r_ptr + row, mask=row < rows, other=0.0)
        normed = x * r
        dw += dy * normed
        g = dy * w
        dx = r * (g - normed * (tl.sum(g * normed, axis=1, keep_dims=True) / width))
        if HAS_RESIDUAL:
            dx += tl.load(dres_ptr + place, mask=inside, other=0.0).to(tl.float32)
        tl.store(dx_ptr + place, dx.to(dx_ptr.dtype.element_ty), mask=inside)
    total = tl.sum(dw, axis=0, keep_dims=True)
    tl.store(dw_ptr + tl.program_id(0).to(tl.int64) * width + columns, total, mask=columns < width)


def _shape(width: int) -> dict[str, int]:
    """Rows and columns of a tile, and the warps that work on it: wide rows alone, narrow ones (heads) several."""
    block = triton.next_power_of_2(width)
    tile = max(1, 1024 // block)
    return {"TILE": tile, "BLOCK": block, "num_warps": min(max(tile * block // 512, 1), 16)}


@functools.cache
def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1  # Triton's interpreter
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


class FusedRMSNorm(torch.autograd.Function):
    """`x` `[..., width]` and `weight` `[width]` to the norm of `x` and `x` itself.

    The second output stands for the residual connection: its gradient is added where that of the norm is computed,
    instead of in a pass of its own.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        rows, width = x.numel() // x.shape[-1], x.shape[-1]
        flat = x.contiguous()
        y = torch.empty_like(flat)
        r = torch.empty(rows, dtype=torch.float32, device=x.device)
        if rows:
            shape = _shape(width)
            _forward[(triton.cdiv(rows, shape["TILE"]),)](flat, weight, y, r, rows, width, eps, **shape)
        ctx.save_for_backward(flat, weight, r)
        ctx.set_materialize_grads(False)
        return y, x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, Tensor | None, None]:
        dy, dresidual = grads
        x, weight, r = ctx.saved_tensors
        if dy is None:
            return dresidual, None, None
        rows, width = r.numel(), x.shape[-1]
        dx = torch.empty_like(x)
        if rows == 0:
            return dx, torch.zeros_like(weight), None
        shape = _shape(width)
        programs = min(triton.cdiv(rows, shape["TILE"]), _processors(x.device) * PROGRAMS_PER_PROCESSOR)
        partial = torch.empty(programs, width, dtype=torch.float32, device=x.device)
        residual = x if dresidual is None else dresidual.contiguous()
        arguments = (dy.contiguous(), residual, x, weight, r, dx, partial, rows, width)
        _backward[(programs,)](*arguments, HAS_RESIDUAL=dresidual is not None, **shape)
        return dx, partial.sum(dim=0).to(weight.dtype), None
