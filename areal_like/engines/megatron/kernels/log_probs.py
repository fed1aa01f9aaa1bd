"""The two passes over logits of `megatron.log_probs`: statistics of each row, and its gradient in place.

A program reads one row, or an equal part of one where rows are few, block after block with float32 arithmetic in
registers: what it computes depends on nothing that other programs do, so the same rows give the same bits. Rows times
columns exceed 2^31 (16,384 x 151,936): offsets of rows are 64-bit.

The running maximum and sums are Milakov and Gimelshein's online softmax (arXiv 1805.02867); for the entropy the sum of
exp(z - m) (z - m) moves with the maximum too.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from areal_like.engines.megatron.log_probs import LOWEST, rescaled

__all__ = ["row_statistics", "write_gradient"]

BLOCK = 4096
"""Columns at once: 16 a thread, so that several programs fit on a multiprocessor and hide each other's latency."""
WARPS = 8
PROGRAMS = 1024
"""What fills a GPU: with fewer rows each is shared out over several programs."""


@triton.jit
def _statistics_kernel(
    logits,
    labels,
    out,
    tokens,
    row_stride,
    first,
    valid,
    span,
    inverse_temperature,
    LOWEST: tl.constexpr,
    WITH_ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    base = logits + row * row_stride
    start = part * span
    end = tl.minimum(start + span, valid)
    # One sum a lane: only the maximum has to be agreed on in every block.
    maximum = tl.full([], LOWEST, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    weighted = tl.zeros([BLOCK], tl.float32)
    for offset in range(start, end, BLOCK):
        columns = offset + tl.arange(0, BLOCK)
        inside = columns < end
        z = tl.load(base + columns, mask=inside, other=0.0).to(tl.float32) * inverse_temperature
        z = tl.where(inside, z, LOWEST)
        larger = tl.maximum(maximum, tl.max(z, axis=0))
        power = tl.where(inside, tl.exp(z - larger), 0.0)
        scale = tl.exp(maximum - larger)
        if WITH_ENTROPY:
            moved = (weighted + total * (maximum - larger)) * scale
            weighted = moved + tl.where(inside, power * (z - larger), 0.0)
        total = total * scale + power
        maximum = larger
    label = tl.load(labels + row) - first
    mine = (label >= start) & (label < end)
    z_label = tl.load(base + label, mask=mine, other=0.0).to(tl.float32) * inverse_temperature
    place = out + part.to(tl.int64) * 4 * tokens + row
    tl.store(place, maximum)
    tl.store(place + tokens, tl.sum(total, axis=0))
    tl.store(place + 2 * tokens, tl.sum(weighted, axis=0))
    tl.store(place + 3 * tokens, z_label)


@triton.jit
def _gradient_kernel(
    logits,
    labels,
    log_z,
    entropy,
    grad_log_probs,
    grad_entropy,
    row_stride,
    columns_of_row,
    first,
    valid,
    span,
    inverse_temperature,
    OF_LOG_PROBS: tl.constexpr,
    OF_ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    base = logits + row * row_stride
    start = tl.program_id(1) * span
    end = tl.minimum(start + span, columns_of_row)
    normaliser = tl.load(log_z + row)
    label = tl.load(labels + row) - first
    if OF_LOG_PROBS:
        grad = tl.load(grad_log_probs + row)
    if OF_ENTROPY:
        own_entropy = tl.load(entropy + row)
        grad_of_entropy = tl.load(grad_entropy + row)
    for offset in range(start, end, BLOCK):
        columns = offset + tl.arange(0, BLOCK)
        inside = columns < end
        z = tl.load(base + columns, mask=inside, other=0.0).to(tl.float32) * inverse_temperature
        log_p = z - normaliser
        factor = tl.zeros([BLOCK], tl.float32)
        if OF_LOG_PROBS:
            factor += grad
        if OF_ENTROPY:
            factor += grad_of_entropy * (log_p + own_entropy)
        value = -tl.exp(log_p) * factor
        if OF_LOG_PROBS:
            value += tl.where(columns == label, grad, 0.0)
        value = tl.where(columns < valid, value * inverse_temperature, 0.0)
        tl.store(base + columns, value.to(logits.dtype.element_ty), mask=inside)


def row_statistics(
    logits: Tensor,
    labels: Tensor,
    first: int,
    valid: int,
    *,
    temperature: float,
    with_entropy: bool,
    out: Tensor,
) -> None:
    """See `log_probs.row_statistics`.

    Args:
        first: id of the first column.
        valid: columns before the padding.
    """
    _require_rows(logits)
    tokens = logits.shape[0]
    span, parts = _split(tokens, valid)
    found = torch.empty(parts, 4, tokens, dtype=torch.float32, device=logits.device)
    if tokens:
        _statistics_kernel[(tokens, parts)](
            logits,
            labels,
            found,
            tokens,
            logits.stride(0),
            first,
            valid,
            span,
            1.0 / temperature,
            LOWEST=LOWEST,
            WITH_ENTROPY=with_entropy,
            BLOCK=BLOCK,
            num_warps=WARPS,
        )
    if parts == 1:
        out.copy_(found[0])
    else:
        out[0] = found[:, 0].amax(dim=0)
        out[1:] = rescaled(found, out[0]).sum(dim=0)


def write_gradient(
    logits: Tensor,
    labels: Tensor,
    first: int,
    valid: int,
    *,
    temperature: float,
    log_z: Tensor,
    entropy: Tensor,
    grad_log_probs: Tensor | None,
    grad_entropy: Tensor | None,
) -> None:
    """See `log_probs.write_gradient`, and `row_statistics` for `first` and `valid`."""
    _require_rows(logits)
    tokens, columns = logits.shape
    span, parts = _split(tokens, columns)
    if tokens:
        _gradient_kernel[(tokens, parts)](
            logits,
            labels,
            log_z,
            entropy,
            log_z if grad_log_probs is None else grad_log_probs.contiguous(),
            log_z if grad_entropy is None else grad_entropy.contiguous(),
            logits.stride(0),
            columns,
            first,
            valid,
            span,
            1.0 / temperature,
            OF_LOG_PROBS=grad_log_probs is not None,
            OF_ENTROPY=grad_entropy is not None,
            BLOCK=BLOCK,
            num_warps=WARPS,
        )


def _split(rows: int, columns: int) -> tuple[int, int]:
    """Columns of a program's part of a row, whole blocks; and how many parts there are."""
    blocks = max(1, triton.cdiv(columns, BLOCK))
    wanted = min(blocks, triton.cdiv(PROGRAMS, max(rows, 1)))
    span = triton.cdiv(blocks, wanted) * BLOCK
    return span, max(1, triton.cdiv(columns, span))


def _require_rows(logits: Tensor) -> None:
    if logits.stride(1) != 1:
        raise ValueError(f"logits of strides {logits.stride()}: the columns of a row have to be neighbours")
