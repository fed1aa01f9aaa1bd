"""Reads one value at a time from a parsed `config.json`, and says which key is wrong."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["ConfigReader", "ModelSpecError"]


class ModelSpecError(ValueError):
    """A config.json that cannot be read as a model."""


@dataclass(frozen=True)
class ConfigReader:
    """`source` names the file in messages."""

    config: Mapping[str, Any]
    source: str

    @property
    def architecture(self) -> str:
        value = self.config.get("model_type")
        if not isinstance(value, str):
            raise ModelSpecError(f"{self.source} has no 'model_type'")
        return value

    def number(self, key: str, default: int | None = None) -> int:
        """A whole number that is not negative; `default` where the key is absent or null."""
        value = self.config.get(key)
        if value is None:
            if default is None:
                raise ModelSpecError(f"{self.source} has no {key!r}, which a decoder-only model needs")
            return default
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise ModelSpecError(f"{self.source}: {key!r} must be a whole number, not {value!r}")
        return value

    def positive(self, key: str) -> int:
        value = self.number(key)
        if value == 0:
            raise ModelSpecError(f"{self.source}: {key!r} must be positive")
        return value

    def fraction(self, key: str, default: float) -> float:
        """A number from 0 up to 1; `default` where the key is absent or null."""
        value = self.config.get(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
            raise ModelSpecError(f"{self.source}: {key!r} must be a number from 0 to 1, not {value!r}")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.config.get(key)
        return default if value is None else bool(value)

    def layers(self, key: str, kind: object, count: int) -> tuple[int, ...] | None:
        """Numbers of the layers of one kind in a list with an entry a layer; None where the list is absent."""
        value = self.config.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) != count:
            raise ModelSpecError(f"{self.source}: {key!r} must have one entry for each of the {count} layers")
        return tuple(layer for layer, entry in enumerate(value) if entry == kind)
