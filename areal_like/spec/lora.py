"""Low-rank adapters as numbers: which matrices get one, under which names, and what each rank holds of them.

An adapter of a matrix W `[outputs, inputs]` is A `[rank, inputs]` and B `[outputs, rank]`; the model computes
W x + alpha / rank * B A x (arXiv:2106.09685). Megatron-Core keeps queries, keys and values in one matrix, gate and up
projection in another: the parts share A, and each has its rows of B.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from areal_like.alloc import ModelAllocation
from areal_like.spec.model import ModelSpec

__all__ = ["LORA_TARGETS", "AdapterElements", "AdapterMatrix", "adapter_elements", "adapter_matrices", "lora_targets"]

LORA_TARGETS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
"""Megatron-Core's names of the matrices that can get an adapter."""
ALL_LINEAR = "all-linear"
COLUMN_PARALLEL = ("linear_qkv", "linear_fc1")
"""Their rows are split over tensor ranks, those of the others by columns."""


@dataclass(frozen=True)
class AdapterMatrix:
    """One matrix of Megatron-Core that gets an adapter; whole sizes.

    Attributes:
        layer: number in the model.
        expert: number in the layer; None outside of experts.
        target: one of `LORA_TARGETS`.
        parts: the modules of Transformers that it holds, each with its rows of B.
    """

    layer: int
    expert: int | None
    target: str
    inputs: int
    parts: tuple[tuple[str, int], ...]

    @property
    def outputs(self) -> int:
        return sum(rows for _, rows in self.parts)

    @property
    def is_column_parallel(self) -> bool:
        return self.target in COLUMN_PARALLEL


class AdapterElements(NamedTuple):
    """Numbers in the adapters of one rank. `experts` are reduced over expert-data-parallel ranks, `dense` over the
    data-parallel ones."""

    dense: int
    experts: int

    @property
    def total(self) -> int:
        return self.dense + self.experts


def lora_targets(names: Iterable[str]) -> tuple[str, ...]:
    """`target_modules` with all-linear written out, in the order of `LORA_TARGETS`.

    Raises:
        ValueError: a name is not known; the message says which there are.
    """
    wanted = set(names)
    unknown = sorted(wanted - set(LORA_TARGETS) - {ALL_LINEAR})
    if unknown:
        what = "the router cannot get an adapter" if "router" in unknown else f"no matrix is called {unknown[0]!r}"
        raise ValueError(f"{what}; there are {', '.join(LORA_TARGETS)} and {ALL_LINEAR} for these four")
    return LORA_TARGETS if ALL_LINEAR in wanted else tuple(t for t in LORA_TARGETS if t in wanted)


def adapter_matrices(spec: ModelSpec, names: Iterable[str], layers: Iterable[int] | None = None) -> list[AdapterMatrix]:
    """The matrices of `layers` (all when None) that get an adapter, in the order of the model.

    Raises:
        ValueError: as `lora_targets`.
    """
    targets = lora_targets(names)
    numbers = range(spec.num_layers) if layers is None else layers
    return [matrix for layer in numbers for matrix in _layer(spec, layer) if matrix.target in targets]


def adapter_elements(
    spec: ModelSpec, allocation: ModelAllocation, names: Iterable[str], rank: int, layers: Iterable[int]
) -> AdapterElements:
    """Numbers in the adapters of a rank that holds `layers`: A and B are both split over the (expert) tensor ranks.

    Args:
        names: `target_modules`.
        rank: `lora_rank`; a multiple of the tensor-parallel sizes.
    """
    dense = experts = 0
    for matrix in adapter_matrices(spec, names, layers):
        elements = rank * (matrix.inputs + matrix.outputs)
        if matrix.expert is None:
            dense += elements // allocation.tp
        else:
            experts += elements // allocation.etp
    return AdapterElements(dense, experts // allocation.ep)


def _layer(spec: ModelSpec, layer: int) -> Iterator[AdapterMatrix]:
    prefix = f"model.layers.{layer}"
    attention = f"{prefix}.self_attn"
    heads, groups = spec.num_attention_heads * spec.head_dim, spec.num_key_value_heads * spec.head_dim
    qkv = (f"{attention}.q_proj", heads), (f"{attention}.k_proj", groups), (f"{attention}.v_proj", groups)
    yield AdapterMatrix(layer, None, "linear_qkv", spec.hidden_size, qkv)
    yield AdapterMatrix(layer, None, "linear_proj", heads, ((f"{attention}.o_proj", spec.hidden_size),))
    if not spec.is_moe or layer in spec.dense_layers:
        yield from _mlp(spec, layer, None, f"{prefix}.mlp", spec.intermediate_size)
        return
    for expert in range(spec.num_experts):
        yield from _mlp(spec, layer, expert, f"{prefix}.mlp.experts.{expert}", spec.moe_intermediate_size)


def _mlp(spec: ModelSpec, layer: int, expert: int | None, name: str, width: int) -> Iterator[AdapterMatrix]:
    gate_up = (f"{name}.gate_proj", width), (f"{name}.up_proj", width)
    yield AdapterMatrix(layer, expert, "linear_fc1", spec.hidden_size, gate_up)
    yield AdapterMatrix(layer, expert, "linear_fc2", width, ((f"{name}.down_proj", spec.hidden_size),))
