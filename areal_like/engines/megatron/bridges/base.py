"""What a bridge between Hugging Face and Megatron-Core does for the engine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

__all__ = ["Bridge", "CheckpointError"]


class CheckpointError(ValueError):
    """A checkpoint that cannot be loaded: a file or a tensor is missing, or a shape is another than the model's."""


class Bridge(Protocol):
    """One model on one rank. `build` comes first; the other methods take what it returned."""

    vocab_size: int
    """Rows of the Hugging Face embedding, without the padding that tensor parallelism adds."""

    def build(self) -> list[torch.nn.Module]:
        """This rank's model chunks (one a virtual stage), on the device, weights not yet loaded."""

    def load(self, chunks: list[torch.nn.Module], path: Path) -> None:
        """Fill the chunks from a Hugging Face folder.

        Raises:
            CheckpointError: something is missing or has another shape; the message names the tensor.
        """

    def export(self, chunks: list[torch.nn.Module]) -> Iterator[tuple[str, Tensor]]:
        """Whole Hugging Face tensors of this rank's pipeline stage, on every rank of the stage. Collective."""

    def tensor_names(self) -> list[str]:
        """Every name that the Hugging Face folder of this model holds."""
