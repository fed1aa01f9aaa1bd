"""Mixture of experts: what the options mean for Megatron-Core, and one step's losses, counts and figures."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_layer import MoELayer
from torch import Tensor

from areal_like.config import MegatronConfig
from areal_like.engines.megatron.experts import has_grouped_products
from areal_like.engines.megatron.local_dispatcher import LocalDispatcher
from areal_like.engines.megatron.micro_batches import MicroBatches
from areal_like.engines.megatron.process_groups import ModelGroups
from areal_like.engines.megatron.router import PackedRouter

__all__ = ["MoEOptions", "moe_settings"]


def moe_settings(
    megatron: MegatronConfig, *, device: torch.device, dtype: torch.dtype, transformer_engine: bool
) -> dict[str, Any]:
    """Fields of `TransformerConfig`. All that balance experts are set, because bridges have defaults of their own.

    Raises:
        ValueError: a kernel was asked for whose package is not installed here, or a loss that would be another one.
    """
    grouped = has_grouped_products(device, dtype) or transformer_engine
    _refuse(megatron, grouped=grouped, transformer_engine=transformer_engine)
    dispatcher = megatron.moe_token_dispatcher_type
    settings: dict[str, Any] = {
        "moe_token_dispatcher_type": dispatcher,
        "moe_flex_dispatcher_backend": "deepep",
        "moe_grouped_gemm": _on_gpus(megatron.moe_grouped_gemm, transformer_engine),
        "moe_permute_fusion": _on_gpus(megatron.moe_permute_fusion, transformer_engine),
        "moe_router_fusion": megatron.moe_router_fusion,
        "moe_shared_expert_overlap": megatron.moe_shared_expert_overlap,
        "moe_router_dtype": megatron.moe_router_dtype,
        "moe_router_load_balancing_type": megatron.moe_router_load_balancing_type,
        "moe_aux_loss_coeff": megatron.moe_aux_loss_coeff,
        "moe_z_loss_coeff": megatron.moe_z_loss_coeff,
        "moe_router_bias_update_rate": megatron.moe_router_bias_update_rate,
    }
    if dispatcher == "allgather":
        # Megatron-Core refuses it when it is told that lengths vary. They do, from one micro-batch to the next; between
        # the ranks that gather from each other they are equal (see `micro_batches`). `MoEOptions` says so afterwards.
        settings["variable_seq_lengths"] = False
    return settings


def _on_gpus(asked: bool | None, transformer_engine: bool) -> bool:
    return transformer_engine if asked is None else asked


def _refuse(megatron: MegatronConfig, *, grouped: bool, transformer_engine: bool) -> None:
    if megatron.moe_grouped_gemm and not grouped:
        raise ValueError(
            "megatron.moe_grouped_gemm: true needs TransformerEngine, or a Hopper or Blackwell GPU and dtype bfloat16;"
            " set it to null or false"
        )
    for name in ("moe_permute_fusion", "moe_router_fusion"):
        if getattr(megatron, name) and not transformer_engine:
            raise ValueError(f"megatron.{name}: true needs TransformerEngine and a GPU; set it to null or false")
    kind = megatron.moe_router_load_balancing_type
    if kind in ("seq_aux_loss", "sinkhorn"):
        raise ValueError(f"megatron.moe_router_load_balancing_type: {kind} is not supported (areal-like rule AL232)")
    if megatron.moe_router_fusion and megatron.moe_router_bias_update_rate > 0:
        raise ValueError("megatron.moe_router_fusion: the fused router does not know the expert bias; set it to false")
    if megatron.moe_token_dispatcher_type == "flex" and importlib.util.find_spec("deep_ep") is None:
        raise ValueError(
            "megatron.moe_token_dispatcher_type: flex needs the package deep_ep (DeepEP); install it or use alltoall"
        )


class MoEOptions:
    """The routers of one model on this rank.

    The gradient of a step is that of the loss plus, for each layer, factor * auxiliary loss, averaged over the
    micro-batches of the global batch that hold any token.
    """

    def __init__(self, chunks: Sequence[torch.nn.Module], groups: ModelGroups, megatron: MegatronConfig) -> None:
        """
        Args:
            chunks: as built, in the type that they are trained in, not yet wrapped for data parallelism.
        """
        self.groups = groups
        self.needs_same_length = megatron.moe_token_dispatcher_type == "allgather"
        self.device = next(chunks[0].parameters()).device
        self.micro_batches = 1
        bias = megatron.moe_router_bias_update_rate > 0
        layers: list[Any] = [m for chunk in chunks for m in chunk.modules() if isinstance(m, MoELayer)]
        self.routers = [PackedRouter.become(layer.router, bias=bias) for layer in layers]
        for layer in layers:
            LocalDispatcher.become(layer.token_dispatcher)
        self.configs: list[Any] = []
        first: Any = chunks[0].config
        if megatron.moe_shared_expert_overlap and first.moe_shared_expert_intermediate_size is None:
            raise ValueError("megatron.moe_shared_expert_overlap: the model has no shared experts")
        for chunk in chunks:
            config: Any = chunk.config
            config.variable_seq_lengths = True
            # Not a setting: Megatron-Core refuses it for softmax scores, whose bias `PackedRouter` supplies.
            config.moe_router_enable_expert_bias = bias
            config.moe_grad_scale_func = self._scale
            self.configs.append(config)
            decoder: Any = chunk.decoder
            decoder.register_forward_pre_hook(self._pass_padding_mask, with_kwargs=True)

    def start_step(self, micro_batches: MicroBatches) -> None:
        """Before the passes of an optimizer step. Collective over the data-parallel ranks."""
        for router in self.routers:
            router.start_step()
        count = torch.tensor([micro_batches.occupied], device=micro_batches.device)
        dist.all_reduce(count, group=self.groups.collection.dp)
        self.micro_batches = max(1, int(count))

    def figures(self) -> dict[str, float]:
        """After the passes: losses without their factors, means over layers and micro-batches; the same on every rank.

        `moe/busiest_expert`: tokens of the expert that got most, over the mean; a mean over layers. 1 is balance.
        """
        names = self._loss_names()
        sums = torch.zeros(len(names) + 2, dtype=torch.float64, device=self.device)  # losses, busiest, layers
        if self.routers:
            zero = sums[0]
            rows = [torch.stack([*(r.sums.get(n, zero) for n in names), *r.counts]) for r in self.routers]
            layers = torch.stack(rows)  # [layers of this rank, losses + experts]
            dist.all_reduce(layers, group=self.groups.collection.tp_dp_cp)
            counts = layers[:, len(names) :]
            sums[: len(names)] = layers[:, : len(names)].sum(dim=0) / self.micro_batches
            sums[-2] = (counts.max(dim=1).values / counts.mean(dim=1)).sum()
            sums[-1] = len(self.routers)
        dist.all_reduce(sums, group=self.groups.collection.pp)
        means = (sums[:-1] / sums[-1]).tolist()
        return {f"moe/{name}": mean for name, mean in zip([*names, "busiest_expert"], means, strict=True)}

    def _loss_names(self) -> list[str]:
        config = self.configs[0]
        balance = {"aux_loss": ["load_balancing_loss"], "global_aux_loss": ["global_load_balancing_loss"]}
        names = balance.get(config.moe_router_load_balancing_type, [])
        return names + (["z_loss"] if config.moe_z_loss_coeff is not None else [])

    def _scale(self) -> Tensor:
        """What an auxiliary loss of one micro-batch is multiplied with before its backward pass."""
        config = self.configs[0]
        ones = torch.ones(1, device=self.device)
        scale: Tensor = ones if config.grad_scale_func is None else config.grad_scale_func(ones)
        return scale / self.micro_batches

    def _pass_padding_mask(self, decoder: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Give the decoder the padding of the micro-batch, as its own part where sequences are split over t.

        Megatron-Core's GPTModel takes such a mask, but splits it on the first stage only, and over a global group.
        """
        mask = getattr(kwargs.get("packed_seq_params"), "padding_mask", None)
        if mask is not None and decoder.training:
            if decoder.config.sequence_parallel:
                group = self.groups.collection.tp
                mask = mask.chunk(group.size(), dim=1)[group.rank()]
            kwargs["padding_mask"] = mask
        return args, kwargs
