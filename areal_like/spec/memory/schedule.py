"""Which forward passes wait for their backward pass, on each rank of a pipeline, as Megatron's schedules run them.

1F1B (v = 1): stage i of p has min(p - i, micro-batches) of them.

Interleaved (v > 1; Narayanan et al., arXiv 2104.04473, section 2.2): a rank holds v chunks of the model. Groups of p
micro-batches pass through chunk 0, then chunk 1, and so on; backward passes come in the opposite order of chunks.
2 (p - i - 1) + (v - 1) p forward passes come first, then one forward and one backward pass in turn (Megatron-Core 0.19,
`get_pp_rank_microbatches` and `get_schedule_table`). The passes that wait are of several chunks, which differ in size.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

__all__ = ["Moment", "moments", "passes"]


class Moment(NamedTuple):
    """A backward pass.

    Attributes:
        chunk: whose it is.
        waiting: passes of each chunk whose activations are there, this one included.
    """

    chunk: int
    waiting: tuple[int, ...]


EXACT = 32
"""Stages (p x v) up to which an interleaved schedule is followed pass by pass."""


def moments(pp: int, vpp: int, stage: int, micro_batches: int) -> tuple[Moment, ...]:
    """The backward passes of a step on pipeline rank `stage`, without those at which less waits than at another.

    With more than `EXACT` stages all passes that wait are put on each chunk in turn, which bounds it from above.

    Args:
        micro_batches: of the step; with v > 1 a multiple of p, as the engine makes it.
    """
    if vpp == 1:
        return (Moment(0, (min(pp - stage, micro_batches),)),)
    if pp * vpp > EXACT:
        most = min(2 * (pp - stage - 1) + (vpp - 1) * pp + 1, vpp * micro_batches)
        return tuple(Moment(chunk, tuple(most * (chunk == k) for k in range(vpp))) for chunk in range(vpp))
    return _interleaved(pp, vpp, stage, min(micro_batches, 4 * pp))  # it repeats after a group of p


@lru_cache(maxsize=4096)
def _interleaved(pp: int, vpp: int, stage: int, micro_batches: int) -> tuple[Moment, ...]:
    waiting, found = [0] * vpp, set()
    for is_forward, chunk in passes(pp, vpp, stage, micro_batches):
        if not is_forward:
            found.add(Moment(chunk, tuple(waiting)))
        waiting[chunk] += 1 if is_forward else -1
    return tuple(sorted(m for m in found if not any(_exceeds(other, m) for other in found)))


def passes(pp: int, vpp: int, stage: int, micro_batches: int) -> list[tuple[bool, int]]:
    """What an interleaved rank does, in order: (is it a forward pass, of which chunk)."""
    chunks = [
        chunk
        for start in range(0, micro_batches, pp)
        for chunk in range(vpp)
        for _ in range(min(pp, micro_batches - start))
    ]
    total = len(chunks)
    first = min(2 * (pp - stage - 1) + (vpp - 1) * pp, total)
    order = [(True, chunk) for chunk in chunks[:first]]
    for k in range(total - first):
        order += [(True, chunks[first + k]), (False, vpp - 1 - chunks[k])]
    return order + [(False, vpp - 1 - chunk) for chunk in chunks[total - first :]]


def _exceeds(one: Moment, other: Moment) -> bool:
    """Whether at least as much of everything waits at `one`, and more of something."""
    if one.chunk != other.chunk or one.waiting == other.waiting:
        return False
    return all(a >= b for a, b in zip(one.waiting, other.waiting, strict=True))
