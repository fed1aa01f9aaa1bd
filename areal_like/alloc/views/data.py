"""The mesh as JSON, for programs: complete, whatever the size of the world."""

from __future__ import annotations

import json
from typing import Any

from areal_like.alloc.mesh import ATTENTION, EXPERT
from areal_like.alloc.views.view import MeshView

__all__ = ["render", "summary"]


def render(view: MeshView) -> str:
    """One object: `summary`, and either the groups of all ranks or, for a chosen rank, everything about it."""
    content = summary(view)
    if view.rank is not None:
        content["rank"] = rank_entry(view, view.rank)
    else:
        content["groups"] = {name: [list(group) for group in view.mesh.groups(name)] for name in view.groups()}
    return json.dumps(content, ensure_ascii=False)


def summary(view: MeshView) -> dict[str, Any]:
    """Sizes, nodes, and what the stages and the expert groups hold; null for what was not given."""
    nodes, model = view.nodes, view.model
    return {
        "allocation": view.title,
        "world_size": view.mesh.world_size,
        "sizes": view.sizes(),
        "nodes": nodes and {"count": nodes.count, "gpus": nodes.gpus},
        "model": model
        and {
            "name": model.name,
            "layers": model.layers,
            "stages": [[_range(first, count) for first, count in chunks] for chunks in model.chunks],
            "experts": model.experts,
            "dense_layers": list(model.dense_layers),
        },
    }


def rank_entry(view: MeshView, rank: int) -> dict[str, Any]:
    """Coordinates, groups, node, layers and experts of a rank. Ranges are [first, last]."""
    at = view.mesh.coordinates(rank)
    entry: dict[str, Any] = {
        "rank": rank,
        "coordinates": {dim: getattr(at, dim) for dim in (*ATTENTION, *EXPERT[:3])},
        "groups": {name: list(view.mesh.group(name, rank)) for name in view.groups()},
    }
    if view.nodes is not None:
        entry |= {"node": rank // view.nodes.gpus, "gpu": rank % view.nodes.gpus}
    if view.model is not None:
        entry["layers"] = [_range(first, count) for first, count in view.model.chunks[at.pp]]
        entry["embedding"] = at.pp == 0
        entry["output_layer"] = at.pp == view.mesh.pp - 1
        if view.model.experts:
            entry["experts"] = list(view.model.expert_range(at.ep, view.mesh.ep))
    return entry


def _range(first: int, count: int) -> list[int]:
    return [first, first + count - 1]
