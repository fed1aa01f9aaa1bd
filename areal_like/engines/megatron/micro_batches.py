"""One data-parallel rank's sequences as the micro-batches that run through the model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import overload

import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from areal_like.data.batch import PackedBatch
from areal_like.engines.megatron.attention import DocumentGroups, LocalPackedSeqParams
from areal_like.engines.megatron.context_parallel import local_tokens, padded_to_gathered
from areal_like.engines.megatron.host_copies import move
from areal_like.engines.megatron.rotary import PositionedSeqParams
from areal_like.spec import count_micro_batches, pack_micro_batches, padded_length
from areal_like.spec.prefixes import Family, find_families

__all__ = ["MicroBatch", "MicroBatches", "Padding", "make_micro_batches"]


@dataclass(frozen=True)
class Padding:
    """What lengths are rounded up to.

    Attributes:
        sequence: multiple for each sequence (2c with context parallelism).
        micro_batch: multiple for the whole packed row.
    """

    sequence: int = 1
    micro_batch: int = 1


@dataclass(frozen=True)
class MicroBatch:
    """Some sequences of the batch, ready for the model.

    With context parallelism a rank holds a part of each sequence (`context_parallel`); "gathered" means the rows of all
    context-parallel ranks laid end to end. Without it gathered and local are the same.

    Attributes:
        batch: the sequences, whole and unpadded; empty when another rank needs more micro-batches than this one has.
        indices: which sequences of the rank's batch they are.
        input_ids, positions: `[1, local tokens]`; padding at the end of the row forms a document of its own.
        labels: `[local tokens]`, the next token of each position in its sequence, 0 where there is none.
        packed: documents for the attention.
        places: `[tokens]`, where each token of `batch` is in the gathered row; tokens that sequences share have one
            place.
        before: `[tokens]`, where the token before it in `batch` is.
        is_predicted: bool `[tokens]`, False at the first token of a sequence.
    """

    batch: PackedBatch
    indices: list[int]
    input_ids: Tensor
    positions: Tensor
    labels: Tensor
    packed: PackedSeqParams
    places: Tensor
    before: Tensor
    is_predicted: Tensor

    def padding_mask(self, cp: int, rank: int) -> Tensor:
        """bool `[1, local tokens]`, True at padding, of this rank's part of a row over `cp` ranks."""
        local = self.input_ids.shape[1]
        gathered = torch.ones(cp * local, dtype=torch.bool, device=self.input_ids.device)
        gathered.index_fill_(0, self.places, False)
        return gathered.view(cp, local)[rank : rank + 1]

    def to_tokens(self, next_token_values: Tensor) -> Tensor:
        """From values about the next token `[gathered tokens]` to values about each token `[tokens]`; 0 at a first."""
        return torch.where(self.is_predicted, next_token_values.index_select(0, self.before), 0)


class MicroBatches(Sequence[MicroBatch]):
    """One rank's micro-batches of a step.

    Each is built when it is first asked for: the host does so while the GPU computes what was asked for before.

    Attributes:
        device: where they are.
        occupied: how many hold any sequence.
    """

    def __init__(self, build: Callable[[int], MicroBatch], count: int, *, device: torch.device, occupied: int) -> None:
        self.device, self.occupied = device, occupied
        self._build, self._count = build, count
        self._built: dict[int, MicroBatch] = {}

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> MicroBatch: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[MicroBatch]: ...
    def __getitem__(self, index: int | slice) -> MicroBatch | Sequence[MicroBatch]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        index = range(len(self))[index]  # raises IndexError
        if index not in self._built:
            self._built[index] = self._build(index)
        return self._built[index]


