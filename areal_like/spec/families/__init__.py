"""How each family of models writes its numbers into `config.json`: one module a family, loaded when it is needed.

Each module has `from_config(read: ConfigReader) -> dict[str, Any]`: the fields of `ModelSpec`. What a layer holds is
counted from those fields alone, in `attention` and `layers`, so that a family says only what it is made of.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from areal_like.spec.families.reader import ConfigReader

__all__ = ["KNOWN_ARCHITECTURES", "read_fields"]

_MODULES = {
    "llama": "llama",
    "smollm3": "llama",
    "mistral": "mistral",
    "mixtral": "mistral",
    "qwen2": "qwen",
    "qwen2_moe": "qwen",
    "qwen3": "qwen",
    "qwen3_moe": "qwen",
    "qwen3_5_text": "qwen_hybrid",
    "qwen3_5_moe_text": "qwen_hybrid",
    "deepseek_v2": "deepseek",
    "deepseek_v3": "deepseek",
    "kimi_k2": "deepseek",
    "glm4_moe": "glm",
    "gemma2": "gemma",
    "gemma3_text": "gemma",
    "phi3": "phi",
    "olmo2": "olmo",
    "gpt_oss": "gpt_oss",
    "minimax": "minimax",
    "minimax_text_01": "minimax",
    "minimax_m1": "minimax",
    "minimax_m2": "minimax",
}

KNOWN_ARCHITECTURES = tuple(_MODULES)
"""`model_type`s whose parameters are counted exactly; any other is read as a plain decoder."""


def read_fields(read: ConfigReader) -> dict[str, Any]:
    """The fields of `ModelSpec` that this configuration gives.

    Raises:
        ModelSpecError: a number is missing or is not one; the message names the key.
    """
    module = import_module(f"{__name__}.{_MODULES.get(read.architecture, 'llama')}")
    fields: dict[str, Any] = module.from_config(read)
    return fields
