"""FP8 by TransformerEngine: which fields switch it on, and what happens to weights that are themselves FP8.

Weights stay bfloat16 unless `param` is set; products then quantise them on the way. With `param` the model holds FP8
weights alone, and three things need care:

- loading: the bridges write into bfloat16 stand-ins (`whole_weights`), which are quantised once at the end;
- the optimizer's float32 copies start from what was loaded. TransformerEngine keeps the high-precision values with
  which a weight was *initialised*, for exactly this purpose, and a load does not change them: without care training
  would go on from random weights (or, if they are not kept, from weights rounded to FP8);
- export: what leaves is dequantised, the values that the model computes with.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from areal_like.config import FP8Config
from areal_like.engines.megatron.process_groups import ModelGroups

__all__ = [
    "broadcast_parameters",
    "follow_groups",
    "forget_loaded_weights",
    "is_fp8",
    "readable",
    "require_hardware",
    "set_main_weights",
    "settings",
    "whole_weights",
]

_LAYOUT = ("tensor_model_parallel", "partition_dim", "partition_stride", "allreduce", "sequence_parallel")
"""Attributes by which Megatron and the bridges know how a weight is cut."""
_LARGEST_E4M3 = 448.0


def settings(config: FP8Config | None) -> dict[str, Any]:
    """Fields of Megatron's `TransformerConfig`."""
    if config is None:
        return {}
    return {
        "fp8": config.mode,
        "fp8_recipe": config.recipe,
        "fp8_param": config.param,
        "fp8_margin": config.margin,
        "fp8_amax_history_len": config.amax_history_len,
        "fp8_amax_compute_algo": config.amax_compute_algo,
        "fp8_wgrad": config.wgrad,
        "tp_only_amax_red": config.tp_only_amax_red,
        "first_last_layers_bf16": config.first_last_layers_bf16,
        "num_layers_at_start_in_bf16": config.num_layers_at_start_in_bf16,
        "num_layers_at_end_in_bf16": config.num_layers_at_end_in_bf16,
    }


def require_hardware(config: FP8Config, *, dtype: torch.dtype, transformer_engine: bool) -> None:
    """
    Raises:
        RuntimeError: this process cannot compute with the recipe.
        ValueError: the model's own type is not bfloat16.
    """
    if not transformer_engine:
        raise RuntimeError("fp8_config: FP8 needs a GPU and TransformerEngine; leave it out, or install them")
    if dtype is not torch.bfloat16:
        raise ValueError(f"fp8_config: what is not FP8 is bfloat16; dtype is {str(dtype).removeprefix('torch.')}")
    import transformer_engine.pytorch as te

    available = {
        "blockwise": te.is_fp8_block_scaling_available,
        "mxfp8": te.is_mxfp8_available,
    }.get(config.recipe, te.is_fp8_available)
    can, reason = available(return_reason=True)
    if not can:
        raise RuntimeError(f"fp8_config.recipe {config.recipe}: {torch.cuda.get_device_name()} cannot do it: {reason}")


class _AmaxGroups:
    """What `megatron.core.fp8_utils` sees as Megatron's group globals: the groups of the model that runs now.

    It asks them which ranks share the largest values of recipe delayed. With the globals unset TransformerEngine would
    take the whole world, in which pipeline stages differ in number of layers, and hang.
    """

    def __init__(self) -> None:
        self.groups: ModelGroups | None = None

    def model_parallel_is_initialized(self) -> bool:
        return self.groups is not None

    def get_amax_reduction_group(self, with_context_parallel: bool, tp_only_amax_red: bool) -> Any:
        assert self.groups is not None
        collection = self.groups.collection
        return collection.tp_cp if tp_only_amax_red else collection.tp_dp_cp


_AMAX_GROUPS = _AmaxGroups()


def follow_groups(modules: Iterable[torch.nn.Module], groups: ModelGroups) -> None:
    """Largest values of these modules are shared inside `groups`, whichever other models the process holds."""
    from megatron.core import fp8_utils

    fp8_utils.parallel_state = _AMAX_GROUPS

    def enter(module: torch.nn.Module, arguments: Any) -> None:
        _AMAX_GROUPS.groups = groups

    for module in modules:
        module.register_forward_pre_hook(enter)


