"""All layouts of a model on a number of GPUs that arithmetic does not rule out at once."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from math import isqrt
from typing import NamedTuple

from areal_like.alloc import ModelAllocation
from areal_like.spec import ModelSpec

__all__ = ["Layout", "divisors", "training_layouts", "virtual_stages"]

CHUNKS = (2, 4)
"""Sizes of v that are tried: more chunks mean more sends for an ever smaller bubble."""
CONTEXT_PIECE = 4096
"""Fewest tokens of a sequence on a rank of c: below, exchanging keys and values costs more than it saves (AL703)."""


class Layout(NamedTuple):
    """Parallel sizes, before they are made an allocation."""

    dp: int
    tp: int
    pp: int
    cp: int
    ep: int
    etp: int
    vpp: int

    def allocation(self, backend: str) -> ModelAllocation:
        return ModelAllocation(
            backend=backend,
            name=None,
            data_parallel_size=self.dp,
            tensor_parallel_size=self.tp,
            pipeline_parallel_size=self.pp,
            context_parallel_size=self.cp,
            expert_parallel_size=self.ep,
            expert_tensor_parallel_size=self.etp,
            virtual_pipeline_parallel_size=self.vpp,
        )


def training_layouts(
    spec: ModelSpec, gpus: int, *, letters: str, sequences: int, sequence_length: int, gpus_per_node: int
) -> Iterator[Layout]:
    """Layouts of exactly `gpus` ranks in the given letters.

    Left out, besides what cannot divide: more replicas than sequences, t or the experts' t over more than a node, and
    c that leaves a rank only a short piece of a sequence.
    """
    for p in divisors(gpus) if "p" in letters else (1,):
        if p > spec.num_layers:
            continue
        for t in divisors(gpus // p) if "t" in letters else (1,):
            if t > gpus_per_node or spec.num_attention_heads % t:
                continue
            for c in divisors(gpus // (p * t)) if "c" in letters else (1,):
                if c > 1 and sequence_length < CONTEXT_PIECE * c:
                    break
                d = gpus // (p * t * c)
                if d > sequences:
                    continue
                for e, etp in _expert_sizes(spec, d * t * c, letters, gpus_per_node):
                    for v in virtual_stages(spec.num_layers, p, letters):
                        yield Layout(d, t, p, c, e, etp, v)


def _expert_sizes(spec: ModelSpec, ranks: int, letters: str, gpus_per_node: int) -> Iterator[tuple[int, int]]:
    """(e, the experts' t) that share out the ranks of a stage."""
    if not spec.is_moe or "e" not in letters:
        yield 1, 1
        return
    for e in divisors(ranks):
        if spec.num_experts % e:
            continue
        for etp in divisors(ranks // e):
            if etp <= gpus_per_node and spec.moe_intermediate_size % etp == 0:
                yield e, etp


def virtual_stages(layers: int, stages: int, letters: str) -> Iterator[int]:
    """Sizes of v."""
    yield 1
    if "v" in letters and stages > 1:
        yield from (v for v in CHUNKS if v * stages <= layers)


@cache
def divisors(number: int) -> tuple[int, ...]:
    """In ascending order."""
    small = [n for n in range(1, isqrt(number) + 1) if number % n == 0]
    return tuple(sorted({*small, *(number // n for n in small)}))
