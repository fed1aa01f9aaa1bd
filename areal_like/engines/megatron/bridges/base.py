"""What a bridge between Hugging Face and Megatron-Core does for the engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from areal_like.engines.megatron.fp8 import readable
from areal_like.spec import ROPE_SCALING, SUPPORTED_ARCHITECTURES, ModelSpec

__all__ = ["Bridge", "CheckpointError", "refuse_unsupported"]


class CheckpointError(ValueError):
    """A checkpoint that cannot be loaded: a file or a tensor is missing, or a shape is another than the model's."""


class Bridge(Protocol):
    """One model on one rank. `build` comes first; the other methods take what it returned."""

    vocab_size: int
    """Rows of the Hugging Face embedding, without the padding that tensor parallelism adds."""

    @property
    def config(self) -> Any:
        """Megatron's `TransformerConfig` that the model is built from."""

    def build(self) -> list[torch.nn.Module]:
        """This rank's model chunks (one a virtual stage), on the device, weights not yet loaded."""

    def load(self, chunks: list[torch.nn.Module], path: Path) -> None:
        """Fill the chunks from a Hugging Face folder.

        Raises:
            CheckpointError: something is missing or has another shape; the message names the tensor.
        """

    def export(
        self, chunks: list[torch.nn.Module], value: Callable[[torch.nn.Parameter], Tensor] = readable
    ) -> Iterator[tuple[str, Tensor]]:
        """Whole Hugging Face tensors of this rank's pipeline stage, on every rank of the stage. Collective.

        Args:
            value: what to export for a parameter, of the same shape and not in FP8; may be collective over the stage.
        """

    def tensor_names(self) -> list[str]:
        """Every name that the Hugging Face folder of this model holds."""


def refuse_unsupported(spec: ModelSpec, path: Path, *, bridge: str, known: bool) -> None:
    """The same that the check refuses (AL301, AL302), for whoever builds an engine without it.

    Args:
        known: whether the bridge's library has the architecture.

    Raises:
        CheckpointError: the architecture, or a feature of the checkpoint, is not supported.
    """
    if spec.architecture not in SUPPORTED_ARCHITECTURES or not known:
        supported = ", ".join(SUPPORTED_ARCHITECTURES)
        raise CheckpointError(f"{path}: architecture {spec.architecture!r} is not supported; supported: {supported}")
    problems = list(spec.unsupported)
    if spec.rope_scaling not in ROPE_SCALING[bridge]:
        problems.append(f"rotary scaling {spec.rope_scaling!r}")
    if problems:
        raise CheckpointError(f"{path}: not supported with bridge_type {bridge}: {'; '.join(problems)}")
