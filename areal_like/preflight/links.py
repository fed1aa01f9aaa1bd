"""Which groups of a layout leave a node. Arithmetic over the strides of the Mesh, without building a group.

Ranks fill nodes one after another. In the Mesh's order (`areal_like.alloc.mesh`) a group's ranks are `stride` apart:
tp 1; cp t; dp-cp t; pp world/p; etp 1; ep etp; edp etp*ep.
"""

from __future__ import annotations

from functools import lru_cache
from math import gcd
from typing import NamedTuple

from areal_like.preflight.step_job import Sizes

__all__ = ["Group", "expert_group", "groups"]


class Group(NamedTuple):
    """One kind of group.

    Attributes:
        size: ranks.
        in_node: fewest members of a group that share a node with one another.
        leaves_node: some group of this kind has members on several nodes.
    """

    size: int
    in_node: int
    leaves_node: bool


def groups(sizes: Sizes, gpus_per_node: int) -> dict[str, Group]:
    """Groups tp, cp, dp-cp, pp, etp, ep, edp of a layout on nodes of this many GPUs."""
    stage = sizes.dp * sizes.tp * sizes.cp
    node = min(gpus_per_node, stage * sizes.pp)  # a job of one node: its groups divide it
    return {
        "tp": _group(sizes.tp, 1, node),
        "cp": _group(sizes.cp, sizes.tp, node),
        "dp-cp": _group(sizes.dp * sizes.cp, sizes.tp, node),
        "pp": _group(sizes.pp, stage, node),
        "etp": _group(sizes.etp, 1, node),
        "ep": _group(sizes.ep, sizes.etp, node),
        "edp": _group(stage // (sizes.ep * sizes.etp), sizes.ep * sizes.etp, node),
    }


def expert_group(sizes: Sizes, gpus_per_node: int) -> Group:
    """The group ep alone."""
    node = min(gpus_per_node, sizes.dp * sizes.tp * sizes.cp * sizes.pp)
    return _group(sizes.ep, sizes.etp, node)


@lru_cache(maxsize=4096)
def _group(size: int, stride: int, node: int) -> Group:
    """The ranks of such groups lie in blocks of size * stride.

    Blocks that divide a node stay inside. Otherwise some block begins or ends within a node; the part that it has there
    is a multiple of gcd(block, node) ranks, of which each group has one in `stride`.
    """
    block = size * stride
    if size == 1 or node % block == 0:
        return Group(size, size, False)
    return Group(size, max(1, min(size, gcd(block, node) // stride)), True)
