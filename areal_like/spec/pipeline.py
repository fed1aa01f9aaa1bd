"""Layers to pipeline stages, by compute.

The slowest stage sets the pace of a pipeline. A stage's compute is that of its layers, plus the vocabulary projection
on the last one; the embedding look-up costs nothing. Splitting by parameters instead (as some systems do) starves the
outer stages of small models with large vocabularies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

__all__ = ["split_layers"]


def split_layers(layer_costs: Sequence[float], stages: int, *, head_cost: float = 0.0) -> list[int]:
    """Number of consecutive layers of each stage.

    Minimises the cost of the slowest stage, and among those splits the sum of squared costs (so equal layers spread
    evenly). No stage is empty.

    Args:
        layer_costs: compute of each layer (any unit).
        stages: number of stages, counting virtual ones.
        head_cost: compute of the vocabulary projection in the same unit, added to the last stage.

    Raises:
        ValueError: fewer layers than stages.
    """
    count = len(layer_costs)
    if stages < 1:
        raise ValueError(f"stages must be at least 1, not {stages}")
    if count < stages:
        raise ValueError(f"{count} layers cannot fill {stages} pipeline stages: each needs at least one")
    return list(_split(tuple(layer_costs), stages, head_cost))


@lru_cache(maxsize=256)
def _split(costs: tuple[float, ...], stages: int, head_cost: float) -> tuple[int, ...]:
    count = len(costs)
    prefix = [0.0]
    for cost in costs:
        prefix.append(prefix[-1] + cost)

    def stage_cost(start: int, end: int) -> float:
        return prefix[end] - prefix[start] + (head_cost if end == count else 0.0)

    limit = _smallest_maximum(count, stages, stage_cost) * (1 + 1e-9)
    # best[e]: least sum of squares for layers [0, e) in s stages, all within the limit
    infinity = float("inf")
    best = [0.0] + [infinity] * count
    choice: list[list[int]] = []
    for s in range(1, stages + 1):
        row, came_from = [infinity] * (count + 1), [0] * (count + 1)
        last_end = count - (stages - s)
        for end in range(s, last_end + 1):
            if s < stages and end == count:
                continue
            for start in range(end - 1, s - 2, -1):
                cost = stage_cost(start, end)
                if cost > limit:
                    break
                total = best[start] + cost * cost
                # Strictly better by more than rounding, so that equal splits give the earlier stages more layers.
                if total < row[end] - 1e-12 * max(1.0, abs(total)):
                    row[end], came_from[end] = total, start
        best, choice = row, [*choice, came_from]
    sizes: list[int] = []
    end = count
    for came_from in reversed(choice):
        start = came_from[end]
        sizes.append(end - start)
        end = start
    return tuple(reversed(sizes))


def _smallest_maximum(count: int, stages: int, stage_cost: Callable[[int, int], float]) -> float:
    """The least possible cost of the slowest stage, by dynamic programming over end positions."""
    infinity = float("inf")
    best = [0.0] + [infinity] * count
    for s in range(1, stages + 1):
        row = [infinity] * (count + 1)
        for end in range(s, count - (stages - s) + 1):
            if s < stages and end == count:
                continue
            for start in range(end - 1, s - 2, -1):
                cost = stage_cost(start, end)
                if cost >= row[end]:
                    break
                row[end] = min(row[end], max(best[start], cost))
        best = row
    return best[count]
