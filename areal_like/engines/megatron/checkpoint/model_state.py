"""The parameters and buffers of a rank as Megatron-Core's shards of whole tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import (
    ShardedObject,
    ShardedStateDict,
    ShardedTensor,
    ShardedTensorFactory,
)
from megatron.core.dist_checkpointing.serialization import load_sharded_metadata
from megatron.core.models.common.language_module import language_module
from megatron.core.transformer.module import MegatronModule

from areal_like.engines.megatron.process_groups import ModelGroups
from areal_like.spec.checkpoint import CheckpointFault

__all__ = ["Sharded", "load_model", "parameter_shards", "sharded_model", "stored_in"]

type Sharded = ShardedTensor | ShardedTensorFactory


def sharded_model(chunks: list[torch.nn.Module], groups: ModelGroups) -> dict[str, ShardedStateDict]:
    """The shards of each chunk, `{"model0": {name: shard}}`.

    Frozen parameters are left out: a run that trains adapters takes the rest from the Hugging Face folder again.
    """
    metadata = {"dp_cp_group": groups.collection.dp_cp}
    found = {}
    for number, chunk in enumerate(chunks):
        _tell_tensor_groups(chunk, groups)
        with _own_data_parallel_rank(groups):
            shards = chunk.sharded_state_dict(metadata=dict(metadata))  # type: ignore[operator]
        found[f"model{number}"] = {name: shard for name, shard in shards.items() if not _is_frozen(shard)}
    return found


def stored_in(folder: Path, model: dict[str, ShardedStateDict]) -> dict[str, ShardedStateDict]:
    """The shards without the extra states of modules (scales of FP8) that a checkpoint does not hold: layers of another
    kind wrote it, which have none."""
    stored = load_sharded_metadata(str(folder))
    return {
        chunk: {n: s for n, s in shards.items() if not isinstance(s, ShardedObject) or s.unique_key in stored}
        for chunk, shards in model.items()
    }


def parameter_shards(model: dict[str, ShardedStateDict]) -> dict[torch.nn.Parameter, Sharded]:
    """The shard that stands for each trained parameter."""
    return {shard.data: shard for shard in _shards(model) if isinstance(shard.data, torch.nn.Parameter)}


def load_model(chunks: list[torch.nn.Module], loaded: dict[str, Any]) -> None:
    """Fill the chunks with what was read.

    Raises:
        CheckpointFault: a trained parameter was not read.
    """
    for number, chunk in enumerate(chunks):
        missing, _ = chunk.load_state_dict(loaded[f"model{number}"], strict=False)
        trained = {name for name, parameter in chunk.named_parameters() if parameter.requires_grad}
        if lost := sorted(trained & set(missing)):
            raise CheckpointFault(f"the checkpoint does not hold {', '.join(lost[:3])}")


def _tell_tensor_groups(chunk: torch.nn.Module, groups: ModelGroups) -> None:
    """Megatron-Core asks a module for its tensor-parallel group, and its globals when the module has none."""
    for module in chunk.modules():
        if isinstance(module, MegatronModule) and not hasattr(module, "tp_group"):
            module.tp_group = groups.collection.tp


@contextlib.contextmanager
def _own_data_parallel_rank(groups: ModelGroups) -> Iterator[None]:
    """Tied embeddings of a last stage ask Megatron-Core's globals for the data-parallel rank (0.19.2)."""
    rank = groups.collection.dp_cp.rank()
    original = language_module.parallel_state
    language_module.parallel_state = SimpleNamespace(get_data_parallel_rank=lambda **_: rank)
    try:
        yield
    finally:
        language_module.parallel_state = original


def _shards(model: dict[str, ShardedStateDict]) -> Iterator[Sharded]:
    return (value for value in nested_values(model) if isinstance(value, ShardedTensor | ShardedTensorFactory))


def _is_frozen(shard: Any) -> bool:
    data = getattr(shard, "data", None)
    return isinstance(data, torch.nn.Parameter) and not data.requires_grad
