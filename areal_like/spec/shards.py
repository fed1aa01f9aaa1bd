"""What each rank holds of each parameter, gradient and optimizer state. Exact integers, as the Megatron engine does it.

- Layers go to stages by `stage_sizes`; the first stage holds the embedding, the last the final norm and the output
  layer, which a tied model repeats there when there is more than one stage.
- Tensor ranks split the vocabulary (padded to a multiple of t), QKV and gate-up by rows, the two output projections by
  columns. Norms and the router are whole on every rank. Expert ranks split the experts, expert tensor ranks each one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from areal_like.alloc import ModelAllocation
from areal_like.spec.model import SUPPORTED_ARCHITECTURES, ModelSpec
from areal_like.spec.stages import stage_sizes

__all__ = [
    "ParameterShard",
    "RankClass",
    "StageCounts",
    "chunk_parameters",
    "has_expert_buffer",
    "rank_classes",
    "rank_layers",
    "rank_parameters",
    "stage_counts",
]

Kind = Literal["embedding", "dense", "expert", "output"]
Split = tuple[int, ...] | None
"""Layers of each stage as `megatron.pipeline_layout` has them; None balances compute."""


@dataclass(frozen=True)
class ParameterShard:
    """What one rank holds of one parameter.

    Attributes:
        name: as Megatron's local layers call it, with layer and expert numbers of the whole model.
        elements: numbers on this rank.
        kind: what it is part of.
        shared: the embedding and its copy on the last stage of a tied model; they get a bucket of their own.
    """

    name: str
    elements: int
    kind: Kind
    shared: bool = False


@dataclass(frozen=True)
class StageCounts:
    """Elements that each rank of a stage holds, by kind."""

    embedding: int
    dense: int
    expert: int
    output: int

    @property
    def total(self) -> int:
        return self.embedding + self.dense + self.expert + self.output


@dataclass(frozen=True)
class RankClass:
    """Ranks that hold the same: those of one stage. (Their tensor and expert shards have equal sizes.)

    Attributes:
        first_rank: the lowest of them.
        ranks: how many there are.
        layers: numbers of the layers they hold; one range for each virtual stage.
    """

    stage: int
    first_rank: int
    ranks: int
    layers: tuple[range, ...]
    counts: StageCounts

    @property
    def num_layers(self) -> int:
        return sum(map(len, self.layers))


def rank_layers(spec: ModelSpec, allocation: ModelAllocation, stage: int, layout: Split = None) -> tuple[range, ...]:
    """Numbers of the layers on the ranks of a stage: virtual stages `stage`, `stage + p`, ...

    Here and below `layout` is the split over the stages, as `stage_sizes` takes it.

    Raises:
        ValueError: the layers cannot fill the stages, or the layout does not fit.
    """
    sizes = stage_sizes(spec, allocation, layout)
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return tuple(range(starts[i], starts[i] + sizes[i]) for i in range(stage, len(sizes), allocation.pp))


@lru_cache(maxsize=4096)
def rank_classes(spec: ModelSpec, allocation: ModelAllocation, layout: Split = None) -> tuple[RankClass, ...]:
    """The classes of ranks of an allocation, first stage first."""
    in_stage = allocation.world_size // allocation.pp
    return tuple(
        RankClass(
            stage=stage,
            first_rank=stage * in_stage,
            ranks=in_stage,
            layers=rank_layers(spec, allocation, stage, layout),
            counts=stage_counts(spec, allocation, stage, layout),
        )
        for stage in range(allocation.pp)
    )


def stage_counts(spec: ModelSpec, allocation: ModelAllocation, stage: int, layout: Split = None) -> StageCounts:
    """Elements on each rank of a stage, without listing the parameters.

    Exact for the architectures that the engine trains. Of other families everything but norms and routers is counted
    as split over t.
    """
    layers = [layer for part in rank_layers(spec, allocation, stage, layout) for layer in part]
    if spec.architecture in SUPPORTED_ARCHITECTURES and not spec.dense_layers:
        dense = sum(n for _, n in _layer_dense(spec, allocation.tp)) * len(layers)
    else:
        parts = [spec.layer_breakdown(layer) for layer in layers]
        dense = sum(-(-(x.attention + x.mlp + x.shared_experts) // allocation.tp) + x.router + x.norms for x in parts)
    expert = 0
    if spec.is_moe:
        each = sum(n for _, n in _expert(spec, allocation.etp))
        expert = spec.num_experts // allocation.ep * each * sum(layer not in spec.dense_layers for layer in layers)
    table = _vocabulary(spec, allocation.tp) * spec.hidden_size
    first, last = stage == 0, stage == allocation.pp - 1
    has_output = last and not (spec.tied_embeddings and first)
    return StageCounts(
        embedding=table if first else 0,
        dense=dense + (spec.hidden_size if last else 0),
        expert=expert,
        output=table if has_output else 0,
    )


def rank_parameters(
    spec: ModelSpec, allocation: ModelAllocation, rank: int, layout: Split = None
) -> tuple[ParameterShard, ...]:
    """Every parameter of a rank, in the order in which Megatron's modules with local layers hold them.

    Raises:
        AllocationError: there is no such rank.
        ValueError: no engine trains this architecture, so there is no module to describe.
    """
    return tuple(parameter for chunk in chunk_parameters(spec, allocation, rank, layout) for parameter in chunk)


def chunk_parameters(
    spec: ModelSpec, allocation: ModelAllocation, rank: int, layout: Split = None
) -> tuple[tuple[ParameterShard, ...], ...]:
    """The same for each of the rank's modules: one, or with virtual stages v of them."""
    if spec.architecture not in SUPPORTED_ARCHITECTURES or spec.unsupported:
        raise ValueError(f"no engine of this version trains {spec.architecture!r} models of this kind")
    here = allocation.mesh().coordinates(rank)
    held = rank_layers(spec, allocation, here.pp, layout)
    return tuple(
        tuple(
            _parameters(
                spec,
                allocation,
                layers,
                here.ep,
                begins=here.pp == 0 and number == 0,
                ends=here.pp == allocation.pp - 1 and number == len(held) - 1,
            )
        )
        for number, layers in enumerate(held)
    )


