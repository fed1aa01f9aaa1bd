"""What tests read off the gradients and the optimizer of an engine inside a worker."""

from __future__ import annotations

from typing import Any

from torch import Tensor


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
