"""An optimizer that keeps less: float32 copies of parameters as remainders, and moments in bfloat16.

The ordinary distributed optimizer keeps a float32 copy of each bfloat16 parameter. With
`use_precision_aware_optimizer` TransformerEngine's FusedAdam keeps 16 bits of it instead, in an int16 tensor
`master_param`, and makes it from them and the parameter before each update (`AdamFunctorMasterParamRemainder` of
`adam.cu`, TransformerEngine 2.11). Read as 32-bit integers,

    copy = (parameter << 16) + remainder,    -32768 <= remainder <= 32767

which is the float32 number that the parameter is the rounding of; a tie is rounded away from zero where bfloat16's own
rounding takes the even neighbour. So updates are those of the ordinary optimizer.

Two things follow that Megatron-Core 0.19.2 does not do. After weights were loaded the remainders belong to other
parameters: `reload_model_params` leaves them, so `forget_main_copies` sets them to 0. And what goes into checkpoints
are the copies themselves, so that either optimizer reads the checkpoints of the other.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from areal_like.config import TrainEngineConfig

__all__ = ["MAIN_COPY", "forget_main_copies", "keeps_remainders", "main_copy", "remainder", "settings"]

MAIN_COPY = "master_param"
"""Name of the remainders in FusedAdam's state."""
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_FURTHEST = 2**15
"""From a parameter to the copy that it rounds, in units of the copy's last bit; a tie may be this far above."""


def settings(
    config: TrainEngineConfig, *, dtype: torch.dtype, distributed: bool, transformer_engine: bool
) -> dict[str, Any]:
    """Fields of Megatron's `OptimizerConfig`.

    Args:
        dtype: of the parameters that are trained.
        distributed: the optimizer is sharded over data-parallel ranks.

    Raises:
        ValueError: the keys ask for what this optimizer cannot do (the check says so first, AL572 and AL573).
    """
    options, fp8 = config.megatron, config.megatron.fp8_config
    if not options.use_precision_aware_optimizer:
        if reduced := reduced_types(options):
            raise ValueError(f"megatron.{reduced[0]} needs use_precision_aware_optimizer: true")
        return {}
    assert config.optimizer is not None
    needs = {
        "TransformerEngine and a GPU": transformer_engine,
        "optimizer.type: adam": config.optimizer.type == "adam",
        "ddp.use_distributed_optimizer: true": distributed,
        "parameters in bfloat16": dtype is torch.bfloat16,
        "fp8_config.param: false": fp8 is None or not fp8.param,
    }
    if missing := [need for need, there in needs.items() if not there]:
        raise ValueError(f"megatron.use_precision_aware_optimizer needs {' and '.join(missing)}")
    kept = "float32" if options.ddp.grad_reduce_in_fp32 else "bfloat16"
    if options.main_grads_dtype not in (None, kept):
        raise ValueError(
            f"megatron.main_grads_dtype is {options.main_grads_dtype}, but the gradient buffer is {kept}:"
            " ddp.grad_reduce_in_fp32 says it"
        )
    return {
        "use_precision_aware_optimizer": True,
        "store_param_remainders": True,
        "main_grads_dtype": _DTYPES[kept],
        "main_params_dtype": _DTYPES[options.main_params_dtype],
        "exp_avg_dtype": _DTYPES[options.exp_avg_dtype],
        "exp_avg_sq_dtype": _DTYPES[options.exp_avg_sq_dtype],
    }


def reduced_types(options: Any) -> list[str]:
    """Keys of `MegatronConfig` that ask for a type other than float32."""
    names = ("main_grads_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
    return [name for name in names if getattr(options, name) not in (None, "float32")]


def keeps_remainders(inner: Any, shard: Tensor) -> bool:
    """Whether the torch optimizer inside Megatron's keeps remainders of this shard."""
    return bool(getattr(inner, "store_param_remainders", False)) and shard.dtype is torch.bfloat16


def main_copy(shard: Tensor, remainders: Tensor) -> Tensor:
    """The float32 copies of a bfloat16 shard.

    Args:
        remainders: int16, of the same shape.
    """
    bits = (shard.detach().view(torch.int16).to(torch.int32) << 16) + remainders.to(torch.int32)
    return bits.view(torch.float32)


def remainder(shard: Tensor, copy: Tensor) -> Tensor:
    """The int16 remainders that stand for the float32 copies of a bfloat16 shard.

    A tie that was rounded down (by bfloat16's own rounding) has no remainder: it is off by the last bit of the copy.

    Raises:
        ValueError: the copies do not round to the shard.
    """
    parameter = shard.detach().view(torch.int16).to(torch.int32) << 16
    difference = copy.contiguous().view(torch.int32) - parameter
    if bool(((difference < -_FURTHEST) | (difference > _FURTHEST)).any()):
        raise ValueError("the float32 copies in the optimizer are not those of the parameters")
    return difference.clamp(-_FURTHEST, _FURTHEST - 1).to(torch.int16)


@torch.no_grad()
def forget_main_copies(optimizer: Any) -> None:
    """Let the float32 copies be the parameters as they are now: their remainders are 0."""
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        inner = part.optimizer
        for shard, state in [] if inner is None else inner.state.items():
            if keeps_remainders(inner, shard) and MAIN_COPY in state:
                state[MAIN_COPY].zero_()
