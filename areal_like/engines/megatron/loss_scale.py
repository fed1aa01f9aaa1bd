"""One loss scale for all parameters of a model in float16.

Megatron-Core 0.19.2 makes an optimizer of its own for experts, and gives each optimizer a loss scale of its own. The
loss is multiplied by the first one's. When gradients of one kind of parameters alone overflow, the scales part, and the
other kind is divided by a factor that its gradients were never multiplied with.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.optimizer.grad_scaler import DynamicGradScaler

__all__ = ["SharedLossScale", "share_loss_scale"]


class SharedLossScale:
    """Stands in for the scaler of each of several optimizers; the scale moves once a step, after all have reported."""

    def __init__(self, scaler: DynamicGradScaler, optimizers: int) -> None:
        self.scaler, self.optimizers = scaler, optimizers
        self._reports: list[bool] = []

    @property
    def scale(self) -> torch.Tensor:
        return self.scaler.scale

    @property
    def inv_scale(self) -> torch.Tensor:
        return self.scaler.inv_scale

    def update(self, found_inf: bool) -> None:
        """Whether one optimizer's gradients were not finite."""
        self._reports.append(bool(found_inf))
        if len(self._reports) == self.optimizers:
            self.scaler.update(any(self._reports))
            self._reports = []

    def state_dict(self) -> dict[str, Any]:
        return self.scaler.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.scaler.load_state_dict(state_dict)


def share_loss_scale(optimizer: Any) -> None:
    """Give all parts of a chained optimizer the scaler of the first."""
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    if len(parts) > 1:
        shared = SharedLossScale(parts[0].grad_scaler, len(parts))
        for part in parts:
            part.grad_scaler = shared
