"""Sequences into bins: over data-parallel ranks, and into micro-batches under a token budget.

How many micro-batches: best-fit-decreasing bin packing, at most 11/9 of the fewest possible and 6/9 more (Johnson 1974;
Dosa 2007); for batches of many sequences as many as tokens over budget, rounded up, or one more. What goes into which:
multiway number partitioning by the longest-processing-time rule (Graham 1969), within 4/3 of the most even. Where its
largest bin is above the budget, best-fit decreasing under the lowest budget that gives as few bins (MULTIFIT: Coffman,
Garey, Johnson 1978): that always fits. Either keeps each bin a plain list that can be read, and takes 10,000 sequences
in some tenths of a second.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right, insort
from collections.abc import Sequence

__all__ = [
    "SequenceTooLong",
    "balanced_partition",
    "count_micro_batches",
    "pack_micro_batches",
    "padded_length",
    "padding_multiples",
]


class SequenceTooLong(ValueError):
    """A single sequence does not fit into the token budget of a micro-batch."""


def balanced_partition(lengths: Sequence[int], bins: int) -> list[list[int]]:
    """Indices of `lengths` in `bins` lists whose sums are as equal as the longest-first rule makes them.

    Ties are broken by the number of sequences and then by the bin's index, so the result is the same everywhere. Each
    list is in ascending order of index. With fewer sequences than bins the last lists are empty.
    """
    if bins < 1:
        raise ValueError(f"bins must be at least 1, not {bins}")
    result: list[list[int]] = [[] for _ in range(bins)]
    heap = [(0, 0, b) for b in range(bins)]
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        load, count, b = heapq.heappop(heap)
        result[b].append(index)
        heapq.heappush(heap, (load + lengths[index], count + 1, b))
    return [sorted(b) for b in result]


def padding_multiples(tp: int, cp: int, block: int = 1) -> tuple[int, int]:
    """What the length of a sequence, and of a whole micro-batch, is rounded up to.

    Context parallelism cuts each sequence into 2c equal chunks (rank r has chunks r and 2c - 1 - r, so that the causal
    work is even); sequence parallelism cuts what a rank then has into t parts, each of whole blocks (`fp8_alignment`).
    """
    return (1, tp * block) if cp == 1 else (2 * cp, cp * math.lcm(2, tp * block))


def padded_length(length: int, multiple: int) -> int:
    """`length` rounded up to a multiple."""
    return -(-length // multiple) * multiple


def count_micro_batches(lengths: Sequence[int], max_tokens: int, *, pad_to: int = 1, sequence_multiple: int = 1) -> int:
    """How many micro-batches of at most `max_tokens` best-fit-decreasing needs (at least 1).

    `pad_to`, `sequence_multiple`: the packed length of a micro-batch, and of each sequence in it, are rounded up to
    multiples of them (see `padding_multiples`).

    Raises:
        SequenceTooLong: one sequence alone exceeds the budget.
    """
    if max_tokens < 1:
        raise ValueError(f"max_tokens must be at least 1, not {max_tokens}")
    room = max_tokens - max_tokens % pad_to
    longest = max(lengths, default=0)
    if padded_length(longest, sequence_multiple) > room:
        raise SequenceTooLong(
            f"a sequence of {longest} tokens does not fit into a micro-batch of at most {room} tokens; "
            "raise mb_spec.max_tokens_per_mb or shorten the sequences (gconfig.max_new_tokens, dataset max_length)"
        )
    return max(1, len(_best_fit([padded_length(n, sequence_multiple) for n in lengths], room)))


def _best_fit(lengths: Sequence[int], room: int) -> list[list[int]]:
    """Indices by bin: the longest first, each into the fullest bin that has room for it."""
    bins: list[list[int]] = []
    loads: list[tuple[int, int]] = []  # ascending, with the bin of each
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        place = bisect_right(loads, (room - lengths[index], len(bins))) - 1
        if place < 0:
            load, b = 0, len(bins)
            bins.append([])
        else:
            load, b = loads.pop(place)
        bins[b].append(index)
        insort(loads, (load + lengths[index], b))
    return bins


def pack_micro_batches(
    lengths: Sequence[int],
    max_tokens: int,
    *,
    at_least: int = 1,
    multiple_of: int = 1,
    pad_to: int = 1,
    sequence_multiple: int = 1,
) -> list[list[int]]:
    """Indices of `lengths` by micro-batch, none above the token budget, their sizes balanced.

    Their number is what `count_micro_batches` says, or `at_least`, rounded up to `multiple_of`.

    Args:
        lengths: tokens of each sequence.
        max_tokens: token budget of a micro-batch.
        at_least: the number that the other data-parallel ranks need; surplus micro-batches are empty lists.
        multiple_of: the number of micro-batches is a multiple of it (interleaved pipelines).
        pad_to, sequence_multiple: see `count_micro_batches`.

    Raises:
        SequenceTooLong: one sequence alone exceeds the budget.
    """
    room = max_tokens - max_tokens % pad_to
    needed = count_micro_batches(lengths, max_tokens, pad_to=pad_to, sequence_multiple=sequence_multiple)
    count = padded_length(max(needed, at_least), multiple_of)
    lengths = [padded_length(n, sequence_multiple) for n in lengths]
    bins = balanced_partition(lengths, count)
    if max(sum(lengths[i] for i in b) for b in bins) <= room:
        return bins
    return _multifit(lengths, count, room)


def _multifit(lengths: Sequence[int], count: int, room: int) -> list[list[int]]:
    """At most `count` bins of best-fit decreasing, which fit into `room`, under the lowest budget found in eight steps.

    Empty lists make up the number; each list is in ascending order of index.
    """
    best, low = _best_fit(lengths, room), max(-(-sum(lengths) // count), *lengths)
    for _ in range(8):
        if low >= room:
            break
        middle = (low + room) // 2
        bins = _best_fit(lengths, middle)
        if len(bins) <= count:
            best, room = bins, middle
        else:
            low = middle + 1
    return [sorted(b) for b in best] + [[] for _ in range(count - len(best))]
