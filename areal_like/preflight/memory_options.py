"""What memory depends on in the section of one model."""

from __future__ import annotations

from typing import Any

from areal_like.config import TrainEngineConfig
from areal_like.spec.memory import LoRA

__all__ = ["memory_options"]


def memory_options(section: TrainEngineConfig, *, trained: bool) -> dict[str, Any]:
    """Fields of a `MemoryJob` that the section decides alone: all but the sizes of a batch and the other models.

    Args:
        trained: the model has gradients and an optimizer.
    """
    options, optimizer = section.megatron, section.optimizer
    lora = None
    if section.use_lora and trained:
        lora = LoRA(section.lora_rank, section.target_modules, section.lora_dtype or section.dtype)
    return {
        "dtype": section.dtype,
        "recompute": (options.recompute_granularity or "none") if section.gradient_checkpointing else "none",
        "recompute_method": options.recompute_method or "uniform",
        "recompute_layers": options.recompute_num_layers or 1,
        "recompute_modules": options.recompute_modules or ("core_attn",),
        "lora": lora,
        "fp8": None if options.fp8_config is None else options.fp8_config.recipe,
        "fp8_param": options.fp8_config is not None and options.fp8_config.param,
        "optimizer": optimizer.type if trained and optimizer is not None else None,
        "distributed_optimizer": options.ddp.use_distributed_optimizer,
        "precision_aware": options.use_precision_aware_optimizer,
        "exp_avg": options.exp_avg_dtype,
        "exp_avg_sq": options.exp_avg_sq_dtype,
        "gradient_accumulation_fusion": options.gradient_accumulation_fusion is not False,
        "grad_reduce_in_fp32": options.ddp.grad_reduce_in_fp32,
        "attention_backend": options.attention_backend,
        "deterministic": options.use_deterministic_algorithms,
        "pipeline_layout": options.pipeline_layout,
    }
