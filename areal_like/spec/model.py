"""`ModelSpec`: what a model is made of, read from a Hugging Face `config.json` as plain numbers."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field, fields
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from areal_like.spec.bundled import bundled_names, entry, file_of
from areal_like.spec.families import read_fields
from areal_like.spec.families.layers import forward_flops, layer_parameters
from areal_like.spec.families.parts import LatentAttention, LayerParameters, LinearAttention
from areal_like.spec.families.reader import ConfigReader, ModelSpecError

__all__ = ["ROPE_SCALING", "SUPPORTED_ARCHITECTURES", "ModelSpec", "ModelSpecError"]

SUPPORTED_ARCHITECTURES = ("llama", "qwen2", "qwen3", "qwen3_moe")
"""`model_type`s that the engines of this version train."""
ROPE_SCALING = {"mbridge": ("default",), "megatron-bridge": ("default", "linear", "llama3")}
"""Kinds of rotary scaling that the Megatron engine computes, by its `bridge_type`. mbridge reads every kind as linear
interpolation, so that logits would be silently wrong."""


@dataclass(frozen=True)
class ModelSpec:
    """A decoder-only transformer with gated MLPs.

    `num_experts` 0 means dense; `intermediate_size` is the width of a dense MLP, `moe_intermediate_size` of one routed
    expert, `shared_expert_intermediate_size` of all shared experts together. Layers are numbered from 0.
    """

    architecture: str
    """The `model_type` of the file."""
    num_layers: int
    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    """Width of one head of queries and keys; with latent attention both parts, with and without position."""
    intermediate_size: int
    vocab_size: int
    tied_embeddings: bool
    max_position_embeddings: int
    rope_scaling: str = "default"
    """The kind of rotary scaling ("default" when there is none)."""

    qkv_bias: bool = False
    """Biases of queries, keys and values; with latent attention, of the two down-projections."""
    output_bias: bool = False
    """A bias of the attention's output projection."""
    mlp_bias: bool = False
    qk_norm: bool = False
    """Norms of queries and keys, over each head or, with `qk_norm_over_heads`, over the whole projection."""
    qk_norm_over_heads: bool = False
    attention_output_gate: bool = False
    """The query projection also yields a gate of each head's output, so it is twice as wide."""
    attention_dropout: float = 0.0
    """Share of the attention's weights that training drops."""
    attention_sinks: bool = False
    """A learned logit a head that takes part in the softmax."""
    sliding_window: int = 0
    """Tokens that the layers in `sliding_layers` attend to."""
    sliding_layers: tuple[int, ...] = ()
    latent_attention: LatentAttention | None = None
    linear_attention: LinearAttention | None = None
    linear_layers: tuple[int, ...] = ()
    norms_per_layer: int = 2
    """Norms of the width of the model."""

    num_experts: int = 0
    experts_per_token: int = 0
    moe_intermediate_size: int = 0
    shared_expert_intermediate_size: int = 0
    shared_expert_gate: bool = False
    dense_layers: tuple[int, ...] = ()
    """Layers of a mixture of experts that have a dense MLP instead."""
    router_bias: bool = False
    router_correction_bias: bool = False
    """A bias that only chooses experts and has no gradient: a buffer, not a parameter (arXiv:2408.15664)."""
    expert_bias: bool = False

    mtp_layers: int = 0
    """Layers for multi-token prediction in the checkpoint. As in Transformers they are not part of the model."""
    unsupported: tuple[str, ...] = ()
    """Features of the checkpoint that no engine here computes; empty for a model that can be trained."""
    published_name: str = field(default="", compare=False)
    """The name on the Hub of a bundled model; two models of the same numbers are equal."""

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
        return _bundled(name)

    @classmethod
    def find(cls, name_or_path: str | Path) -> ModelSpec:
        """A bundled model by its name (the organisation may be left out), or else a folder or a `config.json`.

        Raises:
            ModelSpecError: it is none of these, with the closest names; or its file cannot be read.
        """
        text = str(name_or_path)
        spec = _bundled(text)
        if spec is None:
            path = Path(text).expanduser()
            if path.exists():
                return cls.from_path(path)
            spec = _bundled(_full_name(text))
        if spec is None:
            raise ModelSpecError(_unknown(text))
        return spec

    @classmethod
    def from_config(cls, config: dict[str, Any], *, source: str = "config.json") -> ModelSpec:
        """Read the parsed content of a `config.json`.

        A `model_type` that no module of `families` knows is read as a plain decoder; no engine trains it.

        Raises:
            ModelSpecError: a number is missing or is not a positive integer; the message names the key.
        """
        read = ConfigReader(config, source)
        if isinstance(config.get("text_config"), dict):
            raise ModelSpecError(
                f"{source}: {read.architecture!r} is a multimodal model; only text models are supported"
            )
        return cls(**read_fields(read))

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """Computed once: what is remembered by model is looked up thousands of times in a plan."""
        return hash(tuple(getattr(self, item.name) for item in fields(self) if item.compare))

    def __getstate__(self) -> dict[str, Any]:
        """The fields alone: a hash that is remembered is wrong in another process."""
        return {item.name: getattr(self, item.name) for item in fields(self)}

    @property
    def is_moe(self) -> bool:
        return self.num_experts > 0

    @property
    def moe_layers(self) -> int:
        """How many layers have routed experts."""
        return self.num_layers - len(self.dense_layers) if self.is_moe else 0

    @cached_property
    def typical_layer(self) -> int:
        """The first layer of the kind that most layers are of."""
        if not (self.dense_layers or self.linear_layers or self.sliding_layers):
            return 0
        kinds = [
            (layer in self.dense_layers, layer in self.linear_layers, layer in self.sliding_layers)
            for layer in range(self.num_layers)
        ]
        return kinds.index(Counter(kinds).most_common(1)[0][0])

    def layer_breakdown(self, layer: int | None = None) -> LayerParameters:
        """Parameters of one transformer layer by part; of the typical one without a number."""
        return self._breakdowns[self.typical_layer if layer is None else layer]

    @cached_property
    def _breakdowns(self) -> tuple[LayerParameters, ...]:
        return tuple(layer_parameters(self, layer) for layer in range(self.num_layers))

    def layer_parameters(self, layer: int | None = None) -> int:
        """Parameters of one transformer layer, norms and biases included; of the typical one without a number."""
        return self.layer_breakdown(layer).total

    def parameters(self) -> int:
        """All parameters; tied embeddings count once, the router's correction bias and MTP layers not at all."""
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tied_embeddings else 2)
        if not (self.dense_layers or self.linear_layers):
            layers = self.num_layers * self.layer_parameters(0)
        else:
            layers = sum(self.layer_parameters(layer) for layer in range(self.num_layers))
        return layers + embeddings + self.hidden_size

    def buffers(self) -> int:
        """Numbers of the checkpoint that are not trained: the correction bias of each router.

        The total that the Hub shows for a checkpoint is `parameters()` and these, and its MTP layers if it has any.
        """
        return self.moe_layers * self.num_experts if self.router_correction_bias else 0

    def layer_flops(self, context: int = 0, layer: int | None = None) -> float:
        """Forward floating-point operations of one layer for one token that attends to `context` tokens on average.

        `layer`: the typical one without a number.
        """
        return forward_flops(self, self.typical_layer if layer is None else layer, context)

    def head_flops(self) -> float:
        """Forward floating-point operations of the vocabulary projection for one token."""
        return 2.0 * self.hidden_size * self.vocab_size


@lru_cache
def _bundled(name: str) -> ModelSpec | None:
    found = entry(name)
    if found is None:
        return None
    fields = read_fields(ConfigReader(found["config"], f"bundled {file_of(name)}"))
    fields["published_name"] = name if "/" in name else found["names"][0]
    if "text_of" in found:
        fields["unsupported"] += (f"{found['text_of']} beside the text model",)
    return ModelSpec(**fields)


def _full_name(name: str) -> str:
    """The bundled name of which `name` is the part after the organisation, whatever its case; else `name` itself."""
    short = name.lower()
    matches = [known for known in bundled_names() if short in (known.lower(), known.lower().rpartition("/")[2])]
    return matches[0] if matches else name


def _unknown(name: str) -> str:
    from difflib import get_close_matches

    names = {known.lower().rpartition("/")[2]: known for known in bundled_names()}
    close = get_close_matches(name.lower().rpartition("/")[2], names, n=3, cutoff=0.5)
    hint = "; the closest known names are " + ", ".join(names[key] for key in close) if close else ""
    return f"{name!r} is neither a bundled model nor a Hugging Face folder or its config.json{hint}"
