"""Megatron-Core's optimizer and learning-rate schedule from the configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from areal_like.config import DDPConfig, FP8Config, OptimizerConfig
from areal_like.engines.megatron.loss_scale import share_loss_scale
from areal_like.engines.megatron.process_groups import ModelGroups

__all__ = ["create_optimizer", "create_schedule", "loss_scale_figure", "shards_optimizer", "wrap_for_data_parallel"]

NEVER = 2**40
"""Steps of a schedule without an end."""


def shards_optimizer(ddp: DDPConfig, optimizer: OptimizerConfig) -> bool:
    """Whether optimizer state is sharded over data-parallel ranks.

    SGD without momentum has no state to shard, and Megatron-Core's distributed optimizer refuses it.
    """
    return ddp.use_distributed_optimizer and optimizer.type != "sgd"


def wrap_for_data_parallel(
    chunks: list[torch.nn.Module],
    ddp: DDPConfig,
    groups: ModelGroups,
    *,
    distributed: bool,
    fp8: FP8Config | None = None,
) -> list[DistributedDataParallel]:
    """Gradient buffers and their reduction over data-parallel (and expert-data-parallel) ranks."""
    config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=ddp.grad_reduce_in_fp32,
        overlap_grad_reduce=ddp.overlap_grad_reduce,
        # Where nothing is sharded every rank updates all parameters: there is nothing to gather.
        overlap_param_gather=ddp.overlap_param_gather and distributed,
        use_distributed_optimizer=distributed,
        check_for_nan_in_grad=ddp.check_for_nan_in_grad,
        fp8_param_gather=fp8 is not None and fp8.param,
        # Without overlap one bucket is best: there is nothing for smaller ones to hide behind.
        bucket_size=ddp.bucket_size if ddp.overlap_grad_reduce else None,
    )
    return [
        DistributedDataParallel(
            config=chunk.config,
            ddp_config=config,
            module=chunk,
            disable_bucketing=index > 0,
            pg_collection=groups.collection,
        )
        for index, chunk in enumerate(chunks)
    ]


def create_optimizer(
    chunks: list[DistributedDataParallel],
    optimizer: OptimizerConfig,
    groups: ModelGroups,
    *,
    dtype: torch.dtype,
    distributed: bool,
    fp8: FP8Config | None = None,
    precision: Mapping[str, Any] | None = None,
) -> Any:
    """AdamW or SGD over this rank's parameters; biases and norms are not decayed (Megatron-Core's rule).

    Args:
        precision: see `precision_aware.settings`.
    """
    config = MegatronOptimizerConfig(
        optimizer=optimizer.type,
        lr=optimizer.lr,
        min_lr=optimizer.lr * optimizer.min_lr_ratio,
        weight_decay=optimizer.weight_decay,
        adam_beta1=optimizer.beta1,
        adam_beta2=optimizer.beta2,
        adam_eps=optimizer.eps,
        sgd_momentum=0.0,
        clip_grad=optimizer.gradient_clipping,
        bf16=dtype is torch.bfloat16,
        fp16=dtype is torch.float16,
        initial_loss_scale=optimizer.initial_loss_scale,
        min_loss_scale=optimizer.min_loss_scale,
        loss_scale_window=optimizer.loss_scale_window,
        hysteresis=optimizer.hysteresis,
        params_dtype=dtype,
        use_distributed_optimizer=distributed,
        # What it decides concerns parameters in FP8; without them it would keep remainders from being used.
        fp8_recipe=fp8.recipe if fp8 is not None and fp8.param else None,
        **(precision or {}),
    )
    made = get_megatron_optimizer(config, chunks, use_gloo_process_groups=False, pg_collection=groups.collection)
    _fuse_on_cpu(made)
    if dtype is torch.float16:
        share_loss_scale(made)
    return made


def _fuse_on_cpu(made: Any) -> None:
    """torch's fused Adam where Megatron made torch's own for parameters on the CPU: one pass over the memory, not ten.

    Megatron offers no way to ask for it. torch reads the option from the parameter groups at every step.
    """
    for part in getattr(made, "chained_optimizers", [made]):
        if isinstance(part.optimizer, torch.optim.Adam | torch.optim.AdamW):
            for group in part.optimizer.param_groups:
                group["fused"] = all(parameter.device.type == "cpu" for parameter in group["params"])


def loss_scale_figure(optimizer: Any, dtype: torch.dtype) -> dict[str, float]:
    """`loss_scale`, the factor of the loss in the passes that were just made; nothing but float16 has one."""
    return {"loss_scale": float(optimizer.get_loss_scale())} if dtype is torch.float16 else {}


def create_schedule(optimizer: Any, config: OptimizerConfig, total_steps: int | None) -> OptimizerParamScheduler:
    """Linear warm-up from 0, then constant, linear or cosine down to `min_lr_ratio * lr` at `total_steps`.

    Raises:
        ValueError: a decay was asked for and the number of steps is not known.
    """
    if total_steps is None and config.lr_scheduler_type != "constant":
        raise ValueError(
            f"optimizer.lr_scheduler_type {config.lr_scheduler_type!r} needs the number of steps; "
            "set total_train_steps or use constant"
        )
    steps = total_steps or NEVER
    warmup = int(steps * config.warmup_steps_proportion) if total_steps else 0
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=config.lr,
        min_lr=config.lr * config.min_lr_ratio,
        lr_warmup_steps=min(warmup, steps - 1),
        lr_decay_steps=steps,
        lr_decay_style=config.lr_scheduler_type,
        start_wd=config.weight_decay,
        end_wd=config.weight_decay,
        wd_incr_steps=steps,
        wd_incr_style="constant",
    )
