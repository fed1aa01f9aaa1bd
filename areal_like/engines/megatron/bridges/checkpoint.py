"""Reading single tensors out of a Hugging Face folder of safetensors files."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from areal_like.engines.megatron.bridges.base import CheckpointError

__all__ = ["HuggingFaceFolder"]


class HuggingFaceFolder:
    """Tensors by name; each file is opened once and read lazily."""

    def __init__(self, path: Path) -> None:
        self.path = path
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
            CheckpointError: there is no such tensor.
        """
        if name not in self._where:
            raise CheckpointError(f"{self.path} has no tensor {name!r}, which this model needs")
        return self._where[name].get_tensor(name)


def _files_of(index: Path) -> set[str]:
    try:
        return set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index} cannot be read as an index of shards: {error!r}") from None
