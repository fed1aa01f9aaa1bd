"""Memory of the hosts, on the node that needs most: the first, where rank 0 is.

processes        3 GiB a rank          Python, torch, CUDA's part in the host and pinned buffers: a round figure
load             the largest tensor    read lazily from the checkpoint, once a rank, and cut (fused pairs: twice)
weight transfer  two buckets on rank 0 and one on each sender; the rollout engine takes them one by one
checkpoint       one file and a bucket on rank 0
"""

from __future__ import annotations

from areal_like.alloc import ModelAllocation
from areal_like.spec.memory import transfer
from areal_like.spec.memory.job import GIB, MemoryJob
from areal_like.spec.model import ModelSpec

__all__ = ["PROCESS", "host_memory"]

PROCESS = 3 * GIB
"""Of one worker process on CUDA."""


def host_memory(spec: ModelSpec, allocation: ModelAllocation, job: MemoryJob) -> dict[str, int]:
    """Bytes on the first node, by phase."""
    ranks = min(allocation.world_size, job.gpus_per_node)
    processes = ranks * PROCESS
    if job.rollout is not None and job.colocated:
        processes += min(job.rollout.world_size, job.gpus_per_node) * PROCESS
    tensor = max(transfer.largest_tensor(spec, job), 2 * spec.moe_intermediate_size * spec.hidden_size * job.element)
    bucket = max(transfer.BUCKET, tensor)
    weights = spec.parameters() * job.element
    return {
        "load": processes + ranks * 2 * tensor,
        "weight transfer": processes + min(3 * bucket, 3 * weights),
        "checkpoint": processes + min(transfer.SHARD + bucket, 2 * weights),
    }
