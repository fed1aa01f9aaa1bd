"""What the views show: a mesh, and beside it nodes and a model, both as plain numbers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import lcm

from areal_like.alloc.diagnostics import AllocationError, Diagnostic
from areal_like.alloc.mesh import ATTENTION, EXPERT, Mesh

__all__ = ["GRIDS", "SHARED", "MeshView", "ModelParts", "Nodes", "Window", "spans"]

GRIDS = {"attention": ATTENTION, "experts": EXPERT}
GROUPS = (*ATTENTION, "dp-cp", "tp-cp", "tp-pp", *EXPERT[:3], "etp-ep")
SHARED = {
    "tp": "share every layer",
    "cp": "share every sequence",
    "dp": "hold the same weights for other sequences",
    "pp": "hold the other layers",
    "etp": "share each expert",
    "ep": "hold the other experts",
    "edp": "hold the same experts",
}
"""What the ranks of a group do together."""
MOST_COLUMNS = 1 << 14


@dataclass(frozen=True)
class Nodes:
    """`count` nodes of `gpus` GPUs each; rank n is GPU n % gpus of node n // gpus."""

    count: int
    gpus: int

    def of(self, ranks: Iterable[int]) -> set[int]:
        """The nodes that hold these ranks."""
        return {rank // self.gpus for rank in ranks}


@dataclass(frozen=True)
class ModelParts:
    """How a model is cut.

    Attributes:
        name: as the user wrote it.
        layers: number of transformer layers.
        chunks: for every pipeline rank the (first layer, number of layers) of each chunk that it holds; one chunk
            without virtual stages.
        experts: of an MoE layer; 0 for a dense model.
        dense_layers: numbers of the layers that have no experts in a model with experts.
    """

    name: str
    layers: int
    chunks: tuple[tuple[tuple[int, int], ...], ...]
    experts: int = 0
    dense_layers: tuple[int, ...] = ()

    def stage(self, pp: int) -> str:
        """What pipeline rank `pp` holds, in words: "layers 0-11, embedding"."""
        parts = ["layers " + " and ".join(spans(range(first, first + count)) for first, count in self.chunks[pp])]
        parts += ["embedding"] if pp == 0 else []
        parts += ["output layer"] if pp == len(self.chunks) - 1 else []
        return ", ".join(parts)

    def expert_range(self, ep: int, ep_size: int) -> tuple[int, int]:
        """First and last expert of expert-parallel index `ep`."""
        each = self.experts // ep_size
        return ep * each, (ep + 1) * each - 1


@dataclass(frozen=True)
class Window:
    """Which ranks a picture draws: `size` of each stage from offset `start`, for some of the stages.

    The ranks at one offset of all stages are a pipeline group, so a window shows whole pipelines when it can.
    """

    start: int
    size: int
    stages: range


@dataclass(frozen=True)
class MeshView:
    """A mesh to be drawn.

    Attributes:
        title: the allocation string.
        rank: the rank to look at.

    Raises:
        AllocationError: AL110 for a rank outside the mesh, AL401 when the nodes have fewer GPUs than there are ranks.
    """

    title: str
    mesh: Mesh
    nodes: Nodes | None = None
    model: ModelParts | None = None
    rank: int | None = None

    def __post_init__(self) -> None:
        if self.rank is not None:
            self.mesh.coordinates(self.rank)
        if self.nodes is not None and self.nodes.count * self.nodes.gpus < self.mesh.world_size:
            count, gpus = self.nodes.count, self.nodes.gpus
            message = f"{self.mesh.world_size} ranks do not fit on {count} nodes of {gpus} GPUs"
            needed = -(-self.mesh.world_size // gpus)
            hint = f"{needed} such nodes are needed: --nodes {needed}x{gpus}"
            raise AllocationError([Diagnostic("AL401", "error", message, source=self.title, help=hint)])

    @property
    def has_experts(self) -> bool:
        """Whether the expert grid differs from the attention grid enough to be drawn."""
        return self.mesh.ep * self.mesh.etp > 1

    @property
    def headline(self) -> str:
        """Allocation, number of ranks, nodes and model in a line."""
        world = self.mesh.world_size
        text = f"{self.title}: {world} rank{'s' * (world > 1)}"
        if self.nodes is not None:
            text += f" on {self.nodes.count} node{'s' * (self.nodes.count > 1)} of {self.nodes.gpus} GPUs"
        return f"{text}, {self.model.name}" if self.model is not None else text

    def dims(self) -> tuple[str, ...]:
        """Dimensions of more than one rank, those of the experts only when there are any."""
        names = ATTENTION + (EXPERT[:3] if self.has_experts else ())
        return tuple(dim for dim in names if self.mesh.size(dim) > 1)

    def groups(self) -> tuple[str, ...]:
        """Names of the groups of more than one rank: `dims` and the compounds of them that Megatron uses."""
        dims = set(self.dims())
        return tuple(name for name in GROUPS if dims.issuperset(name.split("-")))

    def relations(self, grid: str) -> dict[int, str]:
        """For the chosen rank, every other rank of this grid that shares a group with it, and the dimension.

        Two ranks that differ in one coordinate share that dimension's group and no other, so the answer is one name.
        """
        if self.rank is None:
            return {}
        found = {other: dim for dim in GRIDS[grid] for other in self.mesh.group(dim, self.rank)}
        del found[self.rank]
        return found

    def window(self, limit: int) -> Window:
        """At most about `limit` ranks to draw, the chosen rank among them.

        Raises:
            AllocationError: AL106 when one row is too long for any picture.
        """
        mesh = self.mesh
        stage = mesh.world_size // mesh.pp
        unit = lcm(mesh.tp, mesh.etp * mesh.ep)  # whole rows of both grids
        if unit > MOST_COLUMNS:
            message = f"a row of {unit} ranks is too long for a picture"
            hint = "use --format text or json"
            raise AllocationError([Diagnostic("AL106", "error", message, source=self.title, help=hint)])
        shown = min(mesh.pp, max(1, limit // unit))
        size = min(stage, max(unit, limit // shown // unit * unit))
        pp, offset = divmod(self.rank or 0, stage)
        first, start = pp // shown * shown, offset // size * size
        return Window(start, min(size, stage - start), range(first, min(first + shown, mesh.pp)))

    def where(self, rank: int) -> str:
        """Node and GPU of a rank, in words; empty without nodes."""
        return f"node {rank // self.nodes.gpus}, GPU {rank % self.nodes.gpus}" if self.nodes else ""

    def holds(self, rank: int) -> tuple[str, ...]:
        """Layers and experts of a rank, in words; empty without a model."""
        if self.model is None:
            return ()
        at = self.mesh.coordinates(rank)
        parts = [f"{self.model.stage(at.pp)} (of {self.model.layers} layers)"]
        if self.model.experts:
            first, last = self.model.expert_range(at.ep, self.mesh.ep)
            share = f", 1/{self.mesh.etp} of each" if self.mesh.etp > 1 else ""
            dense = f"; no experts in layers {spans(self.model.dense_layers)}" if self.model.dense_layers else ""
            parts.append(f"experts {_pair(first, last)} of {self.model.experts}{share}{dense}")
        return tuple(parts)

    def span(self, name: str) -> tuple[int, int]:
        """Least and greatest number of nodes that a group of this name is spread over."""
        assert self.nodes is not None
        counts = {len(self.nodes.of(group)) for group in self.mesh.groups(name)}
        return min(counts), max(counts)

    def node_ranks(self) -> Iterator[range]:
        """The ranks of each node that holds any."""
        assert self.nodes is not None
        for first in range(0, self.mesh.world_size, self.nodes.gpus):
            yield range(first, min(first + self.nodes.gpus, self.mesh.world_size))

    def sizes(self) -> dict[str, int]:
        """Size of every dimension."""
        return {dim: self.mesh.size(dim) for dim in (*ATTENTION, *EXPERT[:3])}


def spans(numbers: Iterable[int]) -> str:
    """Whole numbers as ranges: "0-3 8-11"."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return " ".join(_pair(first, last) for first, last in runs)


def _pair(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}-{last}"
