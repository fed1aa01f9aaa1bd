"""Weight gradients that a matrix product adds to Megatron's gradient buffer itself.

Otherwise a product writes the gradient of a weight, and the hook of data parallelism reads it and adds it to the buffer
(`main_grad`): a pass over both for every weight and micro-batch. TransformerEngine's linear layers can accumulate into
`main_grad`; they then mark the weight (`grad_added_to_main_grad`) and give autograd a dummy, so that the hook fires.

Megatron-Core ties this to `gradient_accumulation_fusion` when layers are built, and its own linear layers (the output
layer) refuse it without Apex. So models are built without, and this is switched on afterwards, for models that are
trained: others have no `main_grad`. Everything else, embeddings and norms, goes the way it always does. A module of our
own takes part by reading `config.gradient_accumulation_fusion` in its forward pass.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from areal_like.config import TrainEngineConfig

__all__ = ["add_weight_gradient", "fuse_gradients", "fuse_norms", "fuses_gradients"]


def fuses_gradients(config: TrainEngineConfig, *, transformer_engine: bool) -> bool:
    """Whether products accumulate: where TransformerEngine's layers are trained, unless the configuration forbids it.

    Raises:
        ValueError: it is asked for where nothing can do it (the check says so first, AL571).
    """
    asked = config.megatron.gradient_accumulation_fusion
    if asked and not transformer_engine:
        raise ValueError("megatron.gradient_accumulation_fusion: true needs TransformerEngine and a GPU; leave it out")
    if asked and config.use_lora:
        raise ValueError(
            "megatron.gradient_accumulation_fusion: true has nothing to fuse: the model's weights have no gradients"
            " with use_lora; leave it out"
        )
    return transformer_engine and not config.use_lora and asked is not False


def fuse_gradients(modules: Iterable[torch.nn.Module]) -> int:
    """Switch it on in model chunks that are about to be trained.

    Returns:
        Layers that accumulate from now on, those that read the configuration not counted.
    """
    count = 0
    for chunk in modules:
        for module in chunk.modules():
            if hasattr(module, "fuse_wgrad_accumulation"):  # TransformerEngine 2.11: Linear, LayerNormLinear, Grouped
                module.fuse_wgrad_accumulation = True  # type: ignore[assignment]
                count += 1
            config: Any = getattr(module, "config", None)
            if hasattr(config, "gradient_accumulation_fusion"):
                config.gradient_accumulation_fusion = True
    return count


def add_weight_gradient(parameter: Tensor, dy: Tensor, x: Tensor) -> Tensor | None:
    """Add that of one product to `parameter.main_grad`, `[out, in]` += `dy` `[rows, out]`^T `x` `[rows, in]`.

    Returns:
        What autograd gets for it. As `LinearWithGradAccumulationAndAsyncCommunication` of Megatron-Core 0.19.2 has it:
        Megatron's data-parallel hook has to see a gradient, whose values it does not read. A weight that is also the
        embedding's (`zero_out_wgrad`) gets one from there, whose values count: nothing may be added to it.
    """
    main_grad: Tensor = parameter.main_grad  # type: ignore[attr-defined]
    if main_grad.dtype == x.dtype:
        main_grad.addmm_(dy.t(), x)
    elif main_grad.is_cuda:  # float32 += bfloat16 x bfloat16 in one product
        torch.addmm(main_grad, dy.t(), x, out_dtype=main_grad.dtype, out=main_grad)
    else:
        main_grad.add_(dy.t() @ x)
    if not hasattr(parameter, "grad_added_to_main_grad"):
        return None
    parameter.grad_added_to_main_grad = True
    return None if getattr(parameter, "zero_out_wgrad", False) else torch.empty_like(parameter)


def fuse_norms() -> None:
    """The gradient's norm and its clipping in one kernel each, and without waiting for the GPU in between.

    Megatron-Core 0.19.2 looks for one function more than TransformerEngine 2.11 has, and then falls back to two small
    kernels, and a wait for the GPU, a parameter: 2,108 of them for eight layers of Qwen3-30B-A3B.
    """
    from megatron.core.optimizer import clip_grads
    from transformer_engine.pytorch.optimizers import multi_tensor_applier, multi_tensor_l2norm, multi_tensor_scale

    options: Any = clip_grads
    options.multi_tensor_applier = multi_tensor_applier
    options.l2_norm_impl = multi_tensor_l2norm
    options.multi_tensor_scale_impl = multi_tensor_scale
    options.multi_tensor_scale_tensor_impl = _scale_by_tensor


def _scale_by_tensor(chunk_size: int, overflow: Tensor, lists: list[list[Tensor]], factor: Tensor) -> None:
    """`lists`: what is scaled, and where it goes. Megatron-Core scales in place: the two are the same tensors."""
    torch._foreach_mul_(lists[1], factor.reshape(()))
