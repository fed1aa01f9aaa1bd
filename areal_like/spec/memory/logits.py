"""Logits, their gradient, and the float32 chunks of the log-probabilities (`engines/megatron/log_probs.py`).

On the last stage, for T tokens, V/t columns and chunks of C = 1,024 tokens:

    logits                      T V/t b
    their gradient              T V/t b       in the same dtype; update only
    float32 chunks              n C V/t 4     n = 3 in the forward, 4 in the backward pass: while a chunk is made the
                                              variables still hold the one before
    logits of the pass before   T V/t b       forward only: Megatron's schedule holds the last output until the next
                                              pass is done
    output of the final norm    S h b         its input too where there is a backward pass
    gathered hidden states      T h b         t > 1: the output layer's scratch buffer, kept for ever

n grows by 1 when the temperature is not 1 (division makes a copy); an entropy costs 1.25 more in the forward pass and,
when it has a gradient, 2 in the backward pass. With one chunk only (T <= C) there is none before: 2 and 3. In float32
the chunk is a view of the logits: one less.
"""

from __future__ import annotations

from areal_like.alloc import ModelAllocation
from areal_like.spec.memory.job import MemoryJob
from areal_like.spec.model import ModelSpec

__all__ = ["CHUNK_TOKENS", "chunks", "gathered_hidden", "logits"]

CHUNK_TOKENS = 1024
"""As in `engines.megatron.log_probs`; a test compares them."""


def logits(spec: ModelSpec, allocation: ModelAllocation, job: MemoryJob) -> int:
    """Bytes of the logits of one micro-batch on one rank of the last stage."""
    return _tokens(allocation, job) * -(-spec.vocab_size // allocation.tp) * job.element


def chunks(spec: ModelSpec, allocation: ModelAllocation, job: MemoryJob, *, backward: bool) -> int:
    """Bytes of the float32 chunks that exist at once."""
    several = _tokens(allocation, job) > CHUNK_TOKENS
    count = 2.0 + backward + several
    count += job.temperature != 1.0
    count -= job.dtype == "float32" and job.temperature == 1.0
    if not backward and job.entropy != "none":
        count += 1.25
    if backward and job.entropy == "loss":
        count += 2.0
    rows = min(CHUNK_TOKENS, _tokens(allocation, job))
    return int(count * rows * -(-spec.vocab_size // allocation.tp) * 4)


def gathered_hidden(spec: ModelSpec, allocation: ModelAllocation, job: MemoryJob) -> int:
    """Bytes of the scratch buffer in which sequence parallelism puts the output layer's input together."""
    return _tokens(allocation, job) * spec.hidden_size * job.element if allocation.tp > 1 else 0


def _tokens(allocation: ModelAllocation, job: MemoryJob) -> int:
    return -(-job.micro_tokens // allocation.cp)
