"""Which sequences each rank gets, and how their results become one batch again: a pure function of the Mesh.

Ranks that differ only in tp, pp, cp (or ep) work on the same sequences, so a shard belongs to a data-parallel index.
Results count once for each index: from the rank at tp 0, cp 0 of the last pipeline stage, which holds them whole.
(verl's MEGATRON_COMPUTE_PROTO is the same rule with equal chunks instead of balanced ones.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from areal_like.alloc import Mesh
from areal_like.data.batch import PackedBatch
from areal_like.spec.packing import balanced_partition

__all__ = ["Dispatch", "scatter"]


@dataclass(frozen=True)
class Dispatch:
    """A batch cut for the ranks of a mesh.

    Attributes:
        shards: the batch of each rank; ranks of one data-parallel index have the same object. A shard is empty when
            there are fewer sequences than data-parallel indices.
        sequences: by data-parallel index, the places that its sequences have in the whole batch, ascending.
        sources: by data-parallel index, the rank whose results count.
    """

    shards: tuple[PackedBatch, ...]
    sequences: tuple[tuple[int, ...], ...]
    sources: tuple[int, ...]

    def collect(self, results: Sequence[Any]) -> Any:
        """One result for the whole batch, in its order, from one result a rank.

        Args:
            results: by rank. All of one kind: a PackedBatch of the shard's sequences, a tensor
                `[tokens of the shard, ...]`, a list with one entry a sequence, a dict of these, or None.

        Raises:
            ValueError: not one result a rank, or a result of another size than its shard.
            TypeError: results of another kind.
        """
        if len(results) != len(self.shards):
            raise ValueError(f"{len(self.shards)} ranks have shards but {len(results)} results came")
        return self._join([results[rank] for rank in self.sources])

    def _join(self, parts: list[Any]) -> Any:
        kind = parts[0]
        if kind is None:
            return None
        if isinstance(kind, dict):
            return {name: self._join([part[name] for part in parts]) for name in kind}
        if isinstance(kind, PackedBatch):
            return PackedBatch.concat(parts).select(self._places())
        if isinstance(kind, Tensor):
            return self._join_tokens(parts)
        if isinstance(kind, list):
            self._check([len(part) for part in parts], [len(indices) for indices in self.sequences], "entries")
            together = [entry for part in parts for entry in part]
            return [together[place] for place in self._places()]
        raise TypeError(f"results of type {type(kind).__name__} cannot be collected")

    def _join_tokens(self, parts: list[Tensor]) -> Tensor:
        lengths = [self.shards[rank].lengths for rank in self.sources]
        self._check([part.shape[0] for part in parts], [sum(shard) for shard in lengths], "tokens")
        pieces = [
            piece for part, shard in zip(parts, lengths, strict=True) for piece in torch.split(part, shard) if shard
        ]
        return torch.cat([pieces[place] for place in self._places()]) if pieces else parts[0]

    def _places(self) -> list[int]:
        """For each sequence of the whole batch, its place when the shards are laid end to end."""
        order = [index for indices in self.sequences for index in indices]
        places = [0] * len(order)
        for place, index in enumerate(order):
            places[index] = place
        return places

    def _check(self, got: list[int], expected: list[int], what: str) -> None:
        for rank, found, wanted in zip(self.sources, got, expected, strict=True):
            if found != wanted:
                raise ValueError(f"the result of rank {rank} has {found} {what}; its shard has {wanted}")


def scatter(batch: PackedBatch, mesh: Mesh) -> Dispatch:
    """Cut a batch into whole sequences for each data-parallel index, balanced by tokens.

    Sequences keep their order within a shard. Any number of sequences is allowed, none included.
    """
    parts = balanced_partition(batch.lengths, mesh.size("dp"))
    shards = [batch.select(part) for part in parts]
    last_stage = mesh.size("pp") - 1
    return Dispatch(
        shards=tuple(shards[mesh.coordinates(rank).dp] for rank in range(mesh.world_size)),
        sequences=tuple(tuple(part) for part in parts),
        sources=tuple(mesh.rank(dp=dp, tp=0, pp=last_stage, cp=0) for dp in range(len(parts))),
    )
