"""The Triton kernel behind `weight_copy.copy_tiles`."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["copy_tiles_kernel"]


@triton.jit(do_not_specialize=["count"])  # one compiled version, whatever the number of tiles
def copy_tiles_kernel(rows, buffer, count, TILE: tl.constexpr, STEP: tl.constexpr):  # type: ignore[no-untyped-def]
    """One program a tile. The table is read by rows: address, offset, size, whether all are multiples of 16."""
    tile = tl.program_id(0)
    address = tl.load(rows + tile)
    offset = tl.load(rows + count + tile)
    size = tl.load(rows + 2 * count + tile)
    wide = tl.load(rows + 3 * count + tile)
    if wide != 0:
        # 16 bytes a thread at once: two words, whose addresses and number are known to be even.
        words = tl.arange(0, TILE // 8)
        inside = words < tl.multiple_of(size // 8, 2)
        source = tl.multiple_of(address.to(tl.pointer_type(tl.int64)) + words, 16)
        target = tl.multiple_of((buffer + offset).to(tl.pointer_type(tl.int64)) + words, 16)
        tl.store(target, tl.load(source, mask=inside), mask=inside)
    else:
        source_start = address.to(tl.pointer_type(tl.uint8))
        target_start = buffer + offset
        for start in range(0, TILE, STEP):
            places = start + tl.arange(0, STEP)
            inside = places < size
            tl.store(target_start + places, tl.load(source_start + places, mask=inside), mask=inside)
