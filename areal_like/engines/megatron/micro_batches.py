"""One data-parallel rank's sequences as the micro-batches that run through the model."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from areal_like.data.batch import PackedBatch
from areal_like.engines.megatron.attention import DocumentGroups, LocalPackedSeqParams
from areal_like.spec import count_micro_batches, pack_micro_batches

__all__ = ["MicroBatch", "make_micro_batches"]


@dataclass(frozen=True)
class MicroBatch:
    """Some sequences of the batch, ready for the model.

    Attributes:
        batch: the sequences, unpadded; empty when another rank needs more micro-batches than this one has.
        indices: which sequences of the rank's batch they are.
        input_ids, positions: `[1, padded tokens]`; padding forms a document of its own at the end.
        labels: `[padded tokens]`, the next token of each position in its sequence, 0 where there is none.
        packed: documents for the attention.
    """

    batch: PackedBatch
    indices: list[int]
    input_ids: Tensor
    positions: Tensor
    labels: Tensor
    packed: PackedSeqParams

    def to_tokens(self, next_token_values: Tensor) -> Tensor:
        """From values about the next token `[padded tokens]` to values about each token `[tokens]`, 0 at the first."""
        tokens = self.batch.input_ids.numel()
        shifted = torch.cat([next_token_values.new_zeros(1), next_token_values])[:tokens]
        firsts = self.batch.cu_seqlens[:-1]
        mask = torch.ones_like(shifted)
        mask[firsts[firsts < tokens]] = 0.0  # an empty last sequence would start past the end
        return shifted * mask


def make_micro_batches(
    batch: PackedBatch,
    *,
    max_tokens: int | None,
    at_least: int,
    pad_to: int,
    data_parallel_group: dist.ProcessGroup,
    device: torch.device,
    local_attention: bool,
) -> list[MicroBatch]:
    """Pack under the token budget; every data-parallel rank gets the same number of micro-batches. Collective.

    Args:
        max_tokens: token budget of a micro-batch; None for no limit.
        at_least: fewest micro-batches.
        pad_to: packed lengths are multiples of it (the tensor-parallel size, for sequence parallelism).

    Raises:
        SequenceTooLong: one sequence exceeds the budget (on every rank, so that none waits for another).
    """
    lengths = batch.lengths
    if max_tokens is None:
        max_tokens = sum(lengths) + pad_to
    else:
        longest = torch.tensor([max(lengths, default=0)], device=device)
        dist.all_reduce(longest, op=dist.ReduceOp.MAX, group=data_parallel_group)
        count_micro_batches([int(longest)], max_tokens, pad_to=pad_to)  # raises on every rank
    count = torch.tensor([count_micro_batches(lengths, max_tokens, pad_to=pad_to)], device=device)
    dist.all_reduce(count, op=dist.ReduceOp.MAX, group=data_parallel_group)
    bins = pack_micro_batches(lengths, max_tokens, at_least=max(int(count), at_least), pad_to=pad_to)
    # Balancing can need one more than first-fit: agree once more.
    final = torch.tensor([len(bins)], device=device)
    dist.all_reduce(final, op=dist.ReduceOp.MAX, group=data_parallel_group)
    if int(final) > len(bins):
        bins += [[] for _ in range(int(final) - len(bins))]
    return [_micro_batch(batch.select(b), b, pad_to, device, local_attention) for b in bins]


def _micro_batch(
    batch: PackedBatch, indices: list[int], pad_to: int, device: torch.device, local_attention: bool
) -> MicroBatch:
    batch = batch.to(device)
    tokens = batch.input_ids.numel()
    padding = -tokens % pad_to if tokens else pad_to
    ids = torch.nn.functional.pad(batch.input_ids, (0, padding))
    lengths = [n for n in batch.lengths if n > 0] + ([padding] if padding else [])
    positions = torch.cat([torch.arange(n, device=device) for n in lengths])
    labels = torch.cat([ids[1:], ids.new_zeros(1)])
    is_last = torch.cat([positions[1:] == 0, positions.new_ones(1, dtype=torch.bool)])
    labels = labels.masked_fill(is_last, 0)
    cu_seqlens = torch.tensor([0, *lengths], device=device, dtype=torch.int64).cumsum(0)
    return MicroBatch(
        batch,
        indices,
        ids[None],
        positions[None],
        labels,
        _packed_seq_params(cu_seqlens, positions, max(lengths), local_attention),
    )


def _packed_seq_params(cu_seqlens: Tensor, positions: Tensor, longest: int, local: bool) -> PackedSeqParams:
    if local:
        return LocalPackedSeqParams(
            qkv_format="sbhd",
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
            positions=positions,
            groups=DocumentGroups.of(cu_seqlens),
        )
    cu = cu_seqlens.to(torch.int32)
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=cu,
        cu_seqlens_kv=cu,
        cu_seqlens_q_padded=cu,
        cu_seqlens_kv_padded=cu,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )
