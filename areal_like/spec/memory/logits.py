"""Logits, their gradient, and the float32 chunks of the log-probabilities (`engines/megatron/log_probs.py`).

On the last stage, for T tokens, V/t columns and chunks of C = 1,024 tokens:

    logits                      T V/t b
    their gradient              T V/t b       in the same dtype; update only
    float32 chunks              n C V/t 4     n = 3 in the forward, 4 in the backward pass: while a chunk is made the
                                              variables still hold the one before (`_forward_count` has the other cases)
    logits of the pass before   T V/t b       forward only: Megatron's schedule holds the last output until the next
                                              pass is done
    output of the final norm    S h b         its input too where there is a backward pass
    gathered hidden states      T h b         t > 1: the output layer's scratch buffer, kept for ever
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
    tokens, columns = _tokens(allocation, job), -(-spec.vocab_size // allocation.tp)
    several = tokens > CHUNK_TOKENS
    scaled = job.temperature != 1.0
    cast = job.dtype != "float32"
    own = cast or scaled or spec.vocab_size % allocation.tp > 0
    count = _backward_count if backward else _forward_count
    return (
        count(job.entropy, several=several, scaled=scaled, cast=cast, own=own) * min(CHUNK_TOKENS, tokens) * columns * 4
    )


def _forward_count(entropy: str, *, several: bool, scaled: bool, cast: bool, own: bool) -> int:
    """Chunks at the fullest line of `_VocabParallelLogProbs.forward`, whose variables are z and exp_z.

    Args:
        several: there is a chunk before, which the variables still hold when the next is made.
        scaled: the logits are divided by a temperature.
        cast: they are not float32 already.
        own: z is a tensor of its own, not a view of the logits.
    """
    made = several * (own + 1) + cast + scaled
    exponentials = own + several + 1
    products = own + 3 if entropy != "none" else 0  # exp_z, z without infinities, their product
    return max(made, exponentials, products)


def _backward_count(entropy: str, *, several: bool, scaled: bool, cast: bool, own: bool) -> int:
    """The same of `backward`, whose variables are z, p, out, and deviation where the entropy has a gradient."""
    deviation = entropy == "loss"
    made = several * (own + 2 + deviation) + cast + scaled
    probabilities = own + 1 + several * (2 + deviation)
    gradient = own + 2 + several * (1 + deviation)
    divided = own + 3 + deviation if scaled else 0
    products = own + 2 + max(several + 2, 3) if deviation else 0
    return max(made, probabilities, gradient, divided, products)


def gathered_hidden(spec: ModelSpec, allocation: ModelAllocation, job: MemoryJob) -> int:
    """Bytes of the scratch buffer in which sequence parallelism puts the output layer's input together."""
    return _tokens(allocation, job) * spec.hidden_size * job.element if allocation.tp > 1 else 0


def _tokens(allocation: ModelAllocation, job: MemoryJob) -> int:
    return -(-job.micro_tokens // allocation.cp)
