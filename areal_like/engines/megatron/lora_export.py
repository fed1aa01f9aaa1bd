"""Adapters under PEFT's names: as a stream, and as a folder that `peft.PeftModel.from_pretrained` reads."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from areal_like.config import TrainEngineConfig
from areal_like.engines.base import WeightBucket
from areal_like.engines.megatron.fp8 import readable
from areal_like.engines.megatron.lora_layer import Adapter, merged_weight
from areal_like.engines.megatron.process_groups import ModelGroups, gather_shards
from areal_like.engines.megatron.weights import stream_tensors, write_folder
from areal_like.spec import ModelSpec
from areal_like.spec.lora import adapter_matrices

__all__ = ["merged_values", "save_adapter_folder", "stream_adapters"]


def merged_values(adapters: Sequence[Adapter]) -> Callable[[torch.nn.Parameter], Tensor]:
    """This rank's part of a parameter, with the adapter of its matrix merged into it. Collective for such matrices."""
    wrapped = {id(adapter.module.to_wrap.weight): adapter.module for adapter in adapters}

    def value(parameter: torch.nn.Parameter) -> Tensor:
        module = wrapped.get(id(parameter))
        return readable(parameter) if module is None else merged_weight(module)

    return value


def stream_adapters(
    adapters: Sequence[Adapter], config: TrainEngineConfig, spec: ModelSpec, groups: ModelGroups
) -> Iterator[WeightBucket]:
    """The adapters alone, under PEFT's names, on rank 0. Collective.

    Raises:
        RuntimeError: the model has none.
    """
    if not config.use_lora:
        raise RuntimeError("this model has no adapters: its section of the configuration has `use_lora: false`")
    buckets = stream_tensors(lambda: _peft_tensors(adapters, spec, groups.collection.ep), groups)
    return (replace(bucket, adapter_scaling=config.lora_alpha / config.lora_rank) for bucket in buckets)


def save_adapter_folder(
    buckets: Iterator[WeightBucket], config: TrainEngineConfig, spec: ModelSpec, target: Path
) -> None:
    """Write the stream as a folder that `peft.PeftModel.from_pretrained` reads; it appears whole or not at all.

    Raises:
        OSError: the folder could not be written.
    """

    def write(folder: Path) -> None:
        tensors = {name: tensor.clone() for bucket in buckets for name, tensor in bucket.tensors.items()}
        save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
        (folder / "adapter_config.json").write_text(json.dumps(_peft_config(config, spec), indent=2) + "\n")

    write_folder(buckets, target, write)


def _peft_config(config: TrainEngineConfig, spec: ModelSpec) -> dict[str, Any]:
    matrices = adapter_matrices(spec, config.target_modules)
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": config.path,
        "r": config.lora_rank,
        "lora_alpha": config.lora_alpha,
        # PEFT has no dropout before the experts, which Transformers holds in one tensor, and refuses the number.
        "lora_dropout": 0.0 if any(m.expert is not None for m in matrices) else config.lora_dropout,
        "target_modules": sorted({name.rsplit(".", 1)[1] for m in matrices for name, _ in m.parts}),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }


def _peft_tensors(
    adapters: Sequence[Adapter], spec: ModelSpec, expert_group: dist.ProcessGroup
) -> Iterator[tuple[str, Tensor]]:
    """Whole `lora_A` and `lora_B` of this stage, on every rank of the stage. Collective.

    PEFT has queries, keys and values apart, and gate and up projection: each gets the same A and its rows of B.

    Args:
        expert_group: the expert-parallel ranks: each holds adapters of its own experts.
    """
    for adapter in adapters:
        matrix = adapter.matrix
        a = torch.cat(gather_shards(adapter.a, adapter.group), dim=0 if matrix.is_column_parallel else 1)
        b = _whole_b(gather_shards(adapter.b, adapter.group), matrix.target)
        if matrix.expert is None:
            yield from _parts(adapter, [name for name, _ in matrix.parts], a, b, spec)
            continue
        for number, (its_a, its_b) in enumerate(
            zip(gather_shards(a, expert_group), gather_shards(b, expert_group), strict=True)
        ):
            # The same place on the next rank is an expert further on by as many as each rank has.
            expert = matrix.expert + (number - expert_group.rank()) * (spec.num_experts // expert_group.size())
            names = [name.replace(f".experts.{matrix.expert}.", f".experts.{expert}.") for name, _ in matrix.parts]
            yield from _parts(adapter, names, its_a, its_b, spec)


def _whole_b(shards: list[Tensor], target: str) -> Tensor:
    if target == "linear_fc1":  # each shard holds its part of the gate above its part of the up projection
        halves = [shard.chunk(2) for shard in shards]
        return torch.cat([half[0] for half in halves] + [half[1] for half in halves])
    return torch.cat(shards)


def _parts(adapter: Adapter, names: list[str], a: Tensor, b: Tensor, spec: ModelSpec) -> Iterator[tuple[str, Tensor]]:
    matrix = adapter.matrix
    if matrix.target == "linear_qkv":
        rows = _split_qkv(b, spec)
    else:
        rows = list(b.split([count for _, count in matrix.parts]))
    for name, own in zip(names, rows, strict=True):
        yield f"base_model.model.{name}.lora_A.weight", a
        yield f"base_model.model.{name}.lora_B.weight", own


def _split_qkv(b: Tensor, spec: ModelSpec) -> list[Tensor]:
    """Megatron-Core's order is: the queries of one key-value head, that key head, that value head, the next."""
    groups, width, rank = spec.num_key_value_heads, spec.head_dim, b.shape[1]
    queries = spec.num_attention_heads // groups
    grouped = b.view(groups, queries + 2, width, rank)
    return [part.reshape(-1, rank) for part in grouped.split([queries, 1, 1], dim=1)]
