"""Layouts near one that does not work."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from itertools import chain, islice
from math import log2

from areal_like.alloc import ModelAllocation

__all__ = ["nearest"]

TRIES = 200
"""Candidates on one number of GPUs; after them only layouts with one letter beside d are tried."""
LARGEST = 128
"""Sizes of t, p and c that are tried, beside those written."""

Passes = Callable[[ModelAllocation], bool]


def nearest(
    allocation: ModelAllocation, passes: Passes, limit: int = 3, *, gpus: int | None = None, experts: bool = False
) -> tuple[str, ...]:
    """Up to `limit` layouts that pass, nearest first, as canonical strings.

    The distance of two layouts is the sum over t, p, c, e, v and the experts' t of |log2| of the quotient of their
    sizes. Layouts on the same number of GPUs come before those on others.

    Args:
        gpus: most GPUs a candidate may have; those of the allocation when None.
        experts: the model has some, so that e is worth trying.
    """
    found: dict[str, None] = {}
    for world in _worlds(allocation.world_size, gpus):
        for candidate in chain(islice(_near(allocation, world, experts), TRIES), _plain(allocation, world)):
            if candidate != allocation and passes(candidate):
                found[str(candidate)] = None
                if len(found) == limit:
                    return tuple(found)
    return tuple(found)


def _worlds(world: int, gpus: int | None) -> list[int]:
    """The same number of GPUs, then what the cluster has, then powers of two below, and the next one above."""
    most = gpus or world
    powers = [2**n for n in range(world.bit_length(), -1, -1) if 2**n != world]
    near = sorted(powers, key=lambda n: abs(log2(n / world)))[:4]
    return [n for n in dict.fromkeys([world, min(world, most), *near]) if n <= most]


def _near(allocation: ModelAllocation, world: int, experts: bool) -> Iterator[ModelAllocation]:
    """Layouts on so many ranks, nearest first."""
    letters = allocation.descriptor.letters
    sizes = [n for n in range(1, min(world, LARGEST) + 1) if world % n == 0]
    own = [n for n in (allocation.tp, allocation.pp, allocation.cp) if n > LARGEST and world % n == 0]
    cuts = sorted({*sizes, *own})
    heap: list[tuple[float, tuple[int, ...]]] = []
    for t in cuts if "t" in letters else (1,):
        for p in cuts if "p" in letters else (1,):
            if world % (t * p):
                continue
            for c in sorted({allocation.cp, max(1, allocation.cp // 2), 1}):
                if world % (t * p * c) == 0:
                    near = _distance((t, allocation.tp), (p, allocation.pp), (c, allocation.cp))
                    heap.append((near, (t, p, c)))
    heapq.heapify(heap)
    while heap:
        _, (t, p, c) = heapq.heappop(heap)
        for e, etp in _experts(allocation, world // p, experts):
            for v in {allocation.vpp if p > 1 else 1, 1}:
                yield _layout(allocation, world, t, p, c, e, etp, v)


def _plain(allocation: ModelAllocation, world: int) -> Iterator[ModelAllocation]:
    """Replicas alone, and replicas cut by t or by p."""
    sizes = [n for n in range(1, min(world, LARGEST) + 1) if world % n == 0]
    letters = allocation.descriptor.letters
    pairs = [(t, 1) for t in sizes if "t" in letters or t == 1] + [(1, p) for p in sizes[1:] if "p" in letters]
    for t, p in sorted(pairs, key=lambda pair: _distance((pair[0], allocation.tp), (pair[1], allocation.pp))):
        yield _layout(allocation, world, t, p)


def _layout(
    like: ModelAllocation, world: int, t: int, p: int, c: int = 1, e: int = 1, etp: int = 1, v: int = 1
) -> ModelAllocation:
    """A layout whose sizes are known to go together, so that it need not be validated."""
    return ModelAllocation.model_construct(
        backend=like.backend,
        name=like.name,
        data_parallel_size=world // (t * p * c),
        tensor_parallel_size=t,
        pipeline_parallel_size=p,
        context_parallel_size=c,
        expert_parallel_size=e,
        virtual_pipeline_parallel_size=v,
        expert_tensor_parallel_size=etp,
    )


def _experts(allocation: ModelAllocation, ranks: int, experts: bool) -> list[tuple[int, int]]:
    """Sizes of e and of the experts' t that divide the ranks of a stage, nearest first."""
    every = [n for n in range(1, min(ranks, 256) + 1) if ranks % n == 0]
    es = every if allocation.ep > 1 or (experts and "e" in allocation.descriptor.letters) else [1]
    ts = every if allocation.etp > 1 else [1]
    pairs = [(e, t) for e in es for t in ts if ranks % (e * t) == 0]
    pairs.sort(key=lambda pair: _distance((pair[0], allocation.ep), (pair[1], allocation.etp)))
    return list(dict.fromkeys([*pairs[:5], (1, 1)]))


def _distance(*pairs: tuple[int, int]) -> float:
    return sum(abs(log2(a / b)) for a, b in pairs)
