"""Self-attention whose queries, keys and values leave the fused projection in one pass, rotated.

Megatron-Core's way copies the queries, rotates queries and keys with a kernel each, and lays three gradients together
in the backward pass: four passes over the same rows, and six launches a layer more. Here the position of each token
comes with the micro-batch, so that one kernel does it all, over every document of the row and over the parts of them
that a rank holds under context parallelism.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

__all__ = [
    "PositionedSeqParams",
    "RotatedSelfAttention",
    "Rotation",
    "split_with_rotation",
    "use_rotated_attention",
    "why_not_rotated",
]


@dataclass
class PositionedSeqParams(PackedSeqParams):
    """Megatron's description of a packed micro-batch, with the position of each token in its document.

    `positions`: int64 `[tokens]`, of the tokens that this rank holds.
    """

    positions: Tensor | None = None


@dataclass(frozen=True)
class Rotation:
    """The angles of a micro-batch. Made once, used by every layer.

    Attributes:
        angles: what they were made from: Megatron's, `[positions, 1, 1, rotated width]`, both halves the same.
        positions: int64 `[tokens]`.
        table: float32 `[positions, rotated width]`, cosines beside sines.
    """

    angles: Tensor
    positions: Tensor
    table: Tensor

    @classmethod
    def of(cls, packed: PackedSeqParams | None, angles: Tensor) -> Rotation:
        """That of a micro-batch, kept on its description.

        Raises:
            TypeError: the description has no positions.
        """
        positions = getattr(packed, "positions", None)
        if positions is None:
            raise TypeError("RotatedSelfAttention needs the positions of the packed sequences")
        known: Rotation | None = getattr(packed, "rotation", None)
        # Recomputation hands each layer another tensor of the same memory.
        if known is None or known.angles.data_ptr() != angles.data_ptr() or known.angles.shape != angles.shape:
            half = angles.detach().flatten(1)[:, : angles.shape[-1] // 2].float()
            known = cls(angles.detach(), positions, torch.cat([half.cos(), half.sin()], dim=1))
            packed.rotation = known  # type: ignore[union-attr]
        return known


def split_with_rotation(mixed: Tensor, rotation: Rotation, groups: int, share: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries `[tokens, 1, groups * share, width]`, and keys and values `[tokens, 1, groups, width]`.

    Args:
        mixed: `[tokens, 1, groups * (share + 2) * width]`: for each group its queries, its key, its value.
        groups: KV heads of this rank.
        share: query heads of each.
    """
    positions, table = rotation.positions, rotation.table
    if mixed.is_cuda:
        from areal_like.engines.megatron.kernels.qkv_rope import SplitWithRotation

        return SplitWithRotation.apply(mixed, positions, table, groups, share)  # type: ignore[no-any-return]
    q, k, v = mixed.view(*mixed.shape[:2], groups, share + 2, -1).split([share, 1, 1], dim=3)
    cos, sin = table.index_select(0, positions)[:, None, None, None].chunk(2, dim=-1)
    rest = k.shape[-1] - table.shape[1]

    def rotated(x: Tensor) -> Tensor:
        a, b, unchanged = x.split([cos.shape[-1], cos.shape[-1], rest], dim=-1)
        return torch.cat([(a * cos - b * sin).to(x.dtype), (b * cos + a * sin).to(x.dtype), unchanged], dim=-1)

    return rotated(q).flatten(2, 3), rotated(k).flatten(2, 3), v.flatten(2, 3)


class RotatedSelfAttention(SelfAttention):
    """Megatron's self-attention, which is given queries and keys that are rotated already."""

    _rotation: Rotation | None = None

    def forward(  # type: ignore[override]
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        *,
        rotary_pos_emb: Tensor,
        packed_seq_params: PackedSeqParams | None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """See `SelfAttention`; `rotary_pos_emb` is indexed by position, not by token."""
        self._rotation = Rotation.of(packed_seq_params, rotary_pos_emb)
        try:
            output: tuple[Tensor, Tensor | None] = super().forward(
                hidden_states, attention_mask, rotary_pos_emb=None, packed_seq_params=packed_seq_params, **kwargs
            )
        finally:
            self._rotation = None  # belongs to this micro-batch
        return output

    def get_query_key_value_tensors(  # type: ignore[override]
        self, hidden_states: Tensor, key_value_states: Tensor | None = None, **kwargs: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        assert self._rotation is not None
        mixed, _ = self.linear_qkv(hidden_states)
        groups = self.num_query_groups_per_partition
        return split_with_rotation(mixed, self._rotation, groups, self.num_attention_heads_per_partition // groups)


def why_not_rotated(config: TransformerConfig, self_attention: Any) -> str | None:
    """Why layers keep Megatron-Core's own way; None if they need not.

    Args:
        self_attention: the specification of the layer's part.
    """
    parts = self_attention.submodules
    if self_attention.module is not SelfAttention:
        return "not plain self-attention"
    if any(norm not in (None, IdentityOp) for norm in (parts.q_layernorm, parts.k_layernorm)) or config.qk_l2_norm:
        return "norms between projection and rotation"
    if config.attention_output_gate:
        return "a gate in the fused projection"
    if config.rotary_interleaved or config.mrope_section is not None or config.no_rope_freq:
        return "rotation of another kind, or not of every layer"
    if getattr(config, "yarn_rotary_scaling_factor", None) is not None:
        return "rotation that scales"
    if config.num_query_groups is None or config.num_query_groups < config.tensor_model_parallel_size:
        return "ranks that share a KV head"
    if config.fused_single_qkv_rope or config.flash_decode:
        return "Megatron-Core was asked for a way of its own"
    return None


def use_rotated_attention(block: TransformerBlockSubmodules, config: TransformerConfig) -> None:
    """Put it into the layers of a block that allow it."""
    for layer in block.layer_specs:
        part = layer.submodules.self_attention
        if why_not_rotated(config, part) is None:
            part.module = RotatedSelfAttention