def readable(parameter: Tensor) -> Tensor:
    """The parameter's values as an ordinary tensor; a copy in bfloat16 when it is FP8."""
    from megatron.core.fp8_utils import dequantize_fp8_tensor

    return dequantize_fp8_tensor(parameter.detach()) if is_fp8(parameter) else parameter.detach()


@contextmanager
def whole_weights(modules: Iterable[torch.nn.Module]) -> Iterator[list[tuple[torch.nn.Parameter, Tensor]]]:
    """Inside, every FP8 weight is an ordinary bfloat16 parameter; at the end the FP8 weights take over its values.

    Yields:
        A list that is filled at the end: each FP8 weight, and on the CPU the values that were written to it.
    """
    written: list[tuple[torch.nn.Parameter, Tensor]] = []
    places = [
        (module, name, weight)
        for chunk in modules
        for module in chunk.modules()
        for name, weight in module._parameters.items()
        if weight is not None and is_fp8(weight)
    ]
    for module, name, weight in places:
        stand_in = torch.nn.Parameter(readable(weight), requires_grad=weight.requires_grad)
        for attribute in _LAYOUT:
            if hasattr(weight, attribute):
                setattr(stand_in, attribute, getattr(weight, attribute))
        module._parameters[name] = stand_in
    try:
        yield written
    finally:
        with torch.no_grad():
            for module, name, weight in places:
                value = module._parameters[name]
                module._parameters[name] = weight
                assert value is not None
                _quantise(weight, value.detach())
                written.append((weight, value.detach().cpu()))
                if hasattr(weight, "get_high_precision_init_val"):
                    weight._high_precision_init_val = written[-1][1]  # type: ignore[attr-defined]


def _quantise(weight: Any, value: Tensor) -> None:
    quantizer = weight._quantizer
    if type(quantizer).__name__ == "Float8Quantizer":
        # Recipe delayed scales by what was seen before, and nothing was: with its first scale of 1 most weights would
        # fall among the coarsest FP8 numbers.
        largest = value.abs().max().float().clamp_min(torch.finfo(torch.float32).tiny)
        quantizer.amax.copy_(largest.view_as(quantizer.amax))
        quantizer.scale.copy_((_LARGEST_E4M3 / largest).view_as(quantizer.scale))
    weight.copy_(value)


def set_main_weights(optimizer: Any, written: list[tuple[torch.nn.Parameter, Tensor]]) -> None:
    """Give the optimizer's float32 shards the values that were loaded (they were copied from the rounded weights)."""
    values = {id(weight): value for weight, value in written}
    if not values:
        return
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        groups = zip(part.model_float16_groups, part.shard_fp32_from_float16_groups, strict=True)
        for weights, shards in groups:
            for weight, shard in zip(weights, shards, strict=True):
                if id(weight) in values:
                    own = part._get_model_param_range_map(weight)["param"]
                    shard.data.copy_(values[id(weight)].view(-1)[own.start : own.end])


def forget_loaded_weights(modules: Iterable[torch.nn.Module]) -> None:
    """Free the copies in host memory from which an optimizer would have started."""
    for chunk in modules:
        for weight in chunk.parameters():
            if hasattr(weight, "clear_high_precision_init_val"):
                weight.clear_high_precision_init_val()


def broadcast_parameters(chunk: Any) -> None:
    """What `broadcast_params` of Megatron's data-parallel wrapper does, except for FP8 weights: NCCL cannot send them,
    and every rank quantised the same values."""
    weights = [p for p in chunk.module.parameters() if is_fp8(p)]
    if not weights:
        chunk.broadcast_params()
        return
    for parameter in chunk.module.parameters():
        if not is_fp8(parameter):
            group = chunk.dp_cp_group if getattr(parameter, "allreduce", True) else chunk.expt_dp_group
            torch.distributed.broadcast(parameter.data, torch.distributed.get_global_rank(group, 0), group=group)


def is_fp8(parameter: Tensor) -> bool:
    from megatron.core.fp8_utils import is_float8tensor

    return bool(is_float8tensor(parameter))
