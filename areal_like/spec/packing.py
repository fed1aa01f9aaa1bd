"""Sequences into bins: over data-parallel ranks, and into micro-batches under a token budget.

Both are instances of multiway number partitioning; the longest-processing-time rule (Graham 1969) is within 4/3 of the
optimum and, unlike differencing methods, keeps each bin a plain list that can be read.
"""

from __future__ import annotations

import heapq
import math
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
    """How many micro-batches of at most `max_tokens` first-fit-decreasing needs (at least 1).

    `pad_to`, `sequence_multiple`: the packed length of a micro-batch, and of each sequence in it, are rounded up to
    multiples of them (see `padding_multiples`).

    Raises:
        SequenceTooLong: one sequence alone exceeds the budget.
    """
    if max_tokens < 1:
        raise ValueError(f"max_tokens must be at least 1, not {max_tokens}")
    room = max_tokens - max_tokens % pad_to
    loads: list[int] = []
    for real in sorted(lengths, reverse=True):
        length = padded_length(real, sequence_multiple)
        if length > room:
            raise SequenceTooLong(
                f"a sequence of {real} tokens does not fit into a micro-batch of at most {room} tokens; "
                "raise mb_spec.max_tokens_per_mb or shorten the sequences (gconfig.max_new_tokens, dataset max_length)"
            )
        for i, load in enumerate(loads):
            if load + length <= room:
                loads[i] += length
                break
        else:
            loads.append(length)
    return max(1, len(loads))


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

    Args:
        lengths: tokens of each sequence.
        max_tokens: token budget of a micro-batch.
        at_least: the number that the other data-parallel ranks need; surplus micro-batches are empty lists.
        multiple_of: the number of micro-batches is a multiple of it (interleaved pipelines).
        pad_to, sequence_multiple: see `count_micro_batches`.

    Raises:
        SequenceTooLong: one sequence alone exceeds the budget.
    """
    lengths = [padded_length(n, sequence_multiple) for n in lengths]
    needed = max(count_micro_batches(lengths, max_tokens, pad_to=pad_to), at_least)
    room = max_tokens - max_tokens % pad_to
    count = -(-needed // multiple_of) * multiple_of
    while True:
        bins = balanced_partition(lengths, count)
        if all(sum(lengths[i] for i in b) <= room for b in bins):
            return bins
        # Balancing can overflow where first-fit just fitted; one more group always ends (a bin a sequence fits).
        count += multiple_of
