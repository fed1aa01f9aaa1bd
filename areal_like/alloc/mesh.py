"""`Mesh`: which rank has which coordinates, and who is in which group. Pure arithmetic.

The ranks form two grids over the same numbers, each in the order of Megatron-Core (`tp-cp-ep-dp-pp`, the first varies
fastest; `megatron.core.parallel_state.RankGenerator`):

- attention:  tp, cp, dp, pp
- experts:    etp, ep, edp, pp        (Megatron calls these tp, ep and dp of its expert generator)

The pipeline coordinate of a rank is the same in both.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from math import prod

from areal_like.alloc.diagnostics import AllocationError, Diagnostic, closest

__all__ = ["Coordinates", "Mesh"]

ATTENTION = ("tp", "cp", "dp", "pp")
EXPERT = ("etp", "ep", "edp", "pp")
IN_EXPERT_GRID = {"tp": "etp", "dp": "edp"}
"""Beside `ep`, the names tp and dp mean those of the experts, as Megatron writes `tp-ep-pp`."""


@dataclass(frozen=True)
class Coordinates:
    """Where a rank stands in every dimension."""

    dp: int
    tp: int
    pp: int
    cp: int
    ep: int
    etp: int
    edp: int


@dataclass(frozen=True)
class Mesh:
    """All ranks of one allocation; `tp * cp * dp * pp` of them.

    Dimensions are named dp, tp, pp, cp, ep, etp, edp. A group is named by a dimension or by several joined with `-`
    in any order ("dp-cp", "tp-pp", "tp-ep-pp"): the ranks that differ in those coordinates only. A name with ep, etp or
    edp in it is about the expert grid, where tp stands for etp and dp for edp.

    Raises:
        AllocationError: AL104 when the experts do not divide the ranks, AL110 for an unknown dimension, group or rank.
    """

    tp: int = 1
    cp: int = 1
    dp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 1

    def __post_init__(self) -> None:
        sizes = (self.tp, self.cp, self.dp, self.pp, self.ep, self.etp)
        if any(type(size) is not int or size < 1 for size in sizes):
            raise _error("AL110", f"a mesh has whole sizes from 1, not {self!r}")
        if self.tp * self.cp * self.dp % (self.etp * self.ep):
            stage = self.tp * self.cp * self.dp
            raise _error("AL104", f"etp {self.etp} x ep {self.ep} does not divide the {stage} ranks of a stage")

    @cached_property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.tp * self.cp * self.dp * self.pp

    @cached_property
    def edp(self) -> int:
        """Expert data-parallel size: the ranks of a stage divided by etp * ep."""
        return self.tp * self.cp * self.dp // (self.etp * self.ep)

    @cached_property
    def _shape(self) -> dict[str, int]:
        return {dim: getattr(self, dim) for dim in (*ATTENTION, *EXPERT)}

    def size(self, dim: str) -> int:
        """Number of ranks in each group of this name."""
        inside, _ = self._axes(dim)
        return prod(size for size, _ in inside)

    def coordinates(self, rank: int) -> Coordinates:
        """Where `rank` stands."""
        self._check_rank(rank)
        values: dict[str, int] = {}
        for grid in (ATTENTION, EXPERT):
            rest = rank
            for dim in grid:
                rest, values[dim] = divmod(rest, self._shape[dim])
        return Coordinates(**values)

    def rank(self, *, dp: int = 0, tp: int = 0, pp: int = 0, cp: int = 0) -> int:
        """The rank at these coordinates of the attention grid."""
        rank, stride = 0, 1
        for dim, coordinate in zip(ATTENTION, (tp, cp, dp, pp), strict=True):
            size = self._shape[dim]
            if not 0 <= coordinate < size:
                raise _error("AL110", f"{dim} {coordinate} is not in this mesh: {dim} goes from 0 to {size - 1}")
            rank += coordinate * stride
            stride *= size
        return rank

    def group(self, dim: str, rank: int) -> tuple[int, ...]:
        """The ranks of the group of this name that `rank` is in, in Megatron's order. Builds no other group."""
        self._check_rank(rank)
        inside, _ = self._axes(dim)
        first = rank - sum(rank // stride % size * stride for size, stride in inside)
        return _members(first, inside)

    def groups(self, dim: str) -> Iterator[tuple[int, ...]]:
        """All groups of this name, in Megatron's order; together they hold every rank once."""
        inside, outside = self._axes(dim)
        return (_members(first, inside) for first in _members(0, outside))

    def render(self, limit: int = 64) -> str:
        """A picture in plain text; `limit` bounds the ranks drawn."""
        from areal_like.alloc.picture import draw

        return draw(self, limit)

    def __str__(self) -> str:
        return self.render()

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.world_size:
            raise _error("AL110", f"rank {rank} is not in this mesh of {self.world_size} ranks")

    def _axes(self, name: str) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """(axes in the group, axes outside it), an axis being (size, stride), fastest first."""
        dims = name.split("-")
        expert = not {"ep", "etp", "edp"}.isdisjoint(dims)
        grid = EXPERT if expert else ATTENTION
        wanted = {IN_EXPERT_GRID.get(dim, dim) if expert else dim for dim in dims}
        if len(wanted) != len(dims) or not wanted <= set(grid):
            raise _unknown_group(name, dims, grid)
        inside: list[tuple[int, int]] = []
        outside: list[tuple[int, int]] = []
        stride = 1
        for dim in grid:
            size = self._shape[dim]
            axes = inside if dim in wanted else outside
            if axes and axes[-1][0] * axes[-1][1] == stride:  # both together count up evenly: one longer axis
                axes[-1] = (axes[-1][0] * size, axes[-1][1])
            else:
                axes.append((size, stride))
            stride *= size
        return inside, outside


def _members(first: int, axes: list[tuple[int, int]]) -> tuple[int, ...]:
    """first + all combinations of the axes, the fastest first."""
    if not axes:
        return (first,)
    (size, stride), *others = axes
    ranks: Iterable[int] = range(first, first + size * stride, stride)
    for size, stride in others:
        if size > 1:
            ranks = [rank + offset for offset in range(0, size * stride, stride) for rank in ranks]
    return tuple(ranks)


def _unknown_group(name: str, dims: list[str], grid: tuple[str, ...]) -> AllocationError:
    known = (*ATTENTION, *EXPERT[:-1])
    hint = f"dimensions are {', '.join(known)}"
    strange = [dim for dim in dims if dim not in known]
    if strange and (near := closest(strange[0], known)):
        hint = f"did you mean {near}? {hint}"
    elif not strange:
        hint = f"a group joins different dimensions of one grid, here {', '.join(grid)}"
    return AllocationError([Diagnostic("AL110", "error", f"a mesh has no group {name!r}", help=hint)])


def _error(code: str, message: str) -> AllocationError:
    return AllocationError([Diagnostic(code, "error", message)])
