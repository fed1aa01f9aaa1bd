"""Recovery checkpoints: bytes on disk, and in the memory of the hosts while they are written.

    parameters    b a trained parameter          as the model holds them; with adapters, those alone
    main copy     4                              unless b is 4: then the parameter is its own float32 copy
    moments       8 with Adam, 0 with SGD

Whole tensors are stored once, whatever the layout; only the rows that pad the vocabulary to a multiple of t depend on
it. Where the optimizer is sharded every rank stores about as much as any other
(`engines/megatron/checkpoint/optimizer_state.py`), else the first of each data-parallel group stores all. A rank holds
what it stores in host memory until it is written, whether or not training waits for it. Beside the tensors there are
about 1.5 KiB a shard, and a few KiB of random states a rank.
"""

from __future__ import annotations

from areal_like.alloc import ModelAllocation
from areal_like.spec.lora import adapter_matrices
from areal_like.spec.memory.job import MemoryJob
from areal_like.spec.model import ModelSpec

__all__ = ["checkpoint_bytes", "held_on_first_node"]


def checkpoint_bytes(spec: ModelSpec, allocation: ModelAllocation, job: MemoryJob) -> int:
    """Bytes of the tensors of a recovery checkpoint; 0 for a model that is not trained."""
    if job.optimizer is None:
        return 0
    if job.lora is None:
        tables = 1 if spec.tied_embeddings else 2
        padding = -spec.vocab_size % allocation.tp
        elements, element = spec.parameters() + tables * padding * spec.hidden_size, job.element
    else:
        matrices = adapter_matrices(spec, job.lora.targets, range(spec.num_layers))
        elements = sum(matrix.inputs + matrix.outputs for matrix in matrices) * job.lora.rank
        element = job.lora.element
    main = 4 if element != 4 else 0
    return elements * (element + main + (8 if job.optimizer == "adam" else 0))


def held_on_first_node(spec: ModelSpec, allocation: ModelAllocation, job: MemoryJob) -> int:
    """Bytes of host memory on the first node until a checkpoint is written."""
    sharded = job.distributed_optimizer and job.optimizer != "sgd"
    writers = allocation.world_size if sharded else allocation.world_size // (allocation.dp * allocation.cp)
    return min(writers, job.gpus_per_node) * -(-checkpoint_bytes(spec, allocation, job) // writers)
