"""Split of the fused projection, with rotary positions, on CUDA: one pass forward, one pass backward.

A token's row has for each group of KV heads its query heads, its key and its value (Megatron-Core's layout). With c and
s the cosine and sine of a token's angles, x = [a | b | rest] a query or a key, a and b half as wide as what is rotated:

    y  = [a c - b s | b c + a s | rest]                                      arXiv 2104.09864, equation 34, in halves
    dx = [da c + db s | db c - da s | drest]

Values are copied. Megatron-Core's way has a copy of the queries and a kernel for each of queries and keys, and in the
backward pass one more to lay the three gradients together.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["SplitWithRotation"]

TILE = 1024
"""Elements of one half that a program works on."""


@triton.jit
def _split(  # type: ignore[no-untyped-def]
    mixed_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    positions_ptr,
    table_ptr,
    rows,
    BACKWARD: tl.constexpr,
    GROUPS: tl.constexpr,
    SHARE: tl.constexpr,
    WIDTH: tl.constexpr,
    HALF: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    REST: tl.constexpr,
):
    # A row is one head of one token; the rows of the fused projection follow each other without a gap.
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    inside = row < rows
    token = row // (GROUPS * (SHARE + 2))
    head = row % (GROUPS * (SHARE + 2))
    group = head // (SHARE + 2)
    slot = head % (SHARE + 2)
    is_q = inside & (slot < SHARE)
    is_k = inside & (slot == SHARE)
    is_v = inside & (slot == SHARE + 1)
    token = token.to(tl.int64)
    mixed = mixed_ptr + row.to(tl.int64) * WIDTH
    q = q_ptr + ((token * GROUPS + group) * SHARE + slot) * WIDTH
    k = k_ptr + (token * GROUPS + group) * WIDTH
    v = v_ptr + (token * GROUPS + group) * WIDTH

    columns = tl.arange(0, BLOCK)[None, :]
    half = columns < HALF
    position = tl.load(positions_ptr + token, mask=inside, other=0)
    angle = table_ptr + position * (2 * HALF) + columns
    rotated = (is_q | is_k) & half
    c = tl.load(angle, mask=rotated, other=1.0)
    s = tl.load(angle + HALF, mask=rotated, other=0.0)
    if BACKWARD:
        a = tl.load(q + columns, mask=is_q & half, other=0.0).to(tl.float32)
        a += tl.load(k + columns, mask=is_k & half, other=0.0).to(tl.float32)
        a += tl.load(v + columns, mask=is_v & half, other=0.0).to(tl.float32)
        b = tl.load(q + HALF + columns, mask=is_q & half, other=0.0).to(tl.float32)
        b += tl.load(k + HALF + columns, mask=is_k & half, other=0.0).to(tl.float32)
        b += tl.load(v + HALF + columns, mask=is_v & half, other=0.0).to(tl.float32)
        first = tl.where(is_v, a, a * c + b * s).to(mixed_ptr.dtype.element_ty)
        second = tl.where(is_v, b, b * c - a * s).to(mixed_ptr.dtype.element_ty)
        tl.store(mixed + columns, first, mask=inside & half)
        tl.store(mixed + HALF + columns, second, mask=inside & half)
    else:
        a = tl.load(mixed + columns, mask=inside & half, other=0.0).to(tl.float32)
        b = tl.load(mixed + HALF + columns, mask=inside & half, other=0.0).to(tl.float32)
        first = tl.where(is_v, a, a * c - b * s).to(mixed_ptr.dtype.element_ty)
        second = tl.where(is_v, b, b * c + a * s).to(mixed_ptr.dtype.element_ty)
        tl.store(q + columns, first, mask=is_q & half)
        tl.store(q + HALF + columns, second, mask=is_q & half)
        tl.store(k + columns, first, mask=is_k & half)
        tl.store(k + HALF + columns, second, mask=is_k & half)
        tl.store(v + columns, first, mask=is_v & half)
        tl.store(v + HALF + columns, second, mask=is_v & half)
    if REST > 0:  # partial rotation
        columns = 2 * HALF + tl.arange(0, REST)[None, :]
        rest = columns < WIDTH
        if BACKWARD:
            x = tl.load(q + columns, mask=is_q & rest, other=0.0)
            x += tl.load(k + columns, mask=is_k & rest, other=0.0)
            x += tl.load(v + columns, mask=is_v & rest, other=0.0)
            tl.store(mixed + columns, x, mask=inside & rest)
        else:
            x = tl.load(mixed + columns, mask=inside & rest, other=0.0)
            tl.store(q + columns, x, mask=is_q & rest)
            tl.store(k + columns, x, mask=is_k & rest)
            tl.store(v + columns, x, mask=is_v & rest)


def _launch(
    mixed: Tensor, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, table: Tensor, *, backward: bool
) -> None:
    groups, width = k.shape[-2:]
    rows = mixed.numel() // width
    if rows == 0:
        return
    half = table.shape[1] // 2
    block, rest = triton.next_power_of_2(half), width - 2 * half
    tile = max(1, TILE // block)
    _split[(triton.cdiv(rows, tile),)](
        mixed,
        q,
        k,
        v,
        positions,
        table,
        rows,
        BACKWARD=backward,
        GROUPS=groups,
        SHARE=q.shape[-2] // groups,
        WIDTH=width,
        HALF=half,
        ROWS=tile,
        BLOCK=block,
        REST=triton.next_power_of_2(rest) if rest else 0,
    )


class SplitWithRotation(torch.autograd.Function):
    """`mixed` `[tokens, 1, groups * (share + 2) * width]` to queries `[tokens, 1, groups * share, width]`, keys and
    values `[tokens, 1, groups, width]`, each contiguous and of the type of `mixed`; computed in float32.

    `positions` int64 `[tokens]`; `table` float32 `[positions, rotated width]`, cosines beside sines.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, mixed: Tensor, positions: Tensor, table: Tensor, groups: int, share: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        mixed = mixed.contiguous()
        tokens, width = mixed.shape[0], mixed.shape[-1] // (groups * (share + 2))
        q = mixed.new_empty(tokens, 1, groups * share, width)
        k = mixed.new_empty(tokens, 1, groups, width)
        v = torch.empty_like(k)
        _launch(mixed, q, k, v, positions, table, backward=False)
        ctx.save_for_backward(positions, table)
        ctx.shape = mixed.shape
        return q, k, v

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        positions, table = ctx.saved_tensors
        dq, dk, dv = (x.contiguous() for x in grads)
        dmixed = dq.new_empty(ctx.shape)
        _launch(dmixed, dq, dk, dv, positions, table, backward=True)
        return dmixed, None, None, None, None
