"""Attention for packed sequences, with gradients whose bits repeat: FlexAttention with a mask of documents.

TransformerEngine's deterministic attention needs a workspace that grows with the square of the packed length (192 GiB
at 16,384 tokens), and torch's `varlen_attn` adds with atomics. FlexAttention's backward pass gives each block of
queries and each block of keys to one program that loops over the other side in a fixed order.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from areal_like.spec import flex_length
from areal_like.spec.attention import FLEX_BLOCK as BLOCK

__all__ = ["DocumentAttention", "DocumentMask", "use_document_attention"]

SHAPES = 64
"""Compiled versions of the kernel: lengths, with and without gradient, head counts."""


def use_document_attention(block: TransformerBlockSubmodules) -> None:
    """Put it into a block of TransformerEngine's layers."""
    for layer in block.layer_specs:
        layer.submodules.self_attention.submodules.core_attention = DocumentAttention


@dataclass(frozen=True)
class DocumentMask:
    """Which blocks of a packed row see each other. Made once a micro-batch, used by every layer.

    Attributes:
        padded: tokens of the row and its padding; each padding token is a document of its own.
        blocks: for FlexAttention.
    """

    padded: int
    blocks: BlockMask

    @classmethod
    def of(cls, packed: PackedSeqParams, tokens: int) -> DocumentMask:
        """That of a micro-batch, kept on its description."""
        known: DocumentMask | None = getattr(packed, "document_mask", None)
        if known is None:
            known = cls.from_bounds(packed.cu_seqlens_q, tokens)
            packed.document_mask = known  # type: ignore[attr-defined]
        return known

    @classmethod
    def from_bounds(cls, cu_seqlens: Tensor, tokens: int, *, padded: int | None = None) -> DocumentMask:
        """`cu_seqlens` `[documents + 1]`, ascending from 0 to `tokens`; `padded` is a multiple of 128."""
        padded = flex_length(tokens) if padded is None else padded
        steps = torch.arange(padded, device=cu_seqlens.device)
        documents = torch.bucketize(steps, cu_seqlens[1:].to(steps), right=True)
        documents = torch.where(steps < tokens, documents, cu_seqlens.numel() + steps)
        # Documents ascend along the row: two blocks share one when their ranges touch, and every pair of their tokens
        # shares it when the earlier block begins with the document that the later one ends with.
        first, last = documents[::BLOCK], documents[BLOCK - 1 :: BLOCK]
        earlier = torch.arange(first.numel(), device=steps.device)
        before, here = earlier[None, :] < earlier[:, None], earlier[None, :] == earlier[:, None]
        whole = before & (first[None, :] == last[:, None])
        partial = here | (before & (last[None, :] >= first[:, None]) & ~whole)

        def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return (query >= key) & (documents[query] == documents[key])

        blocks = BlockMask.from_kv_blocks(
            *_in_order(partial), *_in_order(whole), BLOCK_SIZE=BLOCK, mask_mod=visible, seq_lengths=(padded, padded)
        )
        return cls(padded, blocks)


def _in_order(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Number of blocks in each row `[1, 1, rows]`, and their columns first `[1, 1, rows, columns]`."""
    counts = blocks.sum(dim=-1, dtype=torch.int32)
    columns = torch.argsort(blocks.to(torch.int32), dim=-1, descending=True, stable=True).to(torch.int32)
    return counts[None, None].contiguous(), columns[None, None].contiguous()


def _attend(query: Tensor, key: Tensor, value: Tensor, blocks: BlockMask, scale: float | None) -> Tensor:
    """`query` `[padded, heads, head_dim]`, `key`, `value` with KV heads, to `[padded, heads * head_dim]`.

    What is compiled begins and ends with the contiguous layout of Megatron's layers: FlexAttention reads and writes
    through strides, so nothing is transposed in memory. (A compiled function takes the gradient of its output in
    contiguous form. Were the output FlexAttention's `[1, heads, padded, head_dim]`, each backward pass would copy it.)
    """
    q, k, v = (x.transpose(0, 1)[None] for x in (query, key, value))
    out = flex_attention(q, k, v, block_mask=blocks, scale=scale, enable_gqa=query.shape[1] != key.shape[1])
    assert isinstance(out, Tensor)  # no auxiliary output was asked for
    return out[0].transpose(0, 1).flatten(1)


@functools.cache
def _kernel(device_type: str) -> Callable[..., Tensor]:
    if device_type != "cuda":
        return _attend  # torch's plain implementation, for tests of the mask
    # A shape that would not be compiled any more would be computed with the whole matrix of scores: better an error,
    # which is what `fullgraph` makes of it.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, SHAPES)
    return torch.compile(_attend, dynamic=False, fullgraph=True)


def _padded(x: Tensor, length: int) -> Tensor:
    """`[tokens, heads, head_dim]` with rows of zeros up to `length`; without a copy where it has that length already.

    What is part of a larger tensor is copied all the same: values are a view of the fused projection, all of which
    attention would otherwise keep until its backward pass.
    """
    missing = length - x.shape[0]
    return F.pad(x, (0, 0, 0, 0, 0, missing)) if missing else x.contiguous()


WHY = "FlexAttention (attention_backend: flex, or use_deterministic_algorithms)"


class DocumentAttention(MegatronModule):
    """Causal attention inside each document of a packed row; takes the place of Megatron's core attention."""

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
        """
        Raises:
            ValueError: what it does not have: dropout, context parallelism, windows, sinks.
        """
        super().__init__(config=config)
        dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        if dropout > 0:
            raise ValueError(f"{WHY} has no dropout, and this model has {dropout}; set disable_dropout: true")
        if config.context_parallel_size > 1:
            raise ValueError(f"{WHY} has no context parallelism (c)")
        if config.window_size is not None or config.softmax_type != "vanilla":
            raise ValueError(f"{WHY} has no sliding windows and no sinks, and this model has")
        self.softmax_scale = softmax_scale

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
        """`query` `[tokens, heads/tp, head_dim]`, `key`, `value` with KV heads; returns `[tokens, width/tp]`."""
        if packed_seq_params is None or packed_seq_params.cu_seqlens_q is None:
            raise TypeError("DocumentAttention needs the bounds of the packed sequences")
        tokens = query.shape[0]
        mask = DocumentMask.of(packed_seq_params, tokens)
        rows = (_padded(x, mask.padded) for x in (query, key, value))
        return _kernel(query.device.type)(*rows, mask.blocks, self.softmax_scale)[:tokens]
