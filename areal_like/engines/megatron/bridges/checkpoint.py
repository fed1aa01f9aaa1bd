"""Reading single tensors out of a Hugging Face folder of safetensors files, each in the shape that the model needs."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from areal_like.engines.megatron.bridges.base import CheckpointError
from areal_like.spec import ModelSpec

__all__ = ["HuggingFaceFolder", "tensor_shape"]


class HuggingFaceFolder:
    """Tensors by name; each file is opened once and read lazily.

    Args:
        spec: of the model, if tensors are to have the shapes that follow from it.
    """

    def __init__(self, path: Path, spec: ModelSpec | None = None) -> None:
        self.path, self.spec = path, spec
        files = sorted(path.glob("*.safetensors"))
        if not files:
            raise CheckpointError(f"{path} holds no *.safetensors files: it is not a model's Hugging Face folder")
        index = path / "model.safetensors.index.json"
        expected = _files_of(index) if index.is_file() else set()
        missing = sorted(expected - {f.name for f in files})
        if missing:
            raise CheckpointError(f"{path} lacks {missing[0]} that model.safetensors.index.json names")
        self._where = {}
        for file in files:
            try:
                handle = safe_open(file, framework="pt", device="cpu")
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{file} cannot be read as safetensors: {error}") from None
            for name in handle.keys():  # noqa: SIM118 - not a dict
                self._where[name] = handle

    def __contains__(self, name: str) -> bool:
        return name in self._where

    def names(self) -> list[str]:
        return list(self._where)

    def tensor(self, name: str) -> Tensor:
        """
        Raises:
            CheckpointError: there is no such tensor, or it has another shape. Asked here, because mbridge puts tensors
                together whether or not they fit, and megatron-bridge pads and transposes some that do not.
        """
        if name not in self._where:
            raise CheckpointError(f"{self.path} has no tensor {name!r}, which this model needs")
        if self.spec is not None:
            found, needed = tuple(self._where[name].get_slice(name).get_shape()), tensor_shape(self.spec, name)
            if found != needed:
                raise CheckpointError(f"{self.path}: {name} is {found} where the model's config.json asks for {needed}")
        return self._where[name].get_tensor(name)


def tensor_shape(spec: ModelSpec, name: str) -> tuple[int, ...]:
    """Shape of a tensor of the Hugging Face folder, for the architectures that the engine trains."""
    queries, keys = spec.num_attention_heads * spec.head_dim, spec.num_key_value_heads * spec.head_dim
    width = spec.moe_intermediate_size if ".experts." in name else spec.intermediate_size
    shapes = {
        "embed_tokens.weight": (spec.vocab_size, spec.hidden_size),
        "lm_head.weight": (spec.vocab_size, spec.hidden_size),
        "q_proj.weight": (queries, spec.hidden_size),
        "k_proj.weight": (keys, spec.hidden_size),
        "v_proj.weight": (keys, spec.hidden_size),
        "q_proj.bias": (queries,),
        "k_proj.bias": (keys,),
        "v_proj.bias": (keys,),
        "o_proj.weight": (spec.hidden_size, queries),
        "q_norm.weight": (spec.head_dim,),
        "k_norm.weight": (spec.head_dim,),
        "gate.weight": (spec.num_experts, spec.hidden_size),
        "gate_proj.weight": (width, spec.hidden_size),
        "up_proj.weight": (width, spec.hidden_size),
        "down_proj.weight": (spec.hidden_size, width),
        "norm.weight": (spec.hidden_size,),
        "input_layernorm.weight": (spec.hidden_size,),
        "post_attention_layernorm.weight": (spec.hidden_size,),
    }
    return shapes[".".join(name.split(".")[-2:])]


def _files_of(index: Path) -> set[str]:
    try:
        return set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index} cannot be read as an index of shards: {error!r}") from None
