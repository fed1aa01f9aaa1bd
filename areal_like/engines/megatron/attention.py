"""What Megatron-Core's local layers lack without TransformerEngine: packed attention and rotary positions.

A packed micro-batch travels through the model as one row `[tokens, 1, hidden]`, positions given a token
(`PackedRotaryEmbedding`), documents kept apart here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
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

from areal_like.engines.megatron.rotary import PositionedSeqParams

__all__ = ["DocumentGroups", "LocalPackedSeqParams", "PackedAttention", "PackedRotaryEmbedding"]


@dataclass(frozen=True)
class Prefixes:
    """What the documents of a group see before their own tokens: each one another document of the row.

    Attributes:
        index: int64 `[documents * longest]`, the tokens of each prefix, padded on the right by repeating the first.
        mask: bool `[documents, 1, tokens, longest + tokens]`, what each of a document's own tokens sees.
    """

    index: Tensor
    mask: Tensor


@dataclass(frozen=True)
class DocumentGroups:
    """Documents of similar length, to be padded on the right into one attention call each.

    `shapes`: `(documents, longest)` of each group. `index`: the token in each slot, all groups laid end to end (padding
    repeats the document's last token). `slots`: the slot of each token. `prefixes`: of each group, None where its
    documents have none. Made once a micro-batch, used by every layer.
    """

    shapes: list[tuple[int, int]]
    index: Tensor
    slots: Tensor
    prefixes: list[Prefixes | None]

    MAX_PADDING = 0.25

    @classmethod
    def of(cls, cu_seqlens: Tensor, seen: Sequence[int | None] | None = None) -> DocumentGroups:
        """`cu_seqlens` `[documents + 1]`; `seen`: which document, if any, each one sees as the tokens before it."""
        bounds = cu_seqlens.tolist()
        spans = list(pairwise(bounds))
        before = [(0, 0) if number is None else spans[number] for number in seen or [None] * len(spans)]
        # By the size class of the prefix, then by length; an empty document has no place in any group.
        documents = sorted(
            (
                (cls._size_class(prefix[1] - prefix[0]), span[1] - span[0], span[0], prefix)
                for span, prefix in zip(spans, before, strict=True)
                if span[1] > span[0]
            ),
            reverse=True,
        )
        groups: list[list[_Document]] = []
        for size, length, start, prefix in documents:
            document = _Document(length, start, size, prefix)
            # Longest first: a document joins while it fills most of the group's row.
            first = groups[-1][0] if groups else None
            if first and first.size_of_prefix == size and length >= (1 - cls.MAX_PADDING) * first.length:
                groups[-1].append(document)
            else:
                groups.append([document])
        slots = torch.empty(bounds[-1], dtype=torch.int64)
        shapes, indices, offset = [], [torch.empty(0, dtype=torch.int64)], 0
        for group in groups:
            longest = group[0].length
            steps = torch.arange(longest)
            starts = torch.tensor([document.start for document in group])[:, None]
            lengths = torch.tensor([document.length for document in group])[:, None]
            index = starts + torch.minimum(steps[None], lengths - 1)
            own = steps[None] < lengths
            slots[index[own]] = offset + torch.arange(index.numel()).view_as(index)[own]
            shapes.append((len(group), longest))
            indices.append(index.flatten())
            offset += index.numel()
        device = cu_seqlens.device
        prefixes = [cls._prefixes(group, device) if group[0].size_of_prefix else None for group in groups]
        return cls(shapes, torch.cat(indices).to(device), slots.to(device), prefixes)

    @classmethod
    def _size_class(cls, length: int) -> int:
        """0 for nothing; lengths of one class differ by no more than `MAX_PADDING` of the longest."""
        return 1 + math.ceil(math.log(length, 1 / (1 - cls.MAX_PADDING))) if length else 0

    @staticmethod
    def _prefixes(group: list[_Document], device: torch.device) -> Prefixes:
        bounds = torch.tensor([document.prefix for document in group])
        starts, lengths = bounds[:, :1], bounds[:, 1:] - bounds[:, :1]
        steps = torch.arange(int(lengths.max()))
        real = steps[None] < lengths
        index = torch.where(real, starts + steps[None], starts)
        tokens = group[0].length
        causal = torch.ones(tokens, tokens, dtype=torch.bool).tril()
        documents = len(group)
        mask = torch.cat(
            [real[:, None].expand(-1, tokens, -1), causal[None].expand(documents, -1, -1)],
            dim=2,
        )
        return Prefixes(index.flatten().to(device), mask[:, None].to(device))


@dataclass(frozen=True)
class _Document:
    length: int
    start: int
    size_of_prefix: int
    prefix: tuple[int, int]
    """First token and end; equal where there is none."""


@dataclass
class LocalPackedSeqParams(PositionedSeqParams):
    """Megatron's description of a packed micro-batch, with what the local layers need beside it.

    `qkv_format` stays "sbhd": Megatron then applies rotary embeddings to the row as a whole, which is right because
    `PackedRotaryEmbedding` gives each token the angles of its position in its own document. (Megatron's own unfused
    path for packed sequences loops over the documents in Python, twice a layer.)
    """

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
    fused kernels apply. Documents that go on from another one see that one's keys and values before their own, under a
    mask.
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
        for (documents, longest), prefixes in zip(groups.shapes, groups.prefixes, strict=True):
            end = start + documents * longest
            q, k, v = (x[start:end].view(documents, longest, x.shape[1], x.shape[2]) for x in padded)
            if prefixes is None:
                out = self._attend(q, k, v, is_causal=True)
            else:
                k, v = (
                    torch.cat([x.index_select(0, prefixes.index).view(documents, -1, *x.shape[1:]), own], dim=1)
                    for x, own in ((key, k), (value, v))
                )
                out = self._attend(q, k, v, mask=prefixes.mask)
            outputs.append(out.reshape(end - start, -1))
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