def make_micro_batches(
    batch: PackedBatch,
    *,
    max_tokens: int | None,
    at_least: int,
    multiple_of: int = 1,
    same_length: bool = False,
    share_prefixes: bool = False,
    padding: Padding = Padding(),
    data_parallel_group: dist.ProcessGroup,
    context_parallel_group: dist.ProcessGroup | None = None,
    device: torch.device,
    local_attention: bool,
    padding_mask: bool = False,
) -> MicroBatches:
    """Pack under the token budget; every data-parallel rank gets the same number of micro-batches. Collective.

    Args:
        max_tokens: token budget of a micro-batch (of all context-parallel ranks together); None for no limit.
        at_least: fewest micro-batches.
        multiple_of: the number of micro-batches is a multiple of it (interleaved pipelines).
        same_length: pad micro-batches that run at the same time to one length on all data-parallel ranks.
        share_prefixes: what sequences of a micro-batch have in common at their beginning is in the row once; only with
            the local attention and without context parallelism.
        padding_mask: `packed` gets one (see `MicroBatch.padding_mask`).

    Raises:
        SequenceTooLong: one sequence exceeds the budget (on every rank, so that none waits for another).
    """
    lengths = batch.lengths
    rounding = {"pad_to": padding.micro_batch, "sequence_multiple": padding.sequence}
    if max_tokens is None:
        max_tokens = sum(padded_length(n, padding.sequence) for n in lengths) + padding.micro_batch
    else:
        longest = _largest([max(lengths, default=0)], data_parallel_group, device)
        count_micro_batches(longest, max_tokens, **rounding)  # raises on every rank
    if share_prefixes:
        room = max_tokens - max_tokens % padding.micro_batch
        families = find_families([ids.tolist() for ids in batch.split_tokens(batch.input_ids)], room)
    else:
        families = [Family((index,), 0, length) for index, length in enumerate(lengths)]
    sizes = [family.tokens for family in families]
    # Packing needs no more than the count, so the ranks have as many once they agree on it.
    (count,) = _largest([count_micro_batches(sizes, max_tokens, **rounding)], data_parallel_group, device)
    bins = pack_micro_batches(sizes, max_tokens, at_least=max(count, at_least), multiple_of=multiple_of, **rounding)
    rows = [_row_length([sizes[i] for i in b], padding) for b in bins]
    if same_length:
        rows = _largest(rows, data_parallel_group, device)
    group = context_parallel_group
    cp, rank = (1, 0) if group is None else (group.size(), group.rank())
    batch = batch.to("cpu")

    def build(index: int) -> MicroBatch:
        members = [families[i] for i in bins[index]]
        (made,) = move([_micro_batch(batch, members, rows[index], padding, cp, rank, local_attention)], device)
        if padding_mask:
            made.packed.padding_mask = made.padding_mask(cp, rank)
        return made

    return MicroBatches(build, len(bins), device=device, occupied=sum(len(b) > 0 for b in bins))


def _largest(numbers: list[int], group: dist.ProcessGroup, device: torch.device) -> list[int]:
    """Of each number, the largest on any rank."""
    if group.size() == 1:
        return numbers
    box = torch.tensor(numbers, device=device)
    dist.all_reduce(box, op=dist.ReduceOp.MAX, group=group)
    found: list[int] = box.tolist()
    return found


def _row_length(lengths: list[int], padding: Padding) -> int:
    """Tokens of a packed row, padding included; a row is never empty."""
    tokens = sum(padded_length(n, padding.sequence) for n in lengths if n > 0)
    return max(padded_length(tokens, padding.micro_batch), padding.micro_batch)


