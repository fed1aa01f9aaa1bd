"""Process groups from the allocation's `Mesh`, one collection a model.

Megatron-Core keeps one set of groups in module globals (`parallel_state`); two models of different layouts in one
process would share it by accident. Here every model carries its own `ProcessGroupCollection`, and the globals stay
unset, so that a piece of Megatron that still reaches for them fails instead of using another model's groups.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from areal_like.alloc import Mesh

__all__ = ["ModelGroups", "create_process_groups", "gather_shards"]

_MESH_GROUPS = {
    "tp": "tp",
    "pp": "pp",
    "cp": "cp",
    "dp": "dp",
    "dp_cp": "dp-cp",
    "tp_cp": "tp-cp",
    "mp": "tp-pp",
    "tp_dp_cp": "tp-dp-cp",
    "ep": "ep",
    "expt_tp": "etp",
    "expt_dp": "edp",
    "tp_ep": "etp-ep",
    "tp_ep_pp": "etp-ep-pp",
}
"""Megatron-Core's name of a group: the Mesh's."""


@dataclass(frozen=True)
class ModelGroups:
    """The groups of one model, and where this rank stands in its mesh."""

    mesh: Mesh
    rank: int
    collection: ProcessGroupCollection

    @property
    def is_first_stage(self) -> bool:
        return self.mesh.coordinates(self.rank).pp == 0

    @property
    def is_last_stage(self) -> bool:
        return self.mesh.coordinates(self.rank).pp == self.mesh.size("pp") - 1


def create_process_groups(mesh: Mesh) -> ModelGroups:
    """Create every group of the mesh. Collective over the world; each distinct partition is created once.

    Raises:
        RuntimeError: the world that was started is not the mesh's.
    """
    if dist.get_world_size() != mesh.world_size:
        raise RuntimeError(f"the layout has {mesh.world_size} ranks but {dist.get_world_size()} processes were started")
    rank = dist.get_rank()
    made: dict[tuple[tuple[int, ...], ...], dist.ProcessGroup | None] = {}

    def create(groups: Iterable[Iterable[int]]) -> dist.ProcessGroup | None:
        partition = tuple(tuple(g) for g in groups)
        if partition not in made:
            mine = None
            for ranks in partition:
                group = dist.new_group(list(ranks))
                if rank in ranks:
                    mine = group
            made[partition] = mine
        return made[partition]

    collection = ProcessGroupCollection()
    for name, dim in _MESH_GROUPS.items():
        setattr(collection, name, create(mesh.groups(dim)))
    # Only the first and the last stage hold (tied) embeddings; ranks between them belong to no such group.
    pipelines = [tuple(g) for g in mesh.groups("pp")]
    collection.embd = create((g[0], g[-1]) if len(g) > 1 else (g[0],) for g in pipelines)
    collection.pos_embd = create((g[0],) for g in pipelines)
    # Megatron 0.19 distinguishes groups for features that this engine does not use; they equal the plain ones.
    collection.dp_cp_gtp_remat = collection.dp_cp
    collection.intra_dp_cp = collection.dp_cp
    collection.expt_dp_gtp_remat = collection.expt_dp
    collection.intra_expt_dp = collection.expt_dp
    collection.tp_ep_pp_with_egtp_remat = collection.tp_ep_pp
    collection.intra_dist_opt = dist.group.WORLD
    if parallel_state._GLOBAL_MEMORY_BUFFER is None:
        parallel_state._set_global_memory_buffer()  # scratch space of the tensor-parallel layers; knows no layout
    return ModelGroups(mesh=mesh, rank=rank, collection=collection)


def gather_shards(shard: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    """The shards of every rank of the group, all of one shape, without gradient. Collective."""
    if group.size() == 1:
        return [shard]
    shards = [torch.empty_like(shard, memory_format=torch.contiguous_format) for _ in range(group.size())]
    dist.all_gather(shards, shard.contiguous(), group=group)
    return shards
