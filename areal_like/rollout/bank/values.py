"""Plain values as JSON that gives back what went in: tuples stay tuples, keys that are numbers stay numbers.

JSON itself would turn both into something else without a word; tasks of reasoning-gym have them in their metadata.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

__all__ = ["dumps", "loads", "pack", "unpack"]

_TAG = "!"
"""Key of a mapping that stands for something JSON lacks: `{"!": "tuple", "of": [...]}`."""


def dumps(value: Any) -> bytes:
    """Compact JSON in UTF-8, on one line. Halves of surrogate pairs, which broken text has, are kept."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")


def loads(text: bytes) -> Any:
    """What `dumps` wrote. ValueError for anything that is not JSON."""
    return json.loads(text.decode("utf-8", "surrogatepass"))


def pack(value: Any, where: str) -> Any:
    """`value` in what JSON can say.

    Args:
        where: what it is, for the error.

    Raises:
        ValueError: it holds something else than text, numbers, booleans, None, lists, tuples and mappings.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list):
        return [pack(item, f"{where}[{i}]") for i, item in enumerate(value)]
    if isinstance(value, tuple):
        return {_TAG: "tuple", "of": [pack(item, f"{where}[{i}]") for i, item in enumerate(value)]}
    if isinstance(value, Mapping):
        if all(isinstance(key, str) for key in value) and _TAG not in value:
            return {key: pack(item, f"{where}.{key}") for key, item in value.items()}
        pairs = [[pack(key, f"a key of {where}"), pack(item, f"{where}[{key!r}]")] for key, item in value.items()]
        return {_TAG: "mapping", "of": pairs}
    raise ValueError(
        f"{where} is a {type(value).__name__}: the bank keeps text, numbers, booleans, None, lists, tuples and"
        " mappings; turn it into one of these"
    )


def unpack(value: Any) -> Any:
    """What `pack` was given; mappings become dicts."""
    if isinstance(value, list):
        return [unpack(item) for item in value]
    if isinstance(value, dict):
        if _TAG not in value:
            return {key: unpack(item) for key, item in value.items()}
        if value[_TAG] == "tuple":
            return tuple(unpack(item) for item in value["of"])
        return {unpack(key): unpack(item) for key, item in value["of"]}
    return value
