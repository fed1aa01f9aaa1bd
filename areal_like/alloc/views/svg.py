"""The mesh as one SVG picture, in light and dark.

A panel a pipeline stage: the attention grid (a column a tensor-parallel index, a row a replica), and beside it the same
ranks in the expert grid. Columns have a shade of blue by tensor-parallel index; a bar under a rank has the colour of
the experts that it holds. With a chosen rank the cells show its groups instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from html import escape

from areal_like.alloc.views.view import SHARED, MeshView, Window, spans

__all__ = ["render"]

LIMIT = 4096
"""Ranks drawn at most, roughly: whole rows and whole stages."""
BAND = 32
"""Rows, at most, of a grid before it goes on beside itself."""
WIDTH = 1180
"""Panels go to the next line beyond this many pixels."""
MARGIN = 28
TOP = 38
"""Room above the rows of a grid, for its name and those of its columns."""
SHADES = 8

STYLE = """
text{font:12px ui-sans-serif,system-ui,-apple-system,'Segoe UI',Roboto,'Helvetica Neue',Arial,sans-serif;fill:#1d2433}
.page{fill:#fbfbfd}.panel{fill:#fff;stroke:#e3e6ee}.title{font-size:19px;font-weight:650}
.mono{font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace}
.head{font-weight:650;font-size:13px}.soft{fill:#667085}.axis{fill:#667085;font-size:10.5px}
.bold{font-weight:650;fill:#1d2433}.num{text-anchor:middle;dominant-baseline:central}.mid{text-anchor:middle}.end{text-anchor:end}
.cell{fill:#eef1f7;stroke:none}.node{stroke:#1d2433;stroke-width:1.8;stroke-linecap:round;fill:none}
.thin{stroke-width:1;opacity:.45}.s0{fill:#dbe9fb}.s1{fill:#c8ddf8}.s2{fill:#b4d0f5}.s3{fill:#a0c3f1}.s4{fill:#8cb6ed}.s5{fill:#78a9e8}.s6{fill:#659be3}
.s7{fill:#528ddd}.tp,.etp{fill:#1769c2}.cp{fill:#0b7d5b}.dp,.edp{fill:#b26a00}.pp{fill:#a3428b}.ep{fill:#c2410c}
.me{fill:#1d2433}.on{fill:#fff;font-weight:650}
@media (prefers-color-scheme:dark){text,.bold{fill:#e7eaf1}.page{fill:#0f131b}.panel{fill:#171c27;stroke:#2a3140}
.soft,.axis:not(.bold){fill:#9aa5b8}.cell{fill:#242b39}.node{stroke:#e7eaf1}.s0{fill:#1b2d45}.s1{fill:#1e3552}.s2{fill:#223e60}
.s3{fill:#26476f}.s4{fill:#2b517f}.s5{fill:#305b90}.s6{fill:#3566a1}.s7{fill:#3b71b3}.tp,.etp{fill:#3b8ee6}
.cp{fill:#14a377}.dp,.edp{fill:#d18a1b}.pp{fill:#c765ae}.ep{fill:#e5642b}.me{fill:#f4f6fa}.on{fill:#0f131b}}
""".replace("\n", "")


def render(view: MeshView) -> str:
    """A complete SVG document."""
    window = view.window(LIMIT)
    panels = [_Panel(view, window, pp) for pp in window.stages]
    body, y, x, tallest, right = [], 96.0, float(MARGIN), 0.0, 0.0
    for panel in panels:
        if x > MARGIN and x + panel.width > WIDTH:
            x, y, tallest = float(MARGIN), y + tallest + 18, 0.0
        body.append(f'<g transform="translate({x:g} {y:g})">{"".join(panel.draw())}</g>')
        x += panel.width + 18
        tallest, right = max(tallest, panel.height), max(right, x - 18)
    legend = list(_legend(view, window))
    width = max(right, 640) + MARGIN
    height = y + tallest + 30 + 20 * len(legend)
    lines = [
        f'<g transform="translate({MARGIN} {y + tallest + 34 + 20 * n:g})">{line}</g>' for n, line in enumerate(legend)
    ]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{height:g}"'
        f' viewBox="0 0 {width:g} {height:g}" role="img" aria-labelledby="t d">'
        f'<title id="t">{escape(view.headline)}</title>'
        f'<desc id="d">{escape(_description(view))}</desc><style>{STYLE}</style>'
        f'<rect class="page" width="100%" height="100%"/>{_heading(view)}{"".join(body)}{"".join(lines)}</svg>'
    )


def _heading(view: MeshView) -> str:
    _, _, rest = view.headline.partition(view.title + ": ")
    return (
        f'<text class="title mono" x="{MARGIN}" y="46">{escape(view.title)}</text>'
        f'<text class="soft" x="{MARGIN}" y="70">{escape(rest)}</text>'
    )


def _description(view: MeshView) -> str:
    sizes = ", ".join(f"{dim} {view.mesh.size(dim)}" for dim in view.dims()) or "one rank"
    return f"The ranks of {view.title} in one panel a pipeline stage; {sizes}."


@dataclass(frozen=True)
class _Panel:
    """One pipeline stage: its heading and its grids side by side."""

    view: MeshView
    window: Window
    pp: int

    @property
    def stage(self) -> int:
        return self.view.mesh.world_size // self.view.mesh.pp

    @cached_property
    def grids(self) -> list[_Grid]:
        mesh, first = self.view.mesh, self.pp * self.stage
        ranks = range(first + self.window.start, first + self.window.start + self.window.size)
        row = "dp" if mesh.cp == 1 else "dp·cp"
        grids = [_Grid(self.view, "attention", ranks, first, mesh.tp, row)]
        if self.view.has_experts:
            grids.append(_Grid(self.view, "experts", ranks, first, mesh.etp * mesh.ep, "edp"))
        return grids

    @property
    def heading(self) -> str:
        return f"Stage {self.pp}" if self.view.mesh.pp > 1 else "All ranks"

    @property
    def note(self) -> str:
        return self.view.model.stage(self.pp) if self.view.model else ""

    @cached_property
    def places(self) -> list[tuple[float, float]]:
        """Where the grids stand: side by side, or below each other when they are too wide."""
        stacked = sum(grid.width for grid in self.grids) + 62 > WIDTH - 2 * MARGIN
        places, x, y = [], 16.0, 44.0 if self.view.has_experts else 28.0  # the grids have names
        for grid in self.grids:
            places.append((x, y))
            x, y = (x, y + grid.height + 18) if stacked else (x + grid.width + 30, y)
        return places

    @property
    def width(self) -> float:
        words = 34 + 7.2 * (len(self.heading) + len(self.note) + 2)
        return max(words, *(x + grid.width + 16 for grid, (x, _) in zip(self.grids, self.places, strict=True)))

    @property
    def height(self) -> float:
        return 18 + max(y + grid.height for grid, (_, y) in zip(self.grids, self.places, strict=True))

    def draw(self) -> Iterator[str]:
        yield f'<rect class="panel" width="{self.width:g}" height="{self.height:g}" rx="10"/>'
        yield f'<text class="head" x="16" y="27">{self.heading}'
        yield f'<tspan class="soft" dx="10" font-weight="400">{escape(self.note)}</tspan></text>'
        for grid, (x, y) in zip(self.grids, self.places, strict=True):
            yield f'<g transform="translate({x:g} {y:g})">{"".join(grid.draw())}</g>'


@dataclass(frozen=True)
class _Grid:
    """Ranks that count up row by row, in bands side by side.

    Attributes:
        first: rank of the stage that has coordinate 0 everywhere.
        columns: ranks in a row.
        row_name: the dimension, or two, that the rows are of.
    """

    view: MeshView
    kind: str
    ranks: range
    first: int
    columns: int
    row_name: str

    @cached_property
    def cell(self) -> float:
        drawn = len(self.ranks) * len(self.view.window(LIMIT).stages)
        digits = len(str(self.ranks[-1]))
        if drawn > 1024:
            return 9
        return max(30, 8.5 * digits + 6) if drawn <= 256 else max(24, 7.2 * digits)

    @property
    def name_every(self) -> int:
        """Columns from one name to the next."""
        if self.cell < 20:
            return 8
        room = 6.2 * len(self.column(self.columns - 1)) / (self.cell + self.gap)
        return 1 if room <= 1 else 2 if room <= 2 else 4

    @property
    def gap(self) -> float:
        return 4 if self.cell > 20 else 2

    @property
    def rows(self) -> int:
        return len(self.ranks) // self.columns

    @property
    def band(self) -> int:
        """Rows of a band."""
        return self.rows if self.rows <= 16 else min(BAND, 4 * -(-self.rows // 16))

    @property
    def bands(self) -> int:
        return -(-self.rows // self.band)

    @property
    def bands_in_line(self) -> int:
        return min(self.bands, max(1, int((WIDTH - 2 * MARGIN) // (self.band_width + 18))))

    @cached_property
    def margin(self) -> float:
        """Room for the names of the rows, and of the nodes."""
        longest = max(len(self.row(0)), len(self.row(self.rows - 1)))
        nodes = 7 * len(f"node {self.ranks[-1] // self.view.nodes.gpus}") if self.view.nodes else 0
        return 6.2 * longest + nodes + 12

    @property
    def band_width(self) -> float:
        return self.margin + self.columns * (self.cell + self.gap)

    @property
    def width(self) -> float:
        return self.bands_in_line * (self.band_width + 18) - 18

    @property
    def band_height(self) -> float:
        return TOP + self.band * (self.cell + self.gap)

    @property
    def height(self) -> float:
        lines = -(-self.bands // self.bands_in_line)
        return lines * (self.band_height - 6) + 6

    def row(self, index: int) -> str:
        index += (self.ranks[0] - self.first) // self.columns
        cp = self.view.mesh.cp
        if self.kind == "experts":
            return f"edp {index}"
        return f"dp {index}" if cp == 1 else f"dp {index // cp} cp {index % cp}"

    def column(self, index: int) -> str:
        if self.kind == "attention":
            return f"tp {index}"
        ep, etp = divmod(index, self.view.mesh.etp)
        return f"ep {ep}" if self.view.mesh.etp == 1 else f"ep {ep}·{etp}"

    def draw(self) -> Iterator[str]:
        step = self.cell + self.gap
        names = self.cell > 20
        lines: list[str] = []
        relations = self.view.relations(self.kind)
        if self.view.has_experts:
            yield f'<text class="soft" y="6">{self.kind}</text>'
        for band in range(self.bands):
            line, place = divmod(band, self.bands_in_line)
            left, above = place * (self.band_width + 18) + self.margin, line * (self.band_height - 6)
            for column in range(self.columns):
                if column % self.name_every == 0:
                    anchor = "mid" if self.name_every == 1 else "begin"
                    x = left + column * step + (self.cell / 2 if self.name_every == 1 else 0)
                    yield f'<text class="axis {anchor}" x="{x:g}" y="{above + TOP - 8:g}">{self.column(column)}</text>'
            for row in range(band * self.band, min((band + 1) * self.band, self.rows)):
                top = above + TOP + (row - band * self.band) * step
                yield from self._row_names(row, left, top, names or row % 4 == 0)
                for column in range(self.columns):
                    rank = self.ranks[row * self.columns + column]
                    x = left + column * step
                    yield from self._cell(rank, column, x, top, relations)
                    lines += self._borders(rank, column, x, top, row > band * self.band)
        if lines:
            yield f'<path class="node{"" if names else " thin"}" d="{"".join(lines)}"/>'

    def _row_names(self, row: int, left: float, top: float, named: bool) -> Iterator[str]:
        middle = top + self.cell / 2 + 3.5
        if named:
            yield f'<text class="axis end" x="{left - 7:g}" y="{middle:g}">{self.row(row)}</text>'
        rank, nodes = self.ranks[row * self.columns], self.view.nodes
        if nodes is not None and named and (rank % nodes.gpus == 0 or row % self.band == 0):
            x = left - self.margin
            yield f'<text class="axis bold" x="{x:g}" y="{middle:g}">node {rank // nodes.gpus}</text>'

    def _cell(self, rank: int, column: int, x: float, y: float, relations: dict[int, str]) -> Iterator[str]:
        size = self.cell
        if self.view.rank is None:
            group = f"s{column * SHADES // self.columns}" if self.kind == "attention" else ""
        else:
            group = "me" if rank == self.view.rank else relations.get(rank, "")
        box = f'x="{x:g}" y="{y:g}" width="{size:g}" height="{size:g}" rx="{4 if size > 20 else 2}"'
        yield f'<rect class="cell {group}" {box}/>'
        if self.view.has_experts and self.view.rank is None:
            at = self.view.mesh.coordinates(rank)
            hue = 360 * (at.ep * self.view.mesh.etp + at.etp) // (self.view.mesh.ep * self.view.mesh.etp)
            bar = f'x="{x:g}" y="{y + size - 4:g}" width="{size:g}" height="4"' if size > 20 else box
            if size > 20 or self.kind == "experts":
                yield f'<rect {bar} rx="2" fill="hsl({hue} 62% 55%)"/>'
        if size > 20:
            on = " on" if self.view.rank is not None and group else ""
            yield f'<text class="num{on}" x="{x + size / 2:g}" y="{y + size / 2:g}">{rank}</text>'

    def _borders(self, rank: int, column: int, x: float, y: float, above: bool) -> Iterator[str]:
        """Lines where the left or the upper neighbour is on another node."""
        if self.view.nodes is None:
            return
        gpus, half, size = self.view.nodes.gpus, self.gap / 2, self.cell
        if column and rank % gpus == 0:
            yield f"M{x - half:g} {y - half:g}v{size + 2 * half:g}"
        if above and (rank - self.columns) // gpus != rank // gpus:
            yield f"M{x - half:g} {y - half:g}h{size + 2 * half:g}"


def _legend(view: MeshView, window: Window) -> Iterator[str]:
    mesh = view.mesh
    if view.rank is not None:
        place = f" ({view.where(view.rank)})" if view.nodes else ""
        held = "; ".join(view.holds(view.rank))
        yield _entry("me", f"rank {view.rank}{place}", held)
        for dim in view.dims():
            group = mesh.group(dim, view.rank)
            members = spans(group) if len(group) > 16 else " ".join(map(str, group))
            members = members if len(members) < 90 else members[:90].rsplit(" ", 1)[0] + " ..."
            yield _entry(dim, dim, f"{SHARED[dim]}: {members}")
    else:
        yield _entry(
            "s5", "tp", "one shade a tensor-parallel index: ranks of one shade hold the same part of each layer"
        )
        if view.has_experts:
            yield _entry(
                "ep", "ep", "one colour a part of the experts, in both grids: ranks of one colour hold the same"
            )
        if view.nodes is not None:
            yield '<path class="node" d="M0 -4h12"/><text x="20">between two nodes</text>'
    hidden = mesh.world_size - window.size * len(window.stages)
    if hidden:
        yield f'<text class="soft">... and {hidden} more ranks, not drawn</text>'


def _entry(group: str, name: str, text: str) -> str:
    chip = f'<rect class="{group}" width="12" height="12" y="-10" rx="3"/>'
    if group == "hue":
        colours = ((0, 10), (4, 130), (8, 250))
        chip = "".join(f'<rect x="{x}" width="4" height="12" y="-10" fill="hsl({hue} 62% 55%)"/>' for x, hue in colours)
    return (
        f'{chip}<text x="20"><tspan font-weight="650">{name}'
        f'</tspan><tspan class="soft" dx="8">{escape(text)}</tspan></text>'
    )
