"""What the stages of a pipeline hold, as sums that a layout only divides: computed once a model and pipeline.

Layers go to stages as in the engines (`spec.stage_sizes`).
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from areal_like.preflight.step_job import Sizes
from areal_like.spec import ModelSpec, stage_sizes
from areal_like.spec.stages import StageCount

__all__ = ["StageTerms", "stage_terms"]


class StageTerms(NamedTuple):
    """One stage, all chunks that a rank holds of an interleaved pipeline together.

    Attributes:
        flops: forward operations of its layers for one token.
        layers: layers.
        dense_mlps: MLPs that t cuts: of dense layers, and shared experts.
        moe_layers: layers with routed experts.
        dense_parameters: parameters that t cuts, embedding and vocabulary projection included.
        expert_parameters: parameters of routed experts.
        embedding, head: whether it looks tokens up, and whether it projects on the vocabulary.
    """

    flops: float
    layers: int
    dense_mlps: int
    moe_layers: int
    dense_parameters: int
    expert_parameters: int
    embedding: bool
    head: bool

    def parameters(self, sizes: Sizes) -> tuple[float, float]:
        """(dense, expert) parameters of a rank. Norms and routers, which every rank of t holds, count as cut."""
        return self.dense_parameters / sizes.tp, self.expert_parameters / (sizes.ep * sizes.etp)


@lru_cache(maxsize=1024)
def stage_terms(spec: ModelSpec, sequence_length: int, stages: int, chunks: int) -> tuple[StageTerms, ...]:
    """The stages of `stages` pipeline ranks with `chunks` chunks each; chunk i of rank r is number i * stages + r.

    A causal token attends to half the sequence on average.

    Raises:
        ValueError: fewer layers than chunks.
    """
    sizes = stage_sizes(spec, StageCount(stages, chunks))
    layers = _layers(spec, sequence_length)
    held: list[list[StageTerms]] = [[] for _ in range(stages)]
    first = 0
    for chunk, size in enumerate(sizes):
        held[chunk % stages] += layers[first : first + size]
        first += size
    embedding = spec.vocab_size * spec.hidden_size
    result = []
    for rank, terms in enumerate(held):
        is_first, is_last = rank == 0, rank == stages - 1
        stage = StageTerms(*(sum(column) for column in zip(*terms, strict=True)))
        copies = 1 if is_first and is_last and spec.tied_embeddings else is_first + is_last
        result.append(
            stage._replace(
                dense_parameters=stage.dense_parameters + copies * embedding, embedding=is_first, head=is_last
            )
        )
    return tuple(result)


@lru_cache(maxsize=64)
def _layers(spec: ModelSpec, sequence_length: int) -> list[StageTerms]:
    """Each layer as a stage of its own, without embedding and vocabulary projection."""
    found = []
    for layer in range(spec.num_layers):
        parts = spec.layer_breakdown(layer)
        found.append(
            StageTerms(
                flops=spec.layer_flops(sequence_length // 2, layer=layer),
                layers=1,
                dense_mlps=int(parts.mlp + parts.shared_experts > 0),
                moe_layers=int(parts.experts > 0),
                dense_parameters=parts.total - parts.experts,
                expert_parameters=parts.experts,
                embedding=False,
                head=False,
            )
        )
    return found
