"""Value models: one number a token in place of the next token's distribution (critics, reward models).

The head is a linear map without bias, named `score` as in Transformers' sequence-classification models with one label:
such a folder loads here, and what is saved loads there. A folder of a language model has no head: it starts at zero, so
all values do, under every layout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.tensor_parallel import set_defaults_if_not_set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from areal_like.engines.megatron.bridges.base import CheckpointError
from areal_like.engines.megatron.bridges.checkpoint import HuggingFaceFolder

__all__ = ["NAME", "ValueHead", "attach_value_head", "export_value_head", "load_value_head", "value_model_config"]

NAME = "score.weight"
"""In a Hugging Face folder."""


class ValueHead(torch.nn.Module):
    """Takes the place of `GPTModel.output_layer`; every tensor-parallel rank holds it whole."""

    def __init__(self, config: TransformerConfig, group: dist.ProcessGroup, device: torch.device) -> None:
        super().__init__()
        self.sequence_parallel, self.group = config.sequence_parallel, group
        self.score = torch.nn.Parameter(torch.zeros(1, config.hidden_size, dtype=config.params_dtype, device=device))
        set_defaults_if_not_set_tensor_model_parallel_attributes(self.score)

    def forward(self, hidden: Tensor, weight: Tensor | None = None, **kwargs: Any) -> tuple[Tensor, None]:
        """`[tokens / t, 1, hidden]` (or all tokens, without sequence parallelism) to float32 `[tokens, 1, 1]`."""
        if self.sequence_parallel:
            # Every rank computes the same loss from all tokens: its own part of the gradient is whole already.
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False, group=self.group)
        return F.linear(hidden.float(), self.score.float()), None


def attach_value_head(chunks: list[torch.nn.Module], group: dist.ProcessGroup, device: torch.device) -> None:
    """Put a head in place of the output layer, on the rank that has one, before weights are loaded."""
    for chunk in chunks:
        model: Any = chunk
        model.share_embeddings_and_output_weights = False
        for parameter in model.parameters():
            if getattr(parameter, "shared_embedding", False):
                del parameter.shared_embedding  # it has no copy on the last stage any more
        if model.post_process:
            model.output_layer = ValueHead(model.config, group, device)


def _head(chunks: list[torch.nn.Module]) -> ValueHead | None:
    heads = (getattr(chunk, "output_layer", None) for chunk in chunks)
    return next((head for head in heads if isinstance(head, ValueHead)), None)


def load_value_head(chunks: list[torch.nn.Module], path: Path) -> None:
    """
    Raises:
        CheckpointError: the folder's head is not one number a token.
    """
    head = _head(chunks)
    if head is None:
        return  # every other model would open its folder a second time
    folder = HuggingFaceFolder(path)
    if NAME not in folder:
        return
    stored = folder.tensor(NAME)
    if stored.shape != head.score.shape:
        raise CheckpointError(
            f"{path}: {NAME} has shape {tuple(stored.shape)}; a value model has one label: {tuple(head.score.shape)}"
        )
    with torch.no_grad():
        head.score.copy_(stored)


def export_value_head(
    chunks: list[torch.nn.Module], value: Callable[[torch.nn.Parameter], Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """Name and tensor, on the ranks of the last stage. For `value` see `bridges.base.Bridge.export`."""
    if (head := _head(chunks)) is not None:
        yield NAME, value(head.score)


def value_model_config(config: dict[str, Any]) -> dict[str, Any]:
    """`config.json` of the value model of a language model, as Transformers reads it."""
    names = [name.replace("ForCausalLM", "ForSequenceClassification") for name in config.get("architectures") or []]
    return config | {"architectures": names, "num_labels": 1, "id2label": {"0": "value"}, "label2id": {"value": 0}}
