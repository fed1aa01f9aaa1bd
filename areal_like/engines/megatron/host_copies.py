"""Many tensors from the host to the GPU at once."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import is_dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["copy_to_device", "move"]

_ALIGNMENT = 64
"""Elements; each tensor begins at a multiple of it, as kernels that load several values at once expect."""


def copy_to_device(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """The tensors on `device`: one copy for each dtype, out of pinned memory, for which the host does not wait.

    They are views of one tensor a dtype, which lives as long as one of them.
    """
    moved = list(tensors)
    for dtype in {x.dtype for x in tensors}:
        places = [i for i, x in enumerate(tensors) if x.dtype is dtype]
        sizes = [-(-tensors[i].numel() // _ALIGNMENT) * _ALIGNMENT for i in places]
        host = torch.empty(sum(sizes), dtype=dtype, pin_memory=device.type == "cuda")
        for i, piece in zip(places, host.split(sizes), strict=True):
            piece[: tensors[i].numel()] = tensors[i].reshape(-1)
        for i, piece in zip(places, host.to(device, non_blocking=True).split(sizes), strict=True):
            moved[i] = piece[: tensors[i].numel()].view(tensors[i].shape)
    return moved


def move[T](value: T, device: torch.device) -> T:
    """Dataclasses, lists and dictionaries with every tensor in them on `device` (`copy_to_device`); on a CPU as it is.

    What a dataclass checks when it is made is not checked again: it may read a tensor, and wait for the GPU.
    """
    if device.type == "cpu":
        return value
    found: dict[int, Tensor] = {}
    _collect(value, found)
    moved = dict(zip(found, copy_to_device(list(found.values()), device), strict=True))
    result: T = _replaced(value, moved)
    return result


def _collect(value: Any, found: dict[int, Tensor]) -> None:
    if isinstance(value, Tensor):
        found[id(value)] = value
    elif isinstance(value, list | dict):
        for part in value.values() if isinstance(value, dict) else value:
            _collect(part, found)
    elif is_dataclass(value):
        _collect(vars(value), found)


def _replaced(value: Any, moved: dict[int, Tensor]) -> Any:
    if isinstance(value, Tensor):
        return moved[id(value)]
    if isinstance(value, list):
        return [_replaced(part, moved) for part in value]
    if isinstance(value, dict):
        return {name: _replaced(part, moved) for name, part in value.items()}
    if is_dataclass(value):
        other = copy(value)
        vars(other).update(_replaced(vars(value), moved))
        return other
    return value