def has_expert_buffer(spec: ModelSpec, allocation: ModelAllocation) -> bool:
    """Whether experts are reduced in groups of their own: they are placed otherwise than the rest."""
    return spec.is_moe and (allocation.ep > 1 or allocation.etp != allocation.tp)


def _parameters(
    spec: ModelSpec, allocation: ModelAllocation, layers: range, ep_index: int, *, begins: bool, ends: bool
) -> Iterator[ParameterShard]:
    """Of consecutive layers, and of what the beginning and the end of the model have besides."""
    tied = spec.tied_embeddings and allocation.pp > 1
    table = _vocabulary(spec, allocation.tp) * spec.hidden_size
    if begins:
        yield ParameterShard("embedding.word_embeddings.weight", table, "embedding", shared=tied)
    local_experts = spec.num_experts // allocation.ep if spec.is_moe else 0
    for layer in layers:
        prefix = f"decoder.layers.{layer}."
        for name, elements in _layer_dense(spec, allocation.tp):
            yield ParameterShard(prefix + name, elements, "dense")
        for expert in range(ep_index * local_experts, (ep_index + 1) * local_experts):
            for name, elements in _expert(spec, allocation.etp):
                yield ParameterShard(f"{prefix}mlp.experts.local_experts.{expert}.{name}", elements, "expert")
    if ends:
        yield ParameterShard("decoder.final_layernorm.weight", spec.hidden_size, "dense")
        if not (spec.tied_embeddings and begins):
            yield ParameterShard("output_layer.weight", table, "output", shared=tied)


def _vocabulary(spec: ModelSpec, tp: int) -> int:
    """Rows of the embedding on one tensor rank."""
    return -(-spec.vocab_size // tp)


def _layer_dense(spec: ModelSpec, tp: int) -> list[tuple[str, int]]:
    """Names and elements of everything in a layer but its experts."""
    hidden, width = spec.hidden_size, spec.head_dim * spec.num_attention_heads // tp
    qkv = spec.head_dim * (spec.num_attention_heads + 2 * spec.num_key_value_heads) // tp
    found = [
        ("input_layernorm.weight", hidden),
        ("self_attention.linear_proj.weight", width * hidden),
        ("self_attention.linear_qkv.weight", qkv * hidden),
    ]
    if spec.qkv_bias:
        found.append(("self_attention.linear_qkv.bias", qkv))
    if spec.qk_norm:
        found += [(f"self_attention.{x}_layernorm.weight", spec.head_dim) for x in "qk"]
    found.append(("pre_mlp_layernorm.weight", hidden))
    if spec.is_moe:
        found.append(("mlp.router.weight", spec.num_experts * hidden))
    else:
        up = spec.intermediate_size // tp * hidden
        found += [("mlp.linear_fc1.weight", 2 * up), ("mlp.linear_fc2.weight", up)]
    return found


def _expert(spec: ModelSpec, etp: int) -> list[tuple[str, int]]:
    up = spec.moe_intermediate_size // etp * spec.hidden_size
    return [("linear_fc1.weight", 2 * up), ("linear_fc2.weight", up)]
