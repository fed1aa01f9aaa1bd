"""Low-rank adapters: megatron-bridge's layers around the matrices of a built and loaded model.

The model's own parameters are frozen; gradients, buffers and optimizer states exist for the adapters alone. What
megatron-bridge 0.6.2 leaves out is done here, at one place each: process groups come from the model instead of
Megatron's globals, `lora_dtype` is honoured, dropout draws anew where its input is split over ranks, and A starts from
the same values under every layout.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import Any

import torch

from areal_like.config import TrainEngineConfig
from areal_like.engines.megatron import cpu
from areal_like.engines.megatron.bridges.upstream import import_megatron_bridge
from areal_like.engines.megatron.lora_layer import Adapter, ShardDropout, cast, tracker_name
from areal_like.engines.megatron.process_groups import ModelGroups
from areal_like.engines.megatron.settings import DTYPES
from areal_like.spec import ModelSpec
from areal_like.spec.lora import COLUMN_PARALLEL, adapter_matrices, lora_targets

__all__ = ["attach_adapters", "trained_dtype"]

_EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.(linear_fc[12])$")
_PLAIN = re.compile(r"(?:self_attention|mlp)\.(linear_qkv|linear_proj|linear_fc1|linear_fc2)$")


def trained_dtype(config: TrainEngineConfig, dtype: torch.dtype) -> torch.dtype:
    """Type of the parameters that are trained.

    Args:
        dtype: of the model.
    """
    name = config.lora_dtype if config.use_lora else None
    return DTYPES[name] if name else dtype


def attach_adapters(
    chunks: Sequence[torch.nn.Module],
    config: TrainEngineConfig,
    spec: ModelSpec,
    groups: ModelGroups,
    *,
    device: torch.device,
    dtype: torch.dtype,
    seed: int,
) -> list[Adapter]:
    """Wrap the matrices that `target_modules` names in every chunk, and freeze everything else.

    B starts at 0, so the model computes what it did. A is uniform in +-1/sqrt(inputs), as PEFT has it (Kaiming's
    initialisation with a = sqrt(5)).

    Args:
        chunks: of this rank, loaded.
        dtype: of the model.

    Returns:
        The adapters of this rank in the order of the model.

    Raises:
        ValueError: a matrix cannot get an adapter; the message names it.
    """
    dtype = trained_dtype(config, dtype)
    _refuse_unsupported(config, spec, groups)
    lora = _layers(config)
    if device.type == "cpu":
        cpu.install()  # megatron-bridge imports more of Megatron
    _refuse_grouped_experts(chunks, lora.target_modules)
    configs = _configs(chunks)
    for each in configs:
        each._pg_collection = groups.collection  # or megatron-bridge would ask Megatron's globals
    # It remembers by `id` which models it has prepared for full recomputation: another one may have that id by now.
    import_module("megatron.bridge.peft.recompute").PEFT_RECOMPUTE_PATCHED.clear()
    try:
        lora(list(chunks), training=True)
    finally:
        for each in configs:
            del each._pg_collection
    adapters = list(_find(chunks, spec, groups, lora.target_modules))
    for adapter in adapters:
        module = adapter.module.adapter
        module.to(device=device, dtype=dtype)
        cast(module, dtype)
        if config.lora_dropout:
            module.dropout = ShardDropout(config.lora_dropout, tracker_name(adapter))
        _initialise(adapter, seed)
    return adapters


def _layers(config: TrainEngineConfig) -> Any:
    import_megatron_bridge()
    kinds = {"lora": import_module("megatron.bridge.peft.lora").LoRA}
    return kinds[config.peft_type](
        target_modules=list(lora_targets(config.target_modules)),
        dim=config.lora_rank,
        alpha=config.lora_alpha,
        dropout=config.lora_dropout,
    )


def _refuse_unsupported(config: TrainEngineConfig, spec: ModelSpec, groups: ModelGroups) -> None:
    """What the rules AL521 and AL551 to AL557 find before a run."""
    megatron, targets = config.megatron, lora_targets(config.target_modules)
    tp, etp = groups.mesh.size("tp"), groups.mesh.size("etp")
    column = [t for t in targets if t in COLUMN_PARALLEL]
    problems = {
        "bridge_type mbridge has no adapters: use megatron-bridge": megatron.bridge_type == "mbridge",
        "adapters need an optimizer: B of a new one is 0": config.optimizer is None,
        f"lora_rank {config.lora_rank} does not divide by t{tp}": column and config.lora_rank % tp,
        f"the hidden size {spec.hidden_size} does not divide by t{tp}": len(targets) > len(column)
        and spec.hidden_size % tp,
        f"experts split by t{etp} get no adapters": spec.is_moe
        and etp > 1
        and any(t.startswith("linear_fc") for t in targets),
        "moe_router_bias_update_rate changes what adapters leave as it is": megatron.moe_router_bias_update_rate,
        "the head of a value model would not be trained": config.is_critic,
        "adapters cannot be trained on matrices in FP8": megatron.fp8_config is not None,
    }
    found = [message for message, is_so in problems.items() if is_so]
    if found:
        raise ValueError(f"use_lora: {'; '.join(found)}")


def _refuse_grouped_experts(chunks: Sequence[torch.nn.Module], targets: list[str]) -> None:
    for chunk in chunks:
        for name, module in chunk.named_modules():
            if name.endswith((".mlp.experts.linear_fc1", ".mlp.experts.linear_fc2")) and name.split(".")[-1] in targets:
                raise ValueError(
                    f"{name} holds the matrices of several experts ({type(module).__name__}), which get no adapter: "
                    "set megatron.moe_grouped_gemm: false, or leave linear_fc1 and linear_fc2 out of target_modules"
                )


def _configs(chunks: Sequence[torch.nn.Module]) -> list[Any]:
    """The TransformerConfigs of all modules: parts of a model may have copies of it."""
    found = {id(m.config): m.config for chunk in chunks for m in chunk.modules() if hasattr(m, "config")}
    return list(found.values())


def _find(
    chunks: Sequence[torch.nn.Module], spec: ModelSpec, groups: ModelGroups, targets: list[str]
) -> Iterator[Adapter]:
    here, collection = groups.mesh.coordinates(groups.rank), groups.collection
    first_expert = here.ep * (spec.num_experts // groups.mesh.size("ep")) if spec.is_moe else 0
    for chunk in chunks:
        for layer in chunk.decoder.layers:  # type: ignore[union-attr]
            number = layer.layer_number - 1
            expected = {(m.expert, m.target): m for m in adapter_matrices(spec, targets, [number])}
            for name, module in layer.named_modules():
                if not hasattr(module, "to_wrap"):
                    continue
                if match := _EXPERT.match(name):
                    key: tuple[int | None, str] = (int(match[1]) + first_expert, match[2])
                elif match := _PLAIN.match(name):
                    key = (None, match[1])
                else:
                    raise ValueError(f"layer {number}: {name} cannot be trained with an adapter")
                yield Adapter(expected[key], module, collection.tp if key[0] is None else collection.expt_tp)


@torch.no_grad()
def _initialise(adapter: Adapter, seed: int) -> None:
    """The whole A is drawn from a stream of its own on every rank, which takes its part: no layout changes a value."""
    weight = adapter.module.adapter.linear_in.weight
    name = f"{seed}:{adapter.matrix.layer}:{adapter.matrix.expert}:{adapter.matrix.target}"
    generator = torch.Generator().manual_seed(int.from_bytes(hashlib.sha256(name.encode()).digest()[:7]))
    bound = 1 / math.sqrt(adapter.matrix.inputs)
    whole = torch.empty(adapter.module.adapter.dim, adapter.matrix.inputs).uniform_(-bound, bound, generator=generator)
    split = 0 if adapter.matrix.is_column_parallel else 1
    weight.copy_(whole.chunk(adapter.group.size(), dim=split)[adapter.group.rank()])
    adapter.module.adapter.linear_out.weight.zero_()
