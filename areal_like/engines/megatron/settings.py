"""Fields of Megatron's `TransformerConfig` that follow from our configuration and from what is installed."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch

from areal_like.config import MegatronConfig, TrainEngineConfig
from areal_like.engines.megatron import determinism, fp8
from areal_like.engines.megatron.model import StageLayout
from areal_like.engines.megatron.moe import moe_settings

__all__ = ["DTYPES", "has_transformer_engine", "transformer_settings"]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def has_transformer_engine(device: str) -> bool:
    """Whether TransformerEngine's layers are used: it needs CUDA."""
    return device == "cuda" and importlib.util.find_spec("transformer_engine") is not None


def transformer_settings(
    config: TrainEngineConfig,
    *,
    device: str,
    stages: list[int],
    pp: int,
    stage: int,
    is_moe: bool,
    transformer_engine: bool,
) -> dict[str, Any]:
    """Settings that override what the bridge reads from the checkpoint.

    Raises:
        ValueError: `virtual_pipeline_parallel_size` contradicts the letter v (the check says so first, AL215).
    """
    megatron = config.megatron
    virtual = len(stages) // pp
    if megatron.virtual_pipeline_parallel_size not in (None, virtual):
        said = megatron.virtual_pipeline_parallel_size
        raise ValueError(f"megatron.virtual_pipeline_parallel_size is {said}, backend {config.backend} has v{virtual}")
    settings: dict[str, Any] = {
        # The engine divides by the weight of the global batch itself.
        "calculate_per_token_loss": True,
        "fp16": config.dtype == "float16",
        "bf16": config.dtype == "bfloat16",
        "pipeline_model_parallel_layout": StageLayout(stages, pp, stage) if pp > 1 else None,
        "perform_initialization": config.init_from_scratch,
        "use_cpu_initialization": device == "cpu",
        "gradient_accumulation_fusion": False,  # `gradients.fuse_gradients` switches it on in what is trained
        "masked_softmax_fusion": False,
        # One switch for three kernels that exist only with TransformerEngine or Apex.
        "apply_rope_fusion": transformer_engine,
        "persist_layer_norm": transformer_engine,
        # Of a dense MLP the activation is ours (`model`), which Megatron takes in place of TransformerEngine's alone.
        "bias_activation_fusion": transformer_engine and is_moe,
        "use_te_activation_func": transformer_engine and not is_moe,
        # Without dropout it is one addition, which costs the host less uncompiled.
        "bias_dropout_fusion": transformer_engine and not config.disable_dropout,
    }
    settings |= fp8.settings(megatron.fp8_config)
    if megatron.use_deterministic_algorithms:
        settings |= determinism.settings()
    if config.disable_dropout:
        settings |= {"hidden_dropout": 0.0, "attention_dropout": 0.0}
    if config.gradient_checkpointing:
        settings |= _recomputation(megatron, transformer_engine=transformer_engine)
    if is_moe:
        settings |= moe_settings(
            megatron, device=torch.device(device), dtype=DTYPES[config.dtype], transformer_engine=transformer_engine
        )
    return settings


def _recomputation(megatron: MegatronConfig, *, transformer_engine: bool) -> dict[str, Any]:
    """What gradient_checkpointing asks for.

    Raises:
        ValueError: it asks for nothing, or for what Megatron-Core has with TransformerEngine alone.
    """
    if megatron.recompute_granularity is None:
        raise ValueError("gradient_checkpointing: true needs megatron.recompute_granularity: full or selective")
    if megatron.recompute_granularity == "selective":
        parts = megatron.recompute_modules or ("core_attn",)
        if "layernorm" in parts and not transformer_engine:
            # Without it Megatron-Core 0.19.2 runs into a name that is not defined.
            raise ValueError("megatron.recompute_modules: layernorm needs TransformerEngine and a GPU")
        return {"recompute_granularity": "selective", "recompute_modules": list(parts)}
    return {
        "recompute_granularity": "full",
        "recompute_method": megatron.recompute_method,
        "recompute_num_layers": megatron.recompute_num_layers,
    }
