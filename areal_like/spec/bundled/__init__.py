"""The numbers of well-known models by their names on the Hub, so that a job can be checked without their files.

One JSON file a family: `models` is a list of entries with `names` (the first one is the published name), `config` (of
the model's `config.json` what decides its shape) and, for the text part of a multimodal checkpoint, `text_of`.
`index.json` maps each name to its file, so that a name costs reading two small files.
"""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

__all__ = ["bundled_names", "entry", "file_of"]

_FOLDER = Path(__file__).parent


def bundled_names() -> tuple[str, ...]:
    """All names, sorted."""
    return tuple(sorted(_index()))


def file_of(name: str) -> str | None:
    """The file that holds this model, or None."""
    return _index().get(name)


def entry(name: str) -> dict[str, Any] | None:
    """The entry of this model, or None where it is not bundled."""
    file = file_of(name)
    return None if file is None else next(e for e in _models(file) if name in e["names"])


@lru_cache(maxsize=1)
def _index() -> dict[str, str]:
    index: dict[str, str] = _read("index.json")
    return index


@lru_cache
def _models(file: str) -> list[dict[str, Any]]:
    models: list[dict[str, Any]] = _read(file)["models"]
    return models


def _read(file: str) -> Any:
    return json.loads((_FOLDER / file).read_text(encoding="utf-8"))
