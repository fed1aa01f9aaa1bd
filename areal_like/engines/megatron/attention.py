"""What Megatron-Core's local layers lack without TransformerEngine: packed attention, rotary positions, RMSNorm.

A packed micro-batch travels through the model as one row `[tokens, 1, hidden]`, positions given a token
(`PackedRotaryEmbedding`), documents kept apart here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

__all__ = ["DocumentGroups", "LocalPackedSeqParams", "PackedAttention", "PackedRotaryEmbedding", "RMSNorm"]


@dataclass(frozen=True)
class DocumentGroups:
    """Documents of similar length, to be padded on the right into one attention call each.

    `shapes`: `(documents, longest)` of each group. `index`: the token in each slot, all groups laid end to end (padding
    repeats the document's last token). `slots`: the slot of each token. Made once a micro-batch, used by every layer.
    """

    shapes: list[tuple[int, int]]
    index: Tensor
    slots: Tensor

    MAX_PADDING = 0.25

    @classmethod
    def of(cls, cu_seqlens: Tensor) -> DocumentGroups:
        bounds = cu_seqlens.tolist()
        documents = sorted(((end - start, start) for start, end in pairwise(bounds)), reverse=True)
        documents = [d for d in documents if d[0] > 0]
        groups: list[list[tuple[int, int]]] = []
        for length, start in documents:
            # Longest first: a document joins while it fills most of the group's row.
            if groups and length >= (1 - cls.MAX_PADDING) * groups[-1][0][0]:
                groups[-1].append((length, start))
            else:
                groups.append([(length, start)])
        slots = torch.empty(bounds[-1], dtype=torch.int64)
        shapes, indices, offset = [], [torch.empty(0, dtype=torch.int64)], 0
        for group in groups:
            longest = group[0][0]
            steps = torch.arange(longest)
            starts = torch.tensor([start for _, start in group])[:, None]
            lengths = torch.tensor([length for length, _ in group])[:, None]
            index = starts + torch.minimum(steps[None], lengths - 1)
            own = steps[None] < lengths
            slots[index[own]] = offset + torch.arange(index.numel()).view_as(index)[own]
            shapes.append((len(group), longest))
            indices.append(index.flatten())
            offset += index.numel()
        return cls(shapes, torch.cat(indices).to(cu_seqlens.device), slots.to(cu_seqlens.device))


@dataclass
class LocalPackedSeqParams(PackedSeqParams):
    """Megatron's description of a packed micro-batch, with what the local layers need beside it.

    `qkv_format` stays "sbhd": Megatron then applies rotary embeddings to the row as a whole, which is right because
    `PackedRotaryEmbedding` gives each token the angles of its position in its own document. (Megatron's own unfused
    path for packed sequences loops over the documents in Python, twice a layer.)
    """

    positions: Tensor | None = None
    groups: DocumentGroups = field(default_factory=lambda: DocumentGroups([], torch.empty(0), torch.empty(0)))


class _Pad(torch.autograd.Function):
    """`[tokens, ...]` to `[slots, ...]`. Both directions are gathers: padding never receives a gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, slots: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(slots)
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (slots,) = ctx.saved_tensors
        return grads[0].index_select(0, slots), None, None


class _Unpad(torch.autograd.Function):
    """The inverse of `_Pad`. The gradient of padding is set to zero: no loss depends on it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, slots: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(slots)
        ctx.rows = x.shape[0]
        return x.index_select(0, slots)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (slots,) = ctx.saved_tensors
        out = grads[0].new_zeros((ctx.rows, *grads[0].shape[1:]))
        out[slots] = grads[0]
        return out, None


class PackedAttention(MegatronModule):
    """Causal scaled-dot-product attention inside each document of a packed row.

    Padding is on the right and attention is causal, so no real query sees a padded key: no mask is needed and torch's
    fused kernels apply.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
    ) -> None:
        super().__init__(config=config)
        self.softmax_scale = softmax_scale
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """`query` `[tokens, 1, heads/tp, head_dim]`, `key`, `value` with KV heads; returns `[tokens, 1, width/tp]`."""
        if not isinstance(packed_seq_params, LocalPackedSeqParams):
            raise TypeError("PackedAttention needs the LocalPackedSeqParams of the micro-batch")
        groups = packed_seq_params.groups
        heads, kv_heads = query.shape[2], key.shape[2]
        padded = [_Pad.apply(x.squeeze(1), groups.index, groups.slots) for x in (query, key, value)]
        outputs, start = [], 0
        for documents, longest in groups.shapes:
            end = start + documents * longest
            q, k, v = (x[start:end].view(documents, longest, x.shape[1], x.shape[2]).transpose(1, 2) for x in padded)
            out = F.scaled_dot_product_attention(
                q,
                k,
                v,
                is_causal=True,
                dropout_p=self.dropout if self.training else 0.0,
                scale=self.softmax_scale,
                enable_gqa=heads != kv_heads,
            )
            outputs.append(out.transpose(1, 2).reshape(end - start, heads * out.shape[-1]))
            start = end
        return _Unpad.apply(torch.cat(outputs), groups.slots).unsqueeze(1)


class PackedRotaryEmbedding(torch.nn.Module):
    """Megatron's rotary embedding, looked up at each token's position in its own document.

    Takes the place of `GPTModel.rotary_pos_emb`; the model first asks for the length and then for the embedding, so
    the positions of the micro-batch are taken from the first question.
    """

    def __init__(self, inner: RotaryEmbedding) -> None:
        super().__init__()
        self.inner = inner
        self._positions: Tensor | None = None

    def get_rotary_seq_len(
        self,
        inference_context: Any,
        transformer: Any,
        transformer_input: Any,
        transformer_config: Any,
        packed_seq_params: PackedSeqParams | None = None,
        **kwargs: Any,
    ) -> int:
        if not isinstance(packed_seq_params, LocalPackedSeqParams) or packed_seq_params.positions is None:
            raise TypeError("the local layers need the LocalPackedSeqParams of the micro-batch")
        self._positions = packed_seq_params.positions
        return int(packed_seq_params.max_seqlen_q)

    def forward(self, max_seq_len: int, **kwargs: Any) -> Tensor:
        """`[tokens, 1, 1, rotary_dim]`."""
        if self._positions is None:
            raise RuntimeError("get_rotary_seq_len comes first")
        table: Tensor = self.inner.get_emb(max_seq_len, 0)
        return table.index_select(0, self._positions)


class RMSNorm(torch.nn.Module):
    """Root-mean-square norm whose weight takes part in Megatron's sequence-parallel gradient reduction."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **kwargs: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        # With sequence parallelism each rank normalises its part of the tokens: gradients are summed over the ranks.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)
