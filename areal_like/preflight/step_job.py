"""What a training step has to do, and the sizes that share it out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

__all__ = ["Sizes", "StepJob"]


class Sizes(Protocol):
    """Parallel sizes; `ModelAllocation` has them."""

    @property
    def dp(self) -> int: ...
    @property
    def tp(self) -> int: ...
    @property
    def pp(self) -> int: ...
    @property
    def cp(self) -> int: ...
    @property
    def ep(self) -> int: ...
    @property
    def etp(self) -> int: ...
    @property
    def vpp(self) -> int: ...


@dataclass(frozen=True)
class StepJob:
    """What a step has to do.

    Attributes:
        sequences: sequences of one optimizer update, over all replicas.
        sequence_length: tokens of a sequence.
        micro_tokens: most tokens of a micro-batch (`mb_spec.max_tokens_per_mb`), before c and t share it out.
        recompute: each layer's forward pass is repeated in the backward pass (`gradient_checkpointing: true`).
        forward_passes: forward passes over the batch besides the update: 1 for `recompute_logprob`, 1 for a reference
            of the same layout.

    Raises:
        ValueError: a number is not positive, or a sequence does not fit into a micro-batch.
    """

    sequences: int
    sequence_length: int
    micro_tokens: int
    recompute: bool = False
    forward_passes: int = 0

    def __post_init__(self) -> None:
        if min(self.sequences, self.sequence_length) < 1 or self.forward_passes < 0:
            raise ValueError(f"sequences and their length are at least 1, forward passes at least 0: {self}")
        if self.micro_tokens < self.sequence_length:
            raise ValueError(
                f"a sequence of {self.sequence_length} tokens does not fit into a micro-batch of {self.micro_tokens}"
            )

    def micro_batches(self, sizes: Sizes) -> int:
        """Micro-batches of each replica; interleaved pipelines need a multiple of p."""
        each = -(-self.sequences // sizes.dp)
        count = -(-each // (self.micro_tokens // self.sequence_length))
        return -(-count // sizes.pp) * sizes.pp if sizes.vpp > 1 else count

    def tokens(self, sizes: Sizes) -> float:
        """Tokens of a micro-batch on average, in the replica with most sequences."""
        return -(-self.sequences // sizes.dp) * self.sequence_length / self.micro_batches(sizes)

    def largest_micro_batch(self, sizes: Sizes) -> int:
        """Tokens of the largest micro-batch: sequences are spread evenly over them."""
        each = -(-self.sequences // sizes.dp)
        return -(-each // self.micro_batches(sizes)) * self.sequence_length
