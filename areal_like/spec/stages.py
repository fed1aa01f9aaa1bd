"""A model's layers on its pipeline stages: the one split that the engines build and the check predicts."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple, Protocol

from areal_like.spec.model import ModelSpec
from areal_like.spec.pipeline import split_layers

__all__ = ["ATTENDED", "PipelineLayoutError", "StageCount", "layer_costs", "layout_faults", "stage_sizes"]

ATTENDED = 1024
"""Tokens that a token attends to on average when layers are weighed: those of causal sequences of 2,048.

An engine does not know how long its sequences will be. With none at all, layers with a sliding window and layers of
linear attention would weigh as much as those that attend to everything.
"""


class PipelineLayoutError(ValueError):
    """A `pipeline_layout` that is not a split of this model over these stages; the message says all that is wrong."""


class StageCount(NamedTuple):
    """Stages without an allocation."""

    pp: int
    vpp: int = 1


class _Stages(Protocol):
    """Whatever has the two sizes that make stages; `ModelAllocation` does."""

    @property
    def pp(self) -> int: ...
    @property
    def vpp(self) -> int: ...


def stage_sizes(spec: ModelSpec, sizes: _Stages, layout: Sequence[int] | None = None) -> list[int]:
    """Layers of each stage in the order of the model; rank i of p holds stages i, i + p, ... of its p x v.

    Args:
        layout: the split, as `megatron.pipeline_layout` has it; None balances compute: each layer by its own kind, the
            vocabulary projection on the last stage, nothing for the embedding.

    Raises:
        PipelineLayoutError: the layout does not fit.
        ValueError: fewer layers than stages.
    """
    if layout is None:
        return list(_balanced(spec, sizes.pp * sizes.vpp))
    if faults := layout_faults(spec, sizes, layout):
        raise PipelineLayoutError(f"pipeline_layout {list(layout)}: {'; '.join(faults)}{_example(spec, sizes)}")
    return list(layout)


def layout_faults(spec: ModelSpec, sizes: _Stages, layout: Sequence[int]) -> list[str]:
    """Everything that is wrong with a layout; empty when nothing is."""
    stages = sizes.pp * sizes.vpp
    written = f"p{sizes.pp}" + (f"v{sizes.vpp}" if sizes.vpp > 1 else "")
    faults = []
    if len(layout) != stages:
        faults.append(f"it has {len(layout)} stages, {written} has {stages}")
    if empty := [str(number) for number, layers in enumerate(layout) if layers < 1]:
        faults.append(f"stage {', '.join(empty)} has no layer")
    if sum(layout) != spec.num_layers:
        faults.append(f"it has {sum(layout)} layers, the model {spec.num_layers}")
    return faults


def _example(spec: ModelSpec, sizes: _Stages) -> str:
    stages = sizes.pp * sizes.vpp
    return f"; for example {list(_balanced(spec, stages))}" if stages <= spec.num_layers else ""


@lru_cache(maxsize=256)
def layer_costs(spec: ModelSpec) -> tuple[float, ...]:
    """Forward operations of each layer for one token."""
    if not (spec.dense_layers or spec.linear_layers or spec.sliding_layers):
        return (spec.layer_flops(ATTENDED, 0),) * spec.num_layers
    return tuple(spec.layer_flops(ATTENDED, layer) for layer in range(spec.num_layers))


@lru_cache(maxsize=1024)
def _balanced(spec: ModelSpec, stages: int) -> tuple[int, ...]:
    return tuple(split_layers(layer_costs(spec), stages, head_cost=spec.head_flops()))
