"""How a rank reads its part of a Hugging Face folder with megatron-bridge's mappings."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from torch import Tensor

from areal_like.engines.megatron.bridges.checkpoint import HuggingFaceFolder

__all__ = ["FolderMapping", "each_rank_takes_its_own"]


class FolderMapping:
    """A folder as the mapping of names to tensors that megatron-bridge reads from."""

    def __init__(self, folder: HuggingFaceFolder) -> None:
        self._folder = folder

    def __contains__(self, name: str) -> bool:
        return name in self._folder

    def __getitem__(self, name: str) -> Tensor:
        return self._folder.tensor(name)


class _Reader:
    """Stands in for a tensor-parallel group while a folder is read: each rank acts as the one that has everything."""

    def __init__(self, size: int, part: int) -> None:
        self._size, self.part = size, part

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return 0


@contextmanager
def each_rank_takes_its_own(*, tp: tuple[int, int], etp: tuple[int, int]) -> Iterator[SimpleNamespace]:
    """While a folder is read nothing is sent: every rank can read it, so each keeps its part of what is split.

    megatron-bridge splits on the first tensor rank and scatters. An error there would leave the others waiting.

    Args:
        tp, etp: size of the rank's tensor-parallel group, and of that of its experts, and its place in them.

    Yields:
        The groups to give to megatron-bridge's mappings meanwhile.
    """
    from megatron.bridge.models.conversion.param_mapping import MegatronParamMapping

    def keep_own_part(mapping: Any, splits: list[Tensor], *args: Any, **kwargs: Any) -> Tensor:
        return splits[mapping.tp_group.part if mapping.tp_size > 1 else 0]

    def keep(mapping: Any, tensor: Tensor, src_rank: int = 0) -> Tensor:
        return tensor

    with (
        patch.object(MegatronParamMapping, "scatter_to_tp_ranks", keep_own_part),
        patch.object(MegatronParamMapping, "broadcast_tensor_to_tp_ranks", keep),
    ):
        yield SimpleNamespace(pp=None, ep=None, tp=_Reader(*tp), expt_tp=_Reader(*etp))
