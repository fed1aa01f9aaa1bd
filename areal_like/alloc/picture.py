"""Draws a mesh as plain text."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from areal_like.alloc.mesh import Mesh

__all__ = ["draw", "table"]


def draw(mesh: Mesh, limit: int) -> str:
    """One block a pipeline stage: the attention grid, and beside it the expert grid when it differs.

    A row of the attention grid is a data-parallel index (and a context-parallel one), a column a tensor-parallel index:
    ranks in one row share layers, ranks in one column hold the same weights. At most `limit` ranks are drawn.
    """
    stage = mesh.world_size // mesh.pp
    lines: list[str] = []
    for pp in range(mesh.pp):
        if pp and (pp + 1) * stage > limit:
            lines.append(f"... and {mesh.pp - pp} more stages of {stage} ranks")
            break
        left = _grid(mesh, pp, limit, mesh.tp, _attention_row(mesh), [f"tp {i}" for i in range(mesh.tp)])
        columns = [_expert_column(mesh, i) for i in range(mesh.etp * mesh.ep)]
        right = _grid(mesh, pp, limit, len(columns), lambda row: f"edp {row}", columns) if len(columns) > 1 else []
        lines.append(f"pp {pp}" if mesh.pp > 1 else "ranks")
        lines += _beside(left, right)
    return "\n".join(line.rstrip() for line in lines)


def table(header: Iterable[str], rows: Iterable[Iterable[object]]) -> list[str]:
    """Right-aligned columns."""
    cells = [list(header), *([str(cell) for cell in row] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in cells]


def _attention_row(mesh: Mesh) -> Callable[[int], str]:
    if mesh.cp == 1:
        return lambda row: f"dp {row}"
    return lambda row: f"dp {row // mesh.cp} cp {row % mesh.cp}"


def _expert_column(mesh: Mesh, index: int) -> str:
    ep, etp = divmod(index, mesh.etp)
    return f"ep {ep}" if mesh.etp == 1 else f"ep {ep} etp {etp}"


def _grid(mesh: Mesh, pp: int, limit: int, width: int, label: Callable[[int], str], columns: list[str]) -> list[str]:
    """The ranks of a stage in rows of `width`: in both grids the ranks of a stage simply count up."""
    stage = mesh.world_size // mesh.pp
    drawn = min(stage // width, max(1, limit // width))
    shown = min(width, limit)
    first = pp * stage
    rows = [[label(row), *(first + row * width + i for i in range(shown))] for row in range(drawn)]
    lines = table(["", *columns[:shown]], rows)
    if shown < width:
        lines.append(f"... and {width - shown} more columns")
    if drawn < stage // width:
        lines.append(f"... and {stage // width - drawn} more rows")
    return lines


def _beside(left: list[str], right: list[str]) -> list[str]:
    width = max(map(len, left))
    height = max(len(left), len(right))
    padded = [line.ljust(width) for line in left] + [" " * width] * (height - len(left))
    if not right:
        return ["  " + line for line in padded]
    other = right + [""] * (height - len(right))
    return [f"  {a}   |  {b}" for a, b in zip(padded, other, strict=True)]
