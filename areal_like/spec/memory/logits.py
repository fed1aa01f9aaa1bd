"""The output head (`engines/megatron/output_head.py`): logits and what is made of them.

On the last stage, for T tokens and V/t columns:

    without gradient    one chunk of logits              C V/t b   C tokens: what 512 MiB hold, in tiles of 128
    update              logits                           T V/t b   their gradient is written over them
                        gradient of hidden states        T h b
                        gradient of the weight           V/t h b   unless it is frozen, or goes straight into the buffer
    both                statistics and results           16 T
                        gathered hidden states           T h b     t > 1
                        output of the final norm         S h b     its input too where there is a backward pass

The gradient of a weight that is the embedding's too waits until the end of the backward pass for the embedding's part.
"""

from __future__ import annotations

from areal_like.alloc import ModelAllocation
from areal_like.spec.memory.job import MemoryJob
from areal_like.spec.model import ModelSpec

__all__ = [
    "CHUNK_BYTES",
    "TILE",
    "chunk",
    "gathered_hidden",
    "gradients",
    "logits",
    "statistics",
    "waiting_gradient",
]

CHUNK_BYTES = 512 * 2**20
TILE = 128
"""Both as in `engines.megatron.output_head`; a test compares them."""


def logits(spec: ModelSpec, allocation: ModelAllocation, job: MemoryJob) -> int:
    """Bytes of the logits of one micro-batch on one rank of the last stage."""
    return _tokens(allocation, job) * _columns(spec, allocation) * job.element


def chunk(spec: ModelSpec, allocation: ModelAllocation, job: MemoryJob) -> int:
    """Bytes of the logits that exist at once without gradient."""
    row = _columns(spec, allocation) * job.element
    return min(max(1, CHUNK_BYTES // row // TILE) * TILE, _tokens(allocation, job)) * row


def statistics(allocation: ModelAllocation, job: MemoryJob) -> int:
    """Bytes of four float32 numbers a token."""
    return 16 * _tokens(allocation, job)


def gradients(spec: ModelSpec, allocation: ModelAllocation, job: MemoryJob) -> int:
    """Bytes of the gradients of hidden states and weight, at their fullest, above those of the logits.

    A product that adds to the buffer of gradients makes none of the weight. Where only the head uses the weight,
    autograd then gets an empty one, after the logits have gone.
    """
    hidden, weight = _tokens(allocation, job) * spec.hidden_size * job.element, _weight(spec, allocation, job)
    if not job.fuses_gradients:
        return hidden + weight
    return hidden + max(0, (0 if _shared(spec, allocation) else weight) - logits(spec, allocation, job))


def waiting_gradient(spec: ModelSpec, allocation: ModelAllocation, job: MemoryJob) -> int:
    """Bytes of the weight's gradient that wait for the embedding's during the backward passes of all layers."""
    return _weight(spec, allocation, job) if _shared(spec, allocation) and not job.fuses_gradients else 0


def gathered_hidden(spec: ModelSpec, allocation: ModelAllocation, job: MemoryJob) -> int:
    """Bytes of the hidden states of all tokens, put together where sequence parallelism has split them."""
    return _tokens(allocation, job) * spec.hidden_size * job.element if allocation.tp > 1 else 0


def _weight(spec: ModelSpec, allocation: ModelAllocation, job: MemoryJob) -> int:
    """Bytes of the gradient of the weight, 0 where it is frozen."""
    return 0 if job.lora is not None else _columns(spec, allocation) * spec.hidden_size * job.element


def _shared(spec: ModelSpec, allocation: ModelAllocation) -> bool:
    """Whether the weight is the embedding's, on the same stage."""
    return spec.tied_embeddings and allocation.pp == 1


def _tokens(allocation: ModelAllocation, job: MemoryJob) -> int:
    return -(-job.micro_tokens // allocation.cp)


def _columns(spec: ModelSpec, allocation: ModelAllocation) -> int:
    return -(-spec.vocab_size // allocation.tp)
