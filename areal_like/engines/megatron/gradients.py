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

from areal_like.config import TrainEngineConfig

__all__ = ["fuse_gradients", "fuses_gradients"]


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
