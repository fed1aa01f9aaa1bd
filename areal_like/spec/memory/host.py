"""Memory of the hosts, on the node that needs most: the first, where rank 0 is.

processes        3 GiB a rank          Python, torch, CUDA's part in the host and pinned buffers: a round figure
load             the largest tensor    read lazily from the checkpoint, once a rank, and cut (fused pairs: twice)
weight transfer  two buckets on rank 0 and one on each sender; the rollout engine takes them one by one
checkpoint       one file and two buckets on rank 0, of a Hugging Face folder
recovery         what each rank stores of a recovery checkpoint, see `recovery`
offload          a copy of the parameters and optimizer states that leave the GPUs. It is made by the first offload and
                 kept for the next, so every phase but the load has it; gradients need none
"""

from __future__ import annotations

from collections.abc import Sequence

from areal_like.alloc import ModelAllocation
from areal_like.spec.memory import states, transfer
from areal_like.spec.memory.job import GIB, MemoryJob
from areal_like.spec.memory.recovery import held_on_first_node
from areal_like.spec.memory.trained import trained
from areal_like.spec.model import ModelSpec
from areal_like.spec.shards import RankClass

__all__ = ["PROCESS", "host_memory"]

PROCESS = 3 * GIB
"""Of one worker process on CUDA."""


def host_memory(
    spec: ModelSpec, allocation: ModelAllocation, job: MemoryJob, classes: Sequence[RankClass]
) -> dict[str, int]:
    """Bytes on the first node, by phase."""
    ranks = min(allocation.world_size, job.gpus_per_node)
    processes = ranks * PROCESS
    if job.rollout is not None and job.colocated:
        processes += min(job.rollout.world_size, job.gpus_per_node) * PROCESS
    tensor = max(transfer.largest_tensor(spec, job), 2 * spec.moe_intermediate_size * spec.hidden_size * job.element)
    bucket = max(transfer.BUCKET, tensor)
    weights = spec.parameters() * job.element
    copies = _copies(spec, allocation, job, classes)
    found = {
        "load": processes + ranks * 2 * tensor,
        "weight transfer": processes + copies + min(3 * bucket, 3 * weights),
        "checkpoint": processes + copies + min(transfer.SHARD + 2 * bucket, 2 * weights),
    }
    if job.recovery:
        found["recovery checkpoint"] = processes + copies + held_on_first_node(spec, allocation, job)
    return found | ({"at rest": processes + copies} if job.offload else {})


def _copies(spec: ModelSpec, allocation: ModelAllocation, job: MemoryJob, classes: Sequence[RankClass]) -> int:
    """What the ranks of the first node keep for offloaded parts."""
    total = 0
    for ranks in classes:
        held = trained(spec, allocation, ranks, job)
        here = max(0, min(ranks.first_rank + ranks.ranks, job.gpus_per_node) - ranks.first_rank)
        if "parameters" in job.offload:
            total += here * states.weights(spec, ranks.counts, job, held)
        if "optimizer" in job.offload:
            total += here * states.optimizer(spec, allocation, held, job)
    return total
