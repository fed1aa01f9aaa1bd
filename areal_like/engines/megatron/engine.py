"""`MegatronEngine`: the order of things. It holds the parts and does no work itself."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from areal_like.alloc import ModelAllocation
from areal_like.config import TrainEngineConfig
from areal_like.data.batch import PackedBatch
from areal_like.engines.base import Loss, TokenOutputs, WeightBucket
from areal_like.engines.megatron import fp8
from areal_like.engines.megatron.assembly import build_model, build_training, prepare_process
from areal_like.engines.megatron.checkpoint import Checkpointer
from areal_like.engines.megatron.communicators import warm_up
from areal_like.engines.megatron.lora import attach_adapters
from areal_like.engines.megatron.lora_export import merged_values, save_adapter_folder, stream_adapters
from areal_like.engines.megatron.lora_layer import Adapter
from areal_like.engines.megatron.micro_batches import MicroBatches, Padding, make_micro_batches
from areal_like.engines.megatron.offload import PARTS, Offloader
from areal_like.engines.megatron.optimizer import loss_scale_figure
from areal_like.engines.megatron.passes import ModelPasses
from areal_like.engines.megatron.precision_aware import forget_main_copies
from areal_like.engines.megatron.process_groups import create_process_groups
from areal_like.engines.megatron.profile import StepProfiler, create_profiler, named, traced, traced_stream
from areal_like.engines.megatron.random_states import RandomStates
from areal_like.engines.megatron.settings import DTYPES
from areal_like.engines.megatron.values import load_value_head, value_model_config
from areal_like.engines.megatron.weights import WeightStream, save_hugging_face_folder
from areal_like.engines.megatron.world import join_world, leave_world
from areal_like.spec import fp8_alignment, padding_multiples

__all__ = ["MegatronEngine"]


class MegatronEngine:
    """One rank of a Megatron-Core model. See `engines.base.TrainEngine` for what each call means."""

    def __init__(
        self,
        *,
        allocation: ModelAllocation,
        config: TrainEngineConfig,
        device: str,
        seed: int,
        total_steps: int | None = None,
    ) -> None:
        """
        Args:
            allocation: sizes of every parallel dimension.
            config: the role's section; `config.path` is a local Hugging Face folder by now.
            device: "cpu" (gloo) or "cuda" (NCCL).
            seed: of dropout and of random initialisation.
            total_steps: optimizer steps of the whole run, for the learning-rate schedule; None when there is no end.
        """
        self.allocation, self.config, self.seed, self.total_steps = allocation, config, seed, total_steps
        self.path = Path(config.path)
        self.dtype = DTYPES[config.dtype]
        self.fp8 = config.megatron.fp8_config
        self.device_type = device
        self.device = torch.device("cpu")
        self.offloader = Offloader()
        self.profiler: StepProfiler | None = None
        self._in_world = False
        # Of a model that is trained:
        self.chunks: list[Any] = []
        self.optimizer: Any = None
        self.adapters: list[Adapter] = []

    def initialize(self) -> None:
        self.device = prepare_process(self.config, self.device_type)
        join_world(self.device_type)
        self._in_world = True
        self.groups = create_process_groups(self.allocation.mesh())
        seconds = warm_up(self.groups, self.device)
        print(f"communicators of {self.allocation}: each used once, {seconds:.2f} s", flush=True)
        self.profiler = create_profiler(
            self.config.profiler, rank=self.groups.rank, mesh=self.groups.mesh, device=self.device_type
        )
        self.random = RandomStates(self.device)
        with self.random:
            self.random.seed(self.seed, self.groups)
            self._build()
            self._prepare_training()
        self.passes.warm_up(self.device)
        self.offloader.watch(self.modules, self.chunks, self.optimizer, self.device)
        self.weight_stream = WeightStream(
            self.bridge,
            self.modules,
            self.groups,
            device=self.device,
            has_adapters=bool(self.adapters),
            value=merged_values(self.adapters),
            ready=lambda: self.offloader.require("weights", "parameters"),
        )
        if self.profiler is not None:
            self.profiler.watch(self.passes.config, self.optimizer)

    def _build(self) -> None:
        model = build_model(self.config, self.allocation, self.groups, device=self.device, dtype=self.dtype)
        self.spec, self.stages, self.bridge = model.spec, model.stages, model.bridge
        self.modules, self.moe, self.transformer_engine = model.modules, model.moe, model.transformer_engine
        if self.config.enable_tree_training and (model.transformer_engine or model.moe or self.allocation.cp > 1):
            raise ValueError(
                "enable_tree_training needs a dense model with the local layers (device: cpu), no context parallelism"
            )
        if not self.config.init_from_scratch:
            self.load(self.path)
        if self.config.use_lora:
            self.adapters = attach_adapters(
                self.modules, self.config, self.spec, self.groups, device=self.device, dtype=self.dtype, seed=self.seed
            )

    def _prepare_training(self) -> None:
        if self.config.optimizer is None:
            fp8.forget_loaded_weights(self.modules)
            self.passes = self._passes(self.modules)
            return
        training = build_training(
            self.modules,
            self.config,
            self.groups,
            dtype=self.dtype,
            total_steps=self.total_steps,
            transformer_engine=self.transformer_engine,
        )
        self.chunks, self.optimizer, self.schedule = training.chunks, training.optimizer, training.schedule
        self.passes = self._passes(self.chunks)
        self.checkpointer = Checkpointer(
            self.modules,
            self.optimizer,
            self.schedule,
            self.groups,
            self.random,
            self.config,
            layout=str(self.allocation),
            seed=self.seed,
        )

    def _passes(self, chunks: Sequence[torch.nn.Module]) -> ModelPasses:
        return ModelPasses(chunks, self.groups, vocab_size=self.bridge.vocab_size, is_value_model=self.config.is_critic)

    @traced
    def train_batch(self, batch: PackedBatch, loss: Loss) -> dict[str, float]:
        if self.optimizer is None:
            raise RuntimeError("this model has no optimizer: its section of the configuration has `optimizer: null`")
        self.offloader.require("train_batch", *PARTS)
        for chunk in self.chunks:
            chunk.train()
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        micro_batches = self._micro_batches(batch)
        if self.moe is not None:
            self.moe.start_step(micro_batches)
        with self.random:
            results = self.passes.gradients(micro_batches, loss, batch=batch)
        learning_rate = self.optimizer.param_groups[0]["lr"]
        scale = loss_scale_figure(self.optimizer, self.dtype)
        with named(self.profiler, "optimizer step"):
            updated, grad_norm, _ = self.optimizer.step()
        if updated:  # as in Megatron-LM: a step that was skipped is no step of the schedule
            self.schedule.step(1)
        # From here on values are read: until now the host was free to run ahead of the GPU.
        return {
            **self.passes.figures(results),
            **({} if self.moe is None else self.moe.figures()),
            **scale,
            "grad_norm": math.inf if grad_norm is None else float(grad_norm),
            "learning_rate": float(learning_rate),
            "micro_batches": float(len(micro_batches)),
            "updated": float(updated),
        }

    @traced
    def forward(self, batch: PackedBatch, *, temperature: float = 1.0, entropy: bool = False) -> TokenOutputs:
        self.offloader.require("forward", "parameters")
        for module in self.modules:
            module.eval()
        micro_batches = self._micro_batches(batch)
        with self.random:
            return self.passes.outputs(micro_batches, batch=batch, temperature=temperature, entropy=entropy)

    def logits(self, batch: PackedBatch) -> torch.Tensor:
        """float32 `[tokens, vocabulary]` on every rank, for comparing small models with another implementation."""
        self.offloader.require("logits", "parameters")
        for module in self.modules:
            module.eval()
        with self.random:
            return self.passes.logits(self._micro_batches(batch), batch=batch)

    def next_logits(self, batch: PackedBatch) -> torch.Tensor:
        """float32 `[sequences, vocabulary]` on every rank, of the token that would follow each sequence."""
        self.offloader.require("next_logits", "parameters")
        for module in self.modules:
            module.eval()
        with self.random:
            return self.passes.next_logits(self._micro_batches(batch), batch=batch)

    @traced_stream
    def weights(self, *, on_device: bool = False) -> Iterator[WeightBucket]:
        self.offloader.require("weights", "parameters")
        self._gather_parameters()
        return self.weight_stream.buckets(on_device=on_device)

    @traced_stream
    def adapter_weights(self) -> Iterator[WeightBucket]:
        self.offloader.require("adapter_weights", "parameters")
        self._gather_parameters()
        return stream_adapters(self.adapters, self.config, self.spec, self.groups)

    def load(self, path: str | Path) -> None:
        self.offloader.require("load", "parameters", "optimizer")
        self._gather_parameters()  # or a gather of the old weights would follow
        with fp8.whole_weights(self.modules) as written:
            self.bridge.load(self.modules, Path(path))
        load_value_head(self.modules, Path(path))
        if self.optimizer is not None:
            self.optimizer.reload_model_params()
            forget_main_copies(self.optimizer)
            fp8.set_main_weights(self.optimizer, written)

    @traced
    def save(self, path: str | Path) -> None:
        self.offloader.require("save", "parameters")
        config = value_model_config if self.config.is_critic else None
        save_hugging_face_folder(self.weights(), self.path, Path(path), config=config)

    def save_adapter(self, path: str | Path) -> None:
        self.offloader.require("save_adapter", "parameters")
        save_adapter_folder(self.adapter_weights(), self.config, self.spec, Path(path))

    @traced
    def offload(self, *, parameters: bool = True, gradients: bool = True, optimizer: bool = True) -> dict[str, int]:
        if parameters and "parameters" not in self.offloader.away:
            self._gather_parameters()  # no gather may write into memory that is gone
        return self.offloader.offload(parameters=parameters, gradients=gradients, optimizer=optimizer)

    @traced
    def onload(self, *, parameters: bool = True, gradients: bool = True, optimizer: bool = True) -> None:
        self.offloader.onload(parameters=parameters, gradients=gradients, optimizer=optimizer)

    @traced
    def save_checkpoint(self, folder: str | Path, *, step: int) -> None:
        self.offloader.require("save_checkpoint", "parameters", "optimizer")
        self._gather_parameters()
        self._recovery().save(Path(folder), step)

    def finish_checkpoint(self, *, wait: bool = True) -> bool:
        return self._recovery().finish(wait=wait)

    def load_checkpoint(self, folder: str | Path) -> int:
        self.offloader.require("load_checkpoint", "parameters", "optimizer")
        self._gather_parameters()  # or a gather of the old weights would follow
        return self._recovery().load(Path(folder))

    def close(self) -> None:
        if self.optimizer is not None:
            self._recovery().finish()
        if self.profiler is not None:
            self.profiler.finish()
        self.offloader.close()
        if self._in_world:
            leave_world()
            self._in_world = False

    def _recovery(self) -> Checkpointer:
        if self.optimizer is None:
            raise RuntimeError("this model has no optimizer: there is nothing to recover, it is what its path holds")
        return self.checkpointer

    def _gather_parameters(self) -> None:
        """With overlap_param_gather what other ranks updated arrives in the next forward pass: fetch it now."""
        if self.optimizer is None:
            return
        with torch.no_grad():
            for chunk in self.chunks:
                if chunk.ddp_config.overlap_param_gather:
                    chunk.start_param_sync(force_sync=True)

    def _micro_batches(self, batch: PackedBatch) -> MicroBatches:
        spec = self.config.mb_spec
        block = fp8_alignment(None if self.fp8 is None else self.fp8.recipe)
        return make_micro_batches(
            batch,
            max_tokens=spec.max_tokens_per_mb,
            at_least=spec.n_mbs or 1,
            multiple_of=self.allocation.pp if self.allocation.vpp > 1 else 1,
            same_length=self.moe is not None and self.moe.needs_same_length,
            share_prefixes=self.config.enable_tree_training,
            padding=Padding(*padding_multiples(self.allocation.tp, self.allocation.cp, block)),
            data_parallel_group=self.groups.collection.dp,
            context_parallel_group=self.groups.collection.cp,
            device=self.device,
            local_attention=not self.transformer_engine,
            padding_mask=self.moe is not None,
        )
