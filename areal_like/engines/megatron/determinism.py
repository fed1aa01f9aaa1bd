"""The same batch gives the same bits again: what has to be said before CUDA starts, and what is looked at afterwards.

Three places decide it, and each is too late for the next: the environment (libraries read it once), torch's own switch
and the configuration (modules choose kernels when they are built), and the built model, where `verify` reads back what
was chosen. Megatron-Core and TransformerEngine otherwise keep atomic adds in the embedding, in attention and in the
sorting of tokens by expert.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import torch

from areal_like.runtime.determinism import deterministic_environment

__all__ = ["prepare_process", "settings", "verify"]


def prepare_process(device: str) -> None:
    """Ask everything in this process for repeatable kernels; call it before the process uses CUDA.

    Raises:
        RuntimeError: CUDA was used already under other variables.
    """
    wanted = deterministic_environment()
    if device == "cuda":
        wrong = [f"{name}={value}" for name, value in wanted.items() if os.environ.get(name) != value]
        if wrong and torch.cuda.is_initialized():
            raise RuntimeError(
                "use_deterministic_algorithms: CUDA was used before the environment was right; start the process with "
                + " ".join(wrong)
            )
        os.environ.update(wanted)
    torch.use_deterministic_algorithms(True)
    # torch would also fill every new tensor with NaN, TransformerEngine's buffers included: a kernel for each. It only
    # makes reading unwritten memory repeatable, and no kernel used here does that.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    if device == "cuda":
        import torch._inductor.config as inductor

        inductor.deterministic = True  # compiled kernels are not chosen by a race between them


def settings() -> dict[str, Any]:
    """Fields of Megatron's `TransformerConfig`."""
    return {"deterministic_mode": True, "bias_dropout_fusion": False, "cross_entropy_loss_fusion": False}


def verify(modules: Iterable[torch.nn.Module]) -> None:
    """Read back from the built model what its modules were built with.

    Raises:
        RuntimeError: a module would still compute in an order that changes.
    """
    for chunk in modules:
        for name, module in chunk.named_modules():
            config = getattr(module, "config", None)
            if config is not None and getattr(config, "deterministic_mode", True) is False:
                raise RuntimeError(f"{name or 'the model'} was built without deterministic_mode")
            if type(module).__name__ in ("TEDotProductAttention", "DotProductAttention"):
                raise RuntimeError(f"{name} is {type(module).__name__}, whose backward pass does not repeat")
