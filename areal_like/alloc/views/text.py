"""The mesh as plain text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice

from areal_like.alloc.mesh import ATTENTION, EXPERT, Mesh
from areal_like.alloc.picture import table
from areal_like.alloc.views.view import SHARED, MeshView, spans

__all__ = ["render"]

RANKS_SHOWN = 64
LINES_SHOWN = 16


def render(view: MeshView) -> str:
    """All of the mesh in short, or everything about the chosen rank."""
    return "\n".join(_rank(view, view.rank) if view.rank is not None else _overview(view))


def _overview(view: MeshView) -> Iterator[str]:
    mesh = view.mesh
    yield f"{view.headline}\n\n{mesh.render(RANKS_SHOWN)}\n"
    ranks = range(min(mesh.world_size, RANKS_SHOWN))
    dims = (*ATTENTION, *EXPERT[:3])
    yield from table(["rank", *dims], ([rank, *_places(mesh, rank, dims)] for rank in ranks))
    if mesh.world_size > RANKS_SHOWN:
        yield f"... and {mesh.world_size - RANKS_SHOWN} more ranks"
    yield ""
    for name in view.groups():
        yield f"{name:>6}  {_groups(mesh, name)}"
    if view.nodes is not None:
        yield from _nodes(view)
    if view.model is not None:
        yield from _model(view)


def _places(mesh: Mesh, rank: int, dims: Iterable[str]) -> list[int]:
    at = mesh.coordinates(rank)
    return [getattr(at, dim) for dim in dims]


def _groups(mesh: Mesh, name: str) -> str:
    """The first groups of this name, as many as have RANKS_SHOWN ranks together."""
    size = mesh.size(name)
    count = mesh.world_size // size
    shown = [_members(group, size) for group in islice(mesh.groups(name), max(1, RANKS_SHOWN // size))]
    more = f" ... and {count - len(shown)} more" if count > len(shown) else ""
    return " ".join(shown) + more


def _members(group: tuple[int, ...], size: int) -> str:
    return f"[{' '.join(map(str, group[:RANKS_SHOWN]))}{' ...' if size > RANKS_SHOWN else ''}]"


def _nodes(view: MeshView) -> Iterator[str]:
    """What each node holds, and which groups leave their node."""
    nodes, dims = list(view.node_ranks()), view.dims()
    rows = []
    for number, ranks in enumerate(nodes[:LINES_SHOWN]):
        places = zip(*(_places(view.mesh, rank, dims) for rank in ranks), strict=True)
        rows.append([number, spans(ranks), *(spans(place) for place in places)])
    yield ""
    yield from table(["node", "ranks", *dims], rows)
    if len(nodes) > LINES_SHOWN:
        yield f"... and {len(nodes) - LINES_SHOWN} more nodes"
    yield ""
    counted = []
    for name in view.groups():
        size, (least, most) = view.mesh.size(name), view.span(name)
        reach = str(most) if least == most else f"{least} to {most}"
        counted.append([name, size, view.mesh.world_size // size, reach])
    yield from table(["group", "ranks", "groups", "nodes a group is on"], counted)


def _model(view: MeshView) -> Iterator[str]:
    """Which layers and experts lie where."""
    model, mesh = view.model, view.mesh
    assert model is not None
    yield f"\n{model.name}: {model.layers} layers" + (f", {model.experts} experts" if model.experts else "")
    for pp in range(min(mesh.pp, RANKS_SHOWN)):
        yield f"  pp {pp}: {model.stage(pp)}"
    if mesh.pp > RANKS_SHOWN:
        yield f"  ... and {mesh.pp - RANKS_SHOWN} more stages"
    if model.experts:
        share = f", each rank 1/{mesh.etp} of each expert" if mesh.etp > 1 else ""
        for ep in range(min(mesh.ep, LINES_SHOWN)):
            first, last = model.expert_range(ep, mesh.ep)
            yield f"  ep {ep}: experts {spans(range(first, last + 1))}{share}"
        if mesh.ep > LINES_SHOWN:
            yield f"  ... and {mesh.ep - LINES_SHOWN} more expert groups"
        if model.dense_layers:
            yield f"  no experts in layers {spans(model.dense_layers)}"


def _rank(view: MeshView, rank: int) -> Iterator[str]:
    """One rank: where it stands, what it holds, and who is in its groups."""
    mesh = view.mesh
    yield f"{view.headline}\n"
    attention = " ".join(f"{dim} {place}" for dim, place in zip(ATTENTION, _places(mesh, rank, ATTENTION), strict=True))
    experts = " ".join(f"{dim} {place}" for dim, place in zip(EXPERT, _places(mesh, rank, EXPERT), strict=True))
    place = f" ({view.where(rank)})" if view.nodes else ""
    yield f"rank {rank}{place}: {attention}" + (f"; experts: {experts}" if view.has_experts else "")
    yield from (f"  {part}" for part in view.holds(rank))
    yield ""
    for name in view.groups():
        group = mesh.group(name, rank)
        notes = [SHARED[name]] if name in SHARED else []
        if view.nodes is not None:
            nodes = view.nodes.of(group)
            notes.append("in this node" if len(nodes) == 1 else f"over {len(nodes)} nodes")
        yield f"{name:>6}  {_members(group, len(group))}" + (f"  {', '.join(notes)}" if notes else "")
    if not view.groups():
        yield "alone in every group"
