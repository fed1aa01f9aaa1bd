"""`ModelSpec`: what a model is made of, read from a Hugging Face `config.json` as plain numbers."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

__all__ = ["SUPPORTED_ARCHITECTURES", "ModelSpec", "ModelSpecError"]

SUPPORTED_ARCHITECTURES = ("llama", "qwen2", "qwen3", "qwen3_moe")
"""`model_type`s that the engines of this version train."""


class ModelSpecError(ValueError):
    """A config.json that cannot be read as a model."""


@dataclass(frozen=True)
class ModelSpec:
    """A decoder-only transformer with gated MLPs and rotary positions.

    `num_experts` 0 means dense; `intermediate_size` is the width of a dense MLP and `moe_intermediate_size` of one
    expert. `rope_scaling` is the kind of rotary scaling ("default" when there is none).
    """

    architecture: str
    num_layers: int
    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    tied_embeddings: bool
    max_position_embeddings: int
    rope_scaling: str = "default"
    qkv_bias: bool = False
    qk_norm: bool = False
    num_experts: int = 0
    experts_per_token: int = 0
    moe_intermediate_size: int = 0
    unsupported: tuple[str, ...] = ()
    """Features of the checkpoint that no engine here computes; empty for a model that can be trained."""

    @classmethod
    def from_path(cls, path: str | Path) -> ModelSpec:
        """Read a folder that holds `config.json`, or the file itself.

        Raises:
            ModelSpecError: the file is missing, is not JSON, or lacks a number that a model needs.
        """
        file = Path(path)
        if file.is_dir():
            file = file / "config.json"
        if not file.is_file():
            raise ModelSpecError(f"no config.json at {path}: a model is a Hugging Face folder or its config.json")
        try:
            config = json.loads(file.read_text(encoding="utf-8"))
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ModelSpecError(f"{file} is not JSON: {error}") from None
        if not isinstance(config, dict):
            raise ModelSpecError(f"{file} holds a {type(config).__name__}, not an object")
        return cls.from_config(config, source=str(file))

    @classmethod
    def bundled(cls, name: str) -> ModelSpec | None:
        """The numbers of a well-known model by its name on the Hub, so that it can be checked without its files."""
        return _bundled().get(name)

    @classmethod
    def from_config(cls, config: dict[str, Any], *, source: str = "config.json") -> ModelSpec:
        """Read the parsed content of a `config.json`.

        Raises:
            ModelSpecError: a number is missing or is not a positive integer; the message names the key.
        """

        def number(key: str, default: int | None = None) -> int:
            value = config.get(key)
            if value is None:
                if default is None:
                    raise ModelSpecError(f"{source} has no {key!r}, which a decoder-only model needs")
                return default
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise ModelSpecError(f"{source}: {key!r} must be a whole number, not {value!r}")
            return value

        architecture = config.get("model_type")
        if not isinstance(architecture, str):
            raise ModelSpecError(f"{source} has no 'model_type'")
        if isinstance(config.get("text_config"), dict):
            raise ModelSpecError(f"{source}: {architecture!r} is a multimodal model; only text models are supported")
        heads, hidden = number("num_attention_heads"), number("hidden_size")
        if heads == 0 or hidden == 0:
            raise ModelSpecError(f"{source}: 'num_attention_heads' and 'hidden_size' must be positive")
        experts = number("num_experts", number("num_local_experts", 0))  # Transformers 5 writes the second name
        return cls(
            architecture=architecture,
            num_layers=number("num_hidden_layers"),
            hidden_size=hidden,
            num_attention_heads=heads,
            num_key_value_heads=number("num_key_value_heads", heads),
            head_dim=number("head_dim", hidden // heads),
            intermediate_size=number("intermediate_size"),
            vocab_size=number("vocab_size"),
            tied_embeddings=bool(config.get("tie_word_embeddings", False)),
            max_position_embeddings=number("max_position_embeddings", 0),
            rope_scaling=_rope_scaling(config),
            qkv_bias=bool(config.get("attention_bias", False)) or architecture == "qwen2",
            qk_norm=architecture in ("qwen3", "qwen3_moe"),
            num_experts=experts,
            experts_per_token=number("num_experts_per_tok", 0) if experts else 0,
            moe_intermediate_size=number("moe_intermediate_size") if experts else 0,
            unsupported=tuple(_unsupported(config, architecture)),
        )

    @property
    def is_moe(self) -> bool:
        return self.num_experts > 0

    def layer_parameters(self) -> int:
        """Parameters of one transformer layer, norms and biases included."""
        qkv_width = self.head_dim * (self.num_attention_heads + 2 * self.num_key_value_heads)
        attention = self.hidden_size * qkv_width + self.head_dim * self.num_attention_heads * self.hidden_size
        attention += (qkv_width if self.qkv_bias else 0) + (2 * self.head_dim if self.qk_norm else 0)
        if self.is_moe:
            mlp = self.num_experts * 3 * self.hidden_size * self.moe_intermediate_size
            mlp += self.num_experts * self.hidden_size
        else:
            mlp = 3 * self.hidden_size * self.intermediate_size
        return attention + mlp + 2 * self.hidden_size

    def parameters(self) -> int:
        """All parameters; tied embeddings count once."""
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tied_embeddings else 2)
        return self.num_layers * self.layer_parameters() + embeddings + self.hidden_size

    def layer_flops(self, context: int = 0) -> float:
        """Forward floating-point operations of one layer for one token that attends to `context` tokens on average."""
        width = self.head_dim * self.num_attention_heads
        qkv_width = self.head_dim * (self.num_attention_heads + 2 * self.num_key_value_heads)
        attention = 2.0 * self.hidden_size * (qkv_width + width) + 4.0 * width * context
        if self.is_moe:
            mlp = 6.0 * self.hidden_size * self.moe_intermediate_size * self.experts_per_token
            mlp += 2.0 * self.hidden_size * self.num_experts
        else:
            mlp = 6.0 * self.hidden_size * self.intermediate_size
        return attention + mlp

    def head_flops(self) -> float:
        """Forward floating-point operations of the vocabulary projection for one token."""
        return 2.0 * self.hidden_size * self.vocab_size


@lru_cache(maxsize=1)
def _bundled() -> dict[str, ModelSpec]:
    specs = {}
    for file in sorted((Path(__file__).parent / "bundled").glob("*.json")):
        content = json.loads(file.read_text(encoding="utf-8"))
        spec = ModelSpec.from_config(content["config"], source=file.name)
        specs.update(dict.fromkeys(content["names"], spec))
    return specs


def _rope_scaling(config: dict[str, Any]) -> str:
    # Transformers 5 writes `rope_parameters`; earlier versions `rope_scaling`, with `type` or `rope_type`.
    for key in ("rope_parameters", "rope_scaling"):
        value = config.get(key)
        if isinstance(value, dict):
            kind = value.get("rope_type", value.get("type"))
            if kind:
                return str(kind)
    return "default"


def _unsupported(config: dict[str, Any], architecture: str) -> list[str]:
    found = []
    if config.get("use_sliding_window"):
        found.append("sliding-window attention (use_sliding_window)")
    if config.get("hidden_act", "silu") != "silu":
        found.append(f"activation {config['hidden_act']!r} (hidden_act)")
    if config.get("mlp_bias"):
        found.append("biases in the MLP (mlp_bias)")
    if config.get("attention_bias") and architecture in ("llama", "qwen3", "qwen3_moe"):
        found.append("biases in the attention projections (attention_bias)")
    if config.get("mlp_only_layers"):
        found.append("dense layers between MoE layers (mlp_only_layers)")
    if config.get("decoder_sparse_step", 1) not in (None, 1):
        found.append("dense layers between MoE layers (decoder_sparse_step)")
    if architecture == "qwen3_moe" and not config.get("norm_topk_prob", False):
        # Megatron's softmax after the top-k equals normalised probabilities; unnormalised ones are another function.
        found.append("router probabilities that are not normalised over the chosen experts (norm_topk_prob: false)")
    return found
