"""Low-rank adapters under PEFT's names, merged into the weights that the engine was given."""

from __future__ import annotations

import torch
from torch import Tensor

from areal_like.engines.base import WeightBucket
from areal_like.engines.huggingface.weights import WeightUpdates

PREFIX, A, B = "base_model.model.", ".lora_A.weight", ".lora_B.weight"


class AdapterUpdates:
    """Keeps a copy of each weight that has an adapter, so that the next one replaces the last exactly.

    Generation runs at the speed of the plain model; the copies take the memory of the adapted weights again. What
    `WeightUpdates` says of mixtures and errors holds here too.
    """

    def __init__(self, weights: WeightUpdates) -> None:
        self.weights = weights
        self.base: dict[str, Tensor] = {}
        self.halves: dict[str, Tensor] = {}
        self.received: set[str] = set()

    @property
    def open(self) -> bool:
        """Whether parts of an update have come and it is not finished."""
        return bool(self.halves or self.received)

    def forget(self) -> None:
        """Whole weights come: they are what the next adapter is added to."""
        self.base.clear()
        self._clear()

    @torch.no_grad()
    def take(self, bucket: WeightBucket) -> None:
        """Merge the adapters whose two halves are there.

        Raises:
            ValueError: a name that is no adapter of the model or came before in this update, or a shape that does not
                fit; the message names the tensor. The update is void.
        """
        assert bucket.adapter_scaling is not None
        for name, tensor in bucket.tensors.items():
            try:
                target, other = self._place(name)
                pair = (tensor, self.halves.pop(other)) if other in self.halves else None
                if pair is None:
                    self.halves[name] = tensor
                    continue
                a, b = pair if name.endswith(A) else reversed(pair)
                self._merge(target, a, b, bucket.adapter_scaling)
            except ValueError as error:
                self._clear()
                self.weights.unusable = f"an update of the adapters failed: {error}"
                raise
            self.received.add(target)

    def finish(self) -> None:
        """End an update.

        Raises:
            ValueError: half an adapter, or one that an earlier update had, never came; by name.
        """
        missing = [self._other(name) for name in self.halves] + [n for n in self.base if n not in self.received]
        self._clear()
        if missing:
            shown = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
            self.weights.unusable = f"an update of the adapters lacked {shown}"
            raise ValueError(f"the update lacks {len(missing)} parts of adapters: {shown}")
        self.weights.unusable = None

    def _merge(self, target: str, a: Tensor, b: Tensor, scaling: float) -> None:
        weight = self.weights.targets[target]
        if a.ndim != 2 or b.ndim != 2 or a.shape[0] != b.shape[1] or (b.shape[0], a.shape[1]) != tuple(weight.shape):
            shapes = f"{tuple(b.shape)} and {tuple(a.shape)}"
            raise ValueError(f"B and A of {target!r} have shapes {shapes}; the weight has {tuple(weight.shape)}")
        base = self.base.setdefault(target, weight.clone())
        self.weights.unusable = "an update of the adapters has begun and is not finished"
        delta = b.to(weight.device, torch.float32) @ a.to(weight.device, torch.float32)
        weight.copy_(base.float() + scaling * delta)

    def _place(self, name: str) -> tuple[str, str]:
        """The weight that a tensor belongs to, and the name of the other half."""
        if not (name.startswith(PREFIX) and name.endswith((A, B))):
            raise ValueError(f"{name!r} is not the name of an adapter")
        target = name[len(PREFIX) : -len(A)] + ".weight"
        target = self.weights.tied.get(target, target)
        if target not in self.weights.targets:
            raise ValueError(f"the model has no weight {target!r} for the adapter {name!r}")
        if name in self.halves or target in self.received:
            raise ValueError(f"{name!r} came twice in one update")
        return target, self._other(name)

    @staticmethod
    def _other(name: str) -> str:
        return name[: -len(A)] + (B if name.endswith(A) else A)

    def _clear(self) -> None:
        self.halves.clear()
        self.received.clear()
