"""What tests of the bridges read off an engine inside a worker; each function takes the engine, and travels by name."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer.transformer_config import TransformerConfig

from areal_like.engines.megatron.bridges import create_bridge


def globals_of_megatron(engine: Any) -> list[str]:
    """Groups that Megatron-Core keeps for the whole process."""
    return [n for n, v in vars(parallel_state).items() if n.endswith("_GROUP") and v is not None]


def parameters(engine: Any) -> dict[str, torch.Tensor]:
    """This rank's shards."""
    return {f"{i}.{n}": p.detach().cpu().clone() for i, m in enumerate(engine.modules) for n, p in m.named_parameters()}


def model_settings(engine: Any) -> list[dict[str, Any]]:
    """Of each chunk: every field of Megatron's `TransformerConfig`, and of each layer number, class and dispatcher."""
    return [
        config_fields(chunk.config) | {"vp_stage": chunk.vp_stage, "layers": _layers(chunk)} for chunk in engine.modules
    ]


def config_fields(config: TransformerConfig) -> dict[str, Any]:
    return {f.name: _comparable(getattr(config, f.name)) for f in dataclasses.fields(TransformerConfig)}


def bridge_config(engine: Any, bridge_type: str, folder: str, settings: dict[str, Any]) -> dict[str, Any]:
    """The configuration that a bridge makes of settings, without a model: some cannot be built here."""
    bridge = create_bridge(
        bridge_type,
        Path(folder),
        engine.groups,
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
        stages=[3],
        settings=settings,
        use_transformer_engine=False,
    )
    return config_fields(bridge.config)


def _layers(chunk: Any) -> list[tuple[Any, ...]]:
    found = []
    for layer in chunk.decoder.layers:
        dispatcher = getattr(layer.mlp, "token_dispatcher", None)
        names = [type(part).__name__ for part in layer.modules()]
        found.append((layer.layer_number, layer.config is chunk.config, type(dispatcher).__name__, names))
    return found


def _comparable(value: Any) -> Any:
    if isinstance(value, functools.partial):
        return value.func.__name__, value.keywords
    if hasattr(value, "stages") and hasattr(value, "rank"):
        return value.stages, value.rank
    return getattr(value, "__qualname__", value)
