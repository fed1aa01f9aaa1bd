"""New weights under their Hugging Face names, checked before they replace anything."""

from __future__ import annotations

import re

import torch
from torch import Tensor
from transformers import PreTrainedModel

from areal_like.engines.base import WeightBucket


class WeightUpdates:
    """Where each name of a checkpoint goes in `model`, and which have come in the present update.

    Weights are replaced in place as buckets come, so between the first bucket and `finish` they are a mixture of two
    versions; `check_usable` refuses generation then. A bucket is checked whole before any of it is copied. After an
    error the update is void: only a new, complete one makes the engine usable again.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.targets: dict[str, Tensor] = {}
        self.tied: dict[str, str] = {}
        self.received: set[str] = set()
        self.unusable: str | None = None
        names: dict[int, str] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if id(parameter) in names:
                self.tied[name] = names[id(parameter)]
                continue
            names[id(parameter)] = name
            self.targets.update(_checkpoint_views(name, parameter.data))

    @torch.no_grad()
    def take(self, bucket: WeightBucket) -> None:
        """Replace the weights of one bucket.

        Raises:
            ValueError: a name that the model lacks or that came before in this update, another shape, or a tied weight
                that differs from the one it is tied to; the message names the tensor. Nothing of the bucket was taken.
        """
        try:
            fresh = self._check(bucket)
        except ValueError as error:
            self.received.clear()
            self.unusable = f"an update of the weights failed: {error}"
            raise
        self.unusable = "an update of the weights has begun and is not finished"
        for name, tensor in fresh.items():
            self.targets[name].copy_(tensor)
        self.received.update(bucket.tensors)

    def finish(self) -> None:
        """End an update.

        Raises:
            ValueError: weights that never came, by name.
        """
        received = {self.tied.get(name, name) for name in self.received}
        missing = [name for name in self.targets if name not in received]
        self.received.clear()
        if missing:
            shown = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
            self.unusable = f"an update of the weights lacked {shown}"
            raise ValueError(f"the update lacks {len(missing)} of {len(self.targets)} weights: {shown}")
        self.unusable = None

    def check_usable(self) -> None:
        """RuntimeError when the weights are a mixture of versions."""
        if self.unusable is not None:
            raise RuntimeError(f"the rollout engine cannot generate: {self.unusable}; send a complete update")

    def _check(self, bucket: WeightBucket) -> dict[str, Tensor]:
        """What of a bucket is to be copied, by the name of its target."""
        fresh: dict[str, Tensor] = {}
        here = {self.tied.get(name, name) for name in self.received}
        for name, tensor in bucket.tensors.items():
            canonical = self.tied.get(name, name)
            target = self.targets.get(canonical)
            if target is None:
                raise ValueError(f"the model has no weight {name!r}")
            if tensor.shape != target.shape:
                raise ValueError(f"{name!r} has shape {tuple(tensor.shape)}, the model's has {tuple(target.shape)}")
            if not tensor.is_floating_point():
                raise ValueError(f"{name!r} has dtype {tensor.dtype}; weights are floating-point numbers")
            if name in self.received:
                raise ValueError(f"{name!r} came twice in one update")
            twin = fresh.get(canonical, target if canonical in here else None)
            if twin is None:
                fresh[canonical] = tensor
            elif not torch.equal(tensor.to(target), twin.to(target)):
                raise ValueError(f"{name!r} is tied to another weight of the model and differs from it")
        return fresh


def _checkpoint_views(name: str, parameter: Tensor) -> dict[str, Tensor]:
    """The names that a checkpoint has for this parameter, each with its part of it.

    Transformers 5 keeps the experts of a layer in one tensor each, `gate_up_proj` `[experts, 2 * width, hidden]` (gate
    first) and `down_proj` `[experts, hidden, width]`; checkpoints have one matrix an expert (`Qwen3MoeExperts`).
    """
    fused = re.fullmatch(r"(.*\.experts)\.(gate_up_proj|down_proj)", name)
    if fused is None:
        return {name: parameter}
    views: dict[str, Tensor] = {}
    for expert, matrix in enumerate(parameter):
        if fused[2] == "down_proj":
            views[f"{fused[1]}.{expert}.down_proj.weight"] = matrix
        else:
            gate, up = matrix.chunk(2)
            views[f"{fused[1]}.{expert}.gate_proj.weight"] = gate
            views[f"{fused[1]}.{expert}.up_proj.weight"] = up
    return views