@dataclass(frozen=True)
class _Row:
    """The documents of a packed row, each the rest of a sequence, a beginning that some share, or padding.

    Attributes:
        lengths: padded.
        positions: of the first token of each in its sequence.
        seen: number of the document that each goes on from, None where it starts a sequence.
        places: where each token of the sequences is in the row.
    """

    lengths: list[int]
    positions: list[int]
    seen: list[int | None]
    places: Tensor

    @classmethod
    def of(cls, families: list[Family], sequence_lengths: list[int], row_length: int, multiple: int) -> _Row:
        """`sequence_lengths`: of the members of all families, in their order; the rest of the row is padding."""
        lengths: list[int] = []
        positions: list[int] = []
        seen: list[int | None] = []
        places = [torch.empty(0, dtype=torch.int64)]
        waiting, start = iter(sequence_lengths), 0
        for family in families:
            common, shared = torch.arange(start, start + family.shared), None
            if family.shared:
                shared = len(lengths)
                lengths.append(family.shared)
                positions.append(0)
                seen.append(None)
                start += family.shared
            for _ in family.members:
                rest = next(waiting) - family.shared
                if rest == 0:  # an empty sequence
                    continue
                lengths.append(padded_length(rest, multiple))
                positions.append(family.shared)
                seen.append(shared)
                places += [common, torch.arange(start, start + rest)]
                start += lengths[-1]
        if start < row_length:
            lengths.append(row_length - start)
            positions.append(0)
            seen.append(None)
        return cls(lengths, positions, seen, torch.cat(places))


def _micro_batch(
    batch: PackedBatch,
    families: list[Family],
    row_length: int,
    padding: Padding,
    cp: int,
    rank: int,
    local_attention: bool,
) -> MicroBatch:
    """One on the host, for a rank of `cp` context-parallel ones."""
    indices = [index for family in families for index in family.members]
    batch = batch.select(indices)
    row = _Row.of(families, batch.lengths, row_length, padding.sequence)
    rows = torch.cat([torch.arange(first, first + n) for first, n in zip(row.positions, row.lengths, strict=True)])
    starts = torch.tensor([0, *row.lengths]).cumsum(0)
    own = row.places
    ids = batch.input_ids.new_zeros(int(starts[-1]))
    ids[own] = batch.input_ids
    following = torch.cat([batch.input_ids[1:], batch.input_ids.new_zeros(1)])[: own.numel()]
    ends = batch.cu_seqlens[1:]
    following[ends[ends > batch.cu_seqlens[:-1]] - 1] = 0  # the last token of a sequence predicts nothing
    labels = torch.zeros_like(ids)
    labels[own] = following  # the last token of a shared beginning has one successor too (`Family.shared`)
    mine = local_tokens(row.lengths, cp, rank)
    gathered = padded_to_gathered(row.lengths, cp)
    positions = rows[mine]
    places, tokens = gathered[own], own.numel()
    firsts = batch.cu_seqlens[:-1]
    is_predicted = torch.ones(tokens, dtype=torch.bool)
    is_predicted[firsts[firsts < tokens]] = False  # an empty last sequence would start past the end
    return MicroBatch(
        batch,
        indices,
        ids[mine][None],
        positions[None],
        labels[mine],
        _packed_seq_params(starts, row, positions, None if cp == 1 else gathered, local_attention),
        places,
        torch.cat([places[:1], places])[:tokens],
        is_predicted,
    )


def _packed_seq_params(
    cu_seqlens: Tensor,
    row: _Row,
    positions: Tensor,
    gathered: Tensor | None,
    local: bool,
) -> PackedSeqParams:
    longest = max(first + length for first, length in zip(row.positions, row.lengths, strict=True))
    if local:
        return LocalPackedSeqParams(
            qkv_format="sbhd",
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
            positions=positions,
            groups=DocumentGroups.of(cu_seqlens, row.seen) if gathered is None else None,
            lengths=row.lengths,
            gathered=gathered,
        )
    cu = cu_seqlens.to(torch.int32)
    return PositionedSeqParams(
        qkv_format="thd",
        positions=positions,
        cu_seqlens_q=cu,
        cu_seqlens_kv=cu,
        cu_seqlens_q_padded=cu,
        cu_seqlens_kv_padded=cu,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        # Left open, TransformerEngine compares the two kinds of bounds in every layer: the host waits for the GPU.
        pad_between_seqs=False,
    )
