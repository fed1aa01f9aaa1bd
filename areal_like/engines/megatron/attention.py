"""What Megatron-Core's local layers lack without TransformerEngine: packed attention and rotary positions.

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
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

__all__ = ["DocumentGroups", "LocalPackedSeqParams", "PackedAttention", "PackedRotaryEmbedding"]


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
    groups: DocumentGroups | None = None
    """Of a whole row; None with context parallelism, where a rank holds parts of each document."""
    lengths: list[int] = field(default_factory=list)
    """Padded length of each document."""
    gathered: Tensor | None = None
    """With context parallelism: `context_parallel.padded_to_gathered` of these lengths, for every layer."""


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
        self.cp_group: Any = None if pg_collection is None else pg_collection.cp

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
        q, k, v = (x.squeeze(1) for x in (query, key, value))
        if packed_seq_params.groups is not None:
            return self._whole(q, k, v, packed_seq_params.groups).unsqueeze(1)
        return self._over_ranks(q, k, v, packed_seq_params).unsqueeze(1)

    def _whole(self, query: Tensor, key: Tensor, value: Tensor, groups: DocumentGroups) -> Tensor:
        """This rank holds whole documents."""
        padded = [_Pad.apply(x, groups.index, groups.slots) for x in (query, key, value)]
        outputs, start = [], 0
        for documents, longest in groups.shapes:
            end = start + documents * longest
            q, k, v = (x[start:end].view(documents, longest, x.shape[1], x.shape[2]) for x in padded)
            outputs.append(self._attend(q, k, v, is_causal=True).reshape(end - start, -1))
            start = end
        return _Unpad.apply(torch.cat(outputs), groups.slots)

    def _over_ranks(self, query: Tensor, key: Tensor, value: Tensor, packed: LocalPackedSeqParams) -> Tensor:
        """This rank holds two chunks of each document; keys and values of the others are gathered.

        The backward pass of the gather sums the gradients of all ranks' queries (a reduce-scatter).
        """
        group, cp, rank = self.cp_group, self.cp_group.size(), self.cp_group.rank()
        keys, values = (
            gather_from_sequence_parallel_region(x, group=group).index_select(0, packed.gathered) for x in (key, value)
        )
        outputs, own, start = [], 0, 0
        for length in packed.lengths:
            chunk = length // (2 * cp)
            for number in (rank, 2 * cp - 1 - rank):
                end = (number + 1) * chunk
                # Row i of the chunk is position number * chunk + i and sees itself and everything before it.
                mask = torch.ones(chunk, end, dtype=torch.bool, device=query.device).tril(end - chunk)
                seen = slice(start, start + end)
                out = self._attend(query[None, own : own + chunk], keys[None, seen], values[None, seen], mask=mask)
                outputs.append(out.reshape(chunk, -1))
                own += chunk
            start += length
        return torch.cat(outputs)

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None = None, is_causal: bool = False
    ) -> Tensor:
        """`[documents, tokens, heads, head_dim]` each."""
        out = F.scaled_dot_product_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            attn_mask=mask,
            is_causal=is_causal,
            dropout_p=self.dropout if self.training else 0.0,
            scale=self.softmax_scale,
            enable_gqa=q.shape[2] != k.shape[2],
        )
        return out.transpose(1, 2)


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
