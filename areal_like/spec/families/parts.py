"""The parts of a layer that only some families have, and the sums of what a layer holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

__all__ = ["LatentAttention", "LayerParameters", "LinearAttention", "Weights"]


@dataclass(frozen=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1).

    `q_lora_rank` 0: queries are projected directly. A head of queries and keys is `qk_nope_head_dim` wide without
    position and `qk_rope_head_dim` with; the latter part of the keys is shared by all heads.
    """

    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int


@dataclass(frozen=True)
class LinearAttention:
    """Attention with a state of fixed size instead of keys and values of the past.

    "lightning": MiniMax-01 (arXiv:2501.08313). "gated_delta": Gated DeltaNet (arXiv:2412.06464) as in Qwen3-Next, with
    a causal convolution of `conv_kernel` tokens over queries, keys and values.
    """

    kind: Literal["lightning", "gated_delta"]
    key_heads: int
    value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_kernel: int = 0


class Weights(NamedTuple):
    """`matrices`: each is multiplied once for a token (two operations). `vectors`: biases, norms and the like."""

    matrices: int
    vectors: int = 0

    @property
    def total(self) -> int:
        return self.matrices + self.vectors


class LayerParameters(NamedTuple):
    """Parameters of one transformer layer by part.

    `attention` includes the norms of queries, keys and latents; `experts` are all routed ones; `shared_experts`
    includes their gate; `norms` are those of the width of the model.
    """

    attention: int
    mlp: int
    experts: int
    shared_experts: int
    router: int
    norms: int

    @property
    def total(self) -> int:
        return sum(self)
