"""What tests read off the gradients and the optimizer of an engine inside a worker."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from areal_like.engines.megatron.checkpoint.optimizer_state import chain, pieces


def fused_layers(engine: Any) -> int:
    """Layers that add weight gradients to the buffer, all of whose weights a step has marked as added."""
    layers = [m for chunk in engine.modules for m in chunk.modules() if getattr(m, "fuse_wgrad_accumulation", False)]
    for layer in layers:
        weights = [p for n, p in layer.named_parameters(recurse=False) if n.startswith("weight")]
        assert weights and all(getattr(p, "grad_added_to_main_grad", True) for p in weights), layer
    return len(layers)


def named_gradients(engine: Any) -> dict[str, Tensor]:
    """After a step, by names in a Hugging Face folder."""
    exported = engine.bridge.export(engine.modules, value=lambda p: p.main_grad.detach())
    return {name: gradient.float().cpu() for name, gradient in exported}


def configured(engine: Any) -> bool:
    return bool(engine.passes.config.gradient_accumulation_fusion)


def optimizer_values(engine: Any) -> dict[str, Tensor]:
    """By parameter and kind, float32 `[elements]`: the copies that the optimizer updates, the moments, and the
    parameters themselves."""
    found = {}
    for index, part in enumerate(chain(engine.optimizer)):
        for piece in pieces(part):
            for kind in piece.tensors:
                found[f"{index}.{piece.number}.{kind}"] = piece.read(kind).float().cpu().clone()
            own = piece.parameter.detach().view(-1)[piece.start : piece.end]
            found[f"{index}.{piece.number}.parameter"] = own.float().cpu()
    return found


def state_bytes(engine: Any) -> tuple[int, int]:
    """Bytes of what the optimizer keeps beside the parameters, and the elements that it trains."""
    size, elements = 0, 0
    for part in chain(engine.optimizer):
        for group in part.optimizer.param_groups:
            elements += sum(p.numel() for p in group["params"])
            size += sum(p.numel() * 4 for p in group["params"] if p.dtype is torch.float32)
        for state in part.optimizer.state.values():
            size += sum(t.numel() * t.element_size() for t in state.values() if torch.is_tensor(t) and t.ndim)
    return size, elements
