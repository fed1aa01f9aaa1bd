"""Fields of Megatron's `TransformerConfig` that follow from our configuration and from what is installed."""

from __future__ import annotations

import importlib.util
from typing import Any

from areal_like.config import TrainEngineConfig
from areal_like.engines.megatron import determinism, fp8
from areal_like.engines.megatron.model import StageLayout

__all__ = ["has_transformer_engine", "transformer_settings"]


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
        "pipeline_model_parallel_layout": StageLayout(stages, pp, stage) if pp > 1 else None,
        "perform_initialization": config.init_from_scratch,
        "use_cpu_initialization": device == "cpu",
        "gradient_accumulation_fusion": False,
        "masked_softmax_fusion": False,
        # One switch for three kernels that exist only with TransformerEngine or Apex.
        "apply_rope_fusion": transformer_engine,
        "persist_layer_norm": transformer_engine,
        "bias_activation_fusion": transformer_engine,
        "bias_dropout_fusion": transformer_engine,
    }
    settings |= fp8.settings(megatron.fp8_config)
    if megatron.use_deterministic_algorithms:
        settings |= determinism.settings()
    if config.disable_dropout:
        settings |= {"hidden_dropout": 0.0, "attention_dropout": 0.0}
    if config.gradient_checkpointing:
        settings["recompute_granularity"] = megatron.recompute_granularity
        if megatron.recompute_granularity == "full":
            settings["recompute_method"] = megatron.recompute_method
            settings["recompute_num_layers"] = megatron.recompute_num_layers
    if is_moe:
        settings |= {
            "moe_token_dispatcher_type": megatron.moe_token_dispatcher_type,
            "moe_router_dtype": megatron.moe_router_dtype,
            "moe_grouped_gemm": transformer_engine,
            "moe_permute_fusion": transformer_engine,
        }
    return settings
