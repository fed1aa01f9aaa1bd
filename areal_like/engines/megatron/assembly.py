"""A model and what trains it, put together from the engine's parts. The order matters; where it does, it says why."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from areal_like.alloc import ModelAllocation
from areal_like.config import TrainEngineConfig
from areal_like.engines.megatron import cpu, determinism, fp8, precision_aware
from areal_like.engines.megatron.bridges import create_bridge
from areal_like.engines.megatron.bridges.base import Bridge
from areal_like.engines.megatron.gradients import fuse_gradients, fuse_norms, fuses_gradients
from areal_like.engines.megatron.lora import trained_dtype
from areal_like.engines.megatron.moe import MoEOptions
from areal_like.engines.megatron.optimizer import (
    create_optimizer,
    create_schedule,
    shards_optimizer,
    wrap_for_data_parallel,
)
from areal_like.engines.megatron.output_head import attach_log_prob_head
from areal_like.engines.megatron.process_groups import ModelGroups
from areal_like.engines.megatron.settings import has_transformer_engine, transformer_settings
from areal_like.engines.megatron.values import attach_value_head
from areal_like.spec import ModelSpec, stage_sizes

__all__ = ["BuiltModel", "Training", "build_model", "build_training", "prepare_process"]


def prepare_process(config: TrainEngineConfig, device: str) -> torch.device:
    """What has to be said before CUDA, NCCL or Megatron do anything; the device of this rank."""
    if config.megatron.use_deterministic_algorithms:
        determinism.prepare_process(device)
    if device == "cpu":
        cpu.install()
        return torch.device("cpu")
    if config.dtype == "float32":
        # float32 was asked for: TensorFloat-32, TransformerEngine's default, keeps 10 bits of the mantissa.
        os.environ["NVIDIA_TF32_OVERRIDE"] = "0"
    own = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(own)
    return own


@dataclass(frozen=True)
class BuiltModel:
    """This rank's part of a model, its weights not yet loaded.

    Attributes:
        modules: the model chunks, one a virtual stage.
        moe: the routers of a mixture of experts.
        transformer_engine: whether its layers are TransformerEngine's.
    """

    spec: ModelSpec
    stages: list[int]
    bridge: Bridge
    modules: list[torch.nn.Module]
    moe: MoEOptions | None
    transformer_engine: bool


def build_model(
    config: TrainEngineConfig,
    allocation: ModelAllocation,
    groups: ModelGroups,
    *,
    device: torch.device,
    dtype: torch.dtype,
) -> BuiltModel:
    """
    Raises:
        CheckpointError: the architecture is not supported by the bridge.
        ValueError, RuntimeError: an option that this process cannot honour.
    """
    spec, megatron = ModelSpec.from_path(config.path), config.megatron
    stages = stage_sizes(spec, allocation, megatron.pipeline_layout)
    transformer_engine = has_transformer_engine(device.type)
    if megatron.fp8_config is not None:
        fp8.require_hardware(megatron.fp8_config, dtype=dtype, transformer_engine=transformer_engine)
    bridge = create_bridge(
        megatron.bridge_type,
        Path(config.path),
        groups,
        dtype=dtype,
        device=device,
        stages=stages,
        settings=transformer_settings(
            config,
            device=device.type,
            stages=stages,
            pp=allocation.pp,
            stage=groups.mesh.coordinates(groups.rank).pp,
            is_moe=spec.is_moe,
            transformer_engine=transformer_engine,
        ),
        use_transformer_engine=transformer_engine,
        attention=megatron.attention_backend,
    )
    modules = bridge.build()
    if device.type == "cpu":
        cpu.install()  # building imports more of Megatron
    if dtype is not torch.float32:
        modules = [module.to(dtype) for module in modules]
    if megatron.use_deterministic_algorithms:
        determinism.verify(modules)
    if megatron.fp8_config is not None:
        fp8.follow_groups(modules, groups)
    if config.is_critic:
        attach_value_head(modules, groups.collection.tp, device)
    else:
        attach_log_prob_head(modules, bridge.vocab_size)
    moe = MoEOptions(modules, groups, megatron) if spec.is_moe else None
    return BuiltModel(spec, stages, bridge, modules, moe, transformer_engine)


@dataclass(frozen=True)
class Training:
    """What a model that is trained has beside it.

    Attributes:
        chunks: its modules in Megatron's data-parallel wrapper, which holds the gradient buffers.
        schedule: of the learning rate.
    """

    chunks: list[Any]
    optimizer: Any
    schedule: Any


def build_training(
    modules: list[torch.nn.Module],
    config: TrainEngineConfig,
    groups: ModelGroups,
    *,
    dtype: torch.dtype,
    total_steps: int | None,
    transformer_engine: bool,
) -> Training:
    """Wrap loaded modules; the optimizer's float32 copies start from their values. Collective.

    Args:
        dtype: of the model; adapters may have another.
        total_steps: optimizer steps of the whole run; None when there is no end.
        transformer_engine: whether the layers are TransformerEngine's.
    """
    assert config.optimizer is not None
    ddp, megatron = config.megatron.ddp, config.megatron
    distributed = shards_optimizer(ddp, config.optimizer)
    trained = trained_dtype(config, dtype)
    precision = precision_aware.settings(
        config, dtype=trained, distributed=distributed, transformer_engine=transformer_engine
    )
    if fuses_gradients(config, transformer_engine=transformer_engine):
        fuse_gradients(modules)
    if transformer_engine:
        fuse_norms()
    chunks = wrap_for_data_parallel(modules, ddp, groups, distributed=distributed, fp8=megatron.fp8_config)
    for chunk in chunks:
        fp8.broadcast_parameters(chunk)
    optimizer = create_optimizer(
        chunks,
        config.optimizer,
        groups,
        dtype=trained,
        distributed=distributed,
        fp8=megatron.fp8_config,
        precision=precision,
    )
    schedule = create_schedule(optimizer, config.optimizer, total_steps)
    options: Any = chunks[0].config
    options.grad_scale_func = optimizer.scale_loss
    if ddp.overlap_grad_reduce:
        waits = [chunk.no_sync for chunk in chunks]
        options.no_sync_func = waits if len(waits) > 1 else waits[0]
    if next(modules[0].parameters()).device.type == "cpu":
        cpu.install()  # the optimizer imports more of Megatron
    return Training(chunks, optimizer, schedule)
