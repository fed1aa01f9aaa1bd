"""Which sequences begin alike, so that what they share runs through the model once.

The answers to one prompt share the prompt; a pair of preferences shares its question. A causal model computes the same
for tokens with the same predecessors, so a packed row may hold a shared beginning once and each sequence's own rest
after it (tree training in AReaL; Prefix Grouper, arXiv:2506.05433).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

__all__ = ["Family", "find_families"]


@dataclass(frozen=True)
class Family:
    """Sequences that begin alike, or one sequence alone.

    Attributes:
        members: indices of the sequences.
        shared: tokens that a row holds once for all of them; 0 for one alone. The token after them is common too: the
            last shared position predicts the same token in every member.
        tokens: of the row that holds them all.
    """

    members: tuple[int, ...]
    shared: int
    tokens: int


def find_families(sequences: Sequence[list[int]], max_tokens: int | None = None) -> list[Family]:
    """Put each sequence into one family so that rows are shortest.

    Sequences in lexicographic order have those that begin alike side by side; the best cut of that order into families
    is found by dynamic programming, from the front, over where the last family begins.

    Args:
        max_tokens: no family of several is larger; None for no limit. One sequence alone may be.

    Returns:
        Families in the order of their first member; an empty sequence is alone.
    """
    order = sorted(range(len(sequences)), key=lambda i: sequences[i])
    lengths = [len(sequences[i]) for i in order]
    common = [0] + [_common(sequences[a], sequences[b]) for a, b in pairwise(order)]
    saved, begins = [0], [0]  # by the number of sequences placed: most tokens saved, where the last family begins
    for end in range(1, len(order) + 1):
        best, begin = saved[end - 1], end - 1
        shared, total = lengths[end - 1], lengths[end - 1]
        for first in range(end - 2, -1, -1):
            shared, total = min(shared, common[first + 1]), total + lengths[first]
            saving = (end - first - 1) * (shared - 1)
            if shared <= 1 or (max_tokens is not None and total - saving > max_tokens):
                break  # an even larger family shares less and holds more
            if saved[first] + saving > best:
                best, begin = saved[first] + saving, first
        saved.append(best)
        begins.append(begin)
    families, end = [], len(order)
    while end:
        begin = begins[end]
        members = tuple(sorted(order[begin:end]))
        shared = min(common[begin + 1 : end]) - 1 if end - begin > 1 else 0
        tokens = sum(lengths[begin:end]) - (end - begin - 1) * shared
        families.append(Family(members, shared, tokens))
        end = begin
    return sorted(families, key=lambda family: family.members)


def _common(a: list[int], b: list[int]) -> int:
    """Length of the longest common beginning."""
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return min(len(a), len(b))
