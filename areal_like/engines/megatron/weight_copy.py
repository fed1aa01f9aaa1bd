"""Filling a planned bucket from the parameters as they are now.

On a GPU one kernel fills a bucket in memory of the same GPU: a table on the device lists tiles of at most 32 KiB, each
an address, a place in the buffer and a size. Addresses are compared with those of the parameters at every use, and the
table is made anew when one has moved. Towards host memory, and on a CPU, the pieces are copied one by one: they are
large, and the bus is slower than the launches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from areal_like.engines.megatron.weight_plan import PlannedBucket, Source, as_bytes

__all__ = ["TILE", "Copier", "KernelCopier", "PieceCopier", "tiles"]

TILE = 32 * 1024
"""Bytes that one block of threads copies; a power of two."""
_STEP = 2048
"""Bytes at once where they are not aligned for vector loads; a power of two."""

Copier = Callable[[PlannedBucket, Tensor], None]
"""Fills the buffer, uint8 `[bucket.nbytes]`; on a GPU it only enqueues the work."""


class PieceCopier:
    """A copy a piece."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self._sources = sources

    def __call__(self, bucket: PlannedBucket, buffer: Tensor) -> None:
        found: dict[int, Tensor] = {}
        for piece in bucket.pieces:
            if piece.source not in found:
                found[piece.source] = as_bytes(self._sources[piece.source].checked())
            target = buffer[piece.offset : piece.offset + piece.nbytes]
            target.copy_(found[piece.source][piece.start : piece.start + piece.nbytes], non_blocking=True)


class KernelCopier:
    """One launch a bucket, on the current CUDA stream."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self._sources = sources
        self._tables: dict[int, _Table] = {}

    def __call__(self, bucket: PlannedBucket, buffer: Tensor) -> None:
        table = self._tables.get(id(bucket))
        if table is None:
            table = self._tables[id(bucket)] = _Table(bucket)
        addresses = [self._sources[number].parameter().data_ptr() for number in table.numbers]
        if addresses != table.addresses or buffer.data_ptr() % 16 != table.misalignment:
            for number in table.numbers:
                self._sources[number].checked()
            table.point_to(addresses, buffer)
        copy_tiles(table.rows, buffer)


class _Table:
    """The tiles of a bucket, as the kernel reads them."""

    def __init__(self, bucket: PlannedBucket) -> None:
        self.bucket = bucket  # also keeps it, whose id is the key
        self.numbers = sorted({piece.source for piece in bucket.pieces})
        self.addresses: list[int] = []
        self.misalignment = -1
        self.rows = torch.empty(0, dtype=torch.int64)

    def point_to(self, addresses: list[int], buffer: Tensor) -> None:
        self.addresses, self.misalignment = addresses, buffer.data_ptr() % 16
        rows = tiles(self.bucket, dict(zip(self.numbers, addresses, strict=True)), self.misalignment)
        self.rows = torch.from_numpy(rows).to(buffer.device)


def tiles(bucket: PlannedBucket, addresses: dict[int, int], misalignment: int) -> np.ndarray:
    """int64 `[4, tiles]`: address to read, offset in the buffer, bytes, and whether all three are multiples of 16.

    Args:
        addresses: of the sources, by number.
        misalignment: of the buffer: its address modulo 16.
    """
    counts = np.array([-(-piece.nbytes // TILE) for piece in bucket.pieces])
    owner = np.repeat(np.arange(len(counts)), counts)
    first = (np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)) * TILE
    columns = [[addresses[p.source] + p.start for p in bucket.pieces], [p.offset for p in bucket.pieces]]
    address, offset = (np.array(column, dtype=np.int64)[owner] + first for column in columns)
    sizes = np.minimum(np.array([p.nbytes for p in bucket.pieces], dtype=np.int64)[owner] - first, TILE)
    wide = ((address | (offset + misalignment) | sizes) % 16 == 0).astype(np.int64)
    return np.ascontiguousarray(np.stack([address, offset, sizes, wide]))


def copy_tiles(rows: Tensor, buffer: Tensor) -> None:
    """Copy every tile; `rows` as `tiles` makes them, on the device of `buffer` (uint8)."""
    kernel = _kernel()
    kernel[(rows.shape[1],)](rows, buffer, rows.shape[1], TILE=TILE, STEP=_STEP, num_warps=8)


def _kernel() -> Any:
    from areal_like.engines.megatron.kernels.copy_tiles import copy_tiles_kernel  # Triton is there where CUDA is

    return copy_tiles_kernel
