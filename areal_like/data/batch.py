"""`PackedBatch`: variable-length sequences laid end to end, the one batch type of the project.

Alignment, everywhere in the project: a per-token value belongs to the token it is about. `log_probs[i]` is the
log-probability of token `i` given the tokens before it in the same sequence; the first token of a sequence has no
prediction, so its value is 0 and its `loss_mask` is 0. Nobody but an engine ever shifts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class PackedBatch:
    """Sequences packed without padding.

    Attributes:
        input_ids: token ids, int64 `[tokens]`.
        cu_seqlens: cumulative sequence lengths, int64 `[sequences + 1]`, first entry 0, last entry `tokens`.
        tokens: per-token fields by name, each `[tokens]` (for example `loss_mask`, `old_log_probs`, `advantages`).
        sequences: per-sequence fields by name, each `[sequences]` (for example `rewards`).
    """

    input_ids: Tensor
    cu_seqlens: Tensor
    tokens: dict[str, Tensor] = field(default_factory=dict)
    sequences: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.cu_seqlens.ndim != 1 or self.cu_seqlens.numel() < 1 or int(self.cu_seqlens[0]) != 0:
            raise ValueError("cu_seqlens must be one-dimensional and start at 0")
        if int(self.cu_seqlens[-1]) != self.input_ids.numel():
            raise ValueError(
                f"cu_seqlens ends at {int(self.cu_seqlens[-1])} but there are {self.input_ids.numel()} tokens"
            )
        for name, value in self.tokens.items():
            if value.shape[:1] != self.input_ids.shape:
                raise ValueError(f"token field {name!r} has {tuple(value.shape)} for {self.input_ids.numel()} tokens")
        for name, value in self.sequences.items():
            if value.shape[:1] != (len(self),):
                raise ValueError(f"sequence field {name!r} has {tuple(value.shape)} for {len(self)} sequences")

    def __len__(self) -> int:
        return self.cu_seqlens.numel() - 1

    @property
    def lengths(self) -> list[int]:
        """Tokens of each sequence."""
        return (self.cu_seqlens[1:] - self.cu_seqlens[:-1]).tolist()

    @classmethod
    def from_sequences(
        cls,
        input_ids: Sequence[Sequence[int] | Tensor],
        tokens: dict[str, Sequence[Sequence[float] | Tensor]] | None = None,
        sequences: dict[str, Sequence[float] | Tensor] | None = None,
    ) -> PackedBatch:
        """Pack lists. `tokens` holds one list a sequence for each field, `sequences` one value a sequence."""
        lengths = [len(ids) for ids in input_ids]
        cu = torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0)
        ids = [torch.as_tensor(x, dtype=torch.int64) for x in input_ids]
        flat = torch.cat(ids) if ids else torch.empty(0, dtype=torch.int64)
        packed: dict[str, Tensor] = {}
        for name, rows in (tokens or {}).items():
            if [len(r) for r in rows] != lengths:
                raise ValueError(f"token field {name!r} has rows of other lengths than the sequences")
            packed[name] = torch.cat([torch.as_tensor(r) for r in rows]) if rows else torch.empty(0)
        return cls(flat, cu, packed, {k: torch.as_tensor(v) for k, v in (sequences or {}).items()})

    def select(self, indices: Sequence[int]) -> PackedBatch:
        """The sequences of these indices, in this order."""
        starts = self.cu_seqlens.tolist()
        lengths = self.lengths
        cu = torch.tensor([0] + [lengths[i] for i in indices], dtype=self.cu_seqlens.dtype).cumsum(0)

        def pick(x: Tensor) -> Tensor:
            return torch.cat([x[starts[i] : starts[i + 1]] for i in indices]) if len(indices) else x[:0]

        index = torch.as_tensor(list(indices), dtype=torch.int64)
        return PackedBatch(
            pick(self.input_ids),
            cu.to(self.cu_seqlens.device),
            {k: pick(v) for k, v in self.tokens.items()},
            {k: v[index.to(v.device)] for k, v in self.sequences.items()},
        )

    @classmethod
    def concat(cls, batches: Sequence[PackedBatch]) -> PackedBatch:
        """All sequences of several batches that have the same fields, in order."""
        if not batches:
            raise ValueError("nothing to concatenate")
        first = batches[0]
        for other in batches[1:]:
            if other.tokens.keys() != first.tokens.keys() or other.sequences.keys() != first.sequences.keys():
                raise ValueError("batches with different fields cannot be concatenated")
        lengths = [n for b in batches for n in b.lengths]
        return cls(
            torch.cat([b.input_ids for b in batches]),
            torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0).to(first.cu_seqlens.device),
            {k: torch.cat([b.tokens[k] for b in batches]) for k in first.tokens},
            {k: torch.cat([b.sequences[k] for b in batches]) for k in first.sequences},
        )

    def split_tokens(self, values: Tensor) -> list[Tensor]:
        """Cut a `[tokens]` tensor into one tensor a sequence."""
        return list(torch.split(values, self.lengths))

    def to(self, device: torch.device | str) -> PackedBatch:
        return PackedBatch(
            self.input_ids.to(device),
            self.cu_seqlens.to(device),
            {k: v.to(device) for k, v in self.tokens.items()},
            {k: v.to(device) for k, v in self.sequences.items()},
        )
