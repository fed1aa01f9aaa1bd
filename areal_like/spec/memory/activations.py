"""What the layers of a rank keep for the backward passes to come. One layer: `layers.py`; which passes: `schedule.py`.

Recompute. "full" by groups (method uniform) keeps the input of each group of layers, and for the group at work all that
a layer keeps; method block does so for each of the first layers of a chunk and keeps the others whole. "selective"
leaves out what its parts compute again (`layers.py`), and has it back for the layer at work.

Beside the activations of a pass its output is kept (Megatron's `deallocate_pipeline_outputs` is off), except where it
is the logits, which are counted apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from areal_like.spec.memory.job import MemoryJob
from areal_like.spec.memory.layers import LayerMemory
from areal_like.spec.memory.schedule import Moment
from areal_like.spec.model import ModelSpec

__all__ = ["ChunkMemory", "chunk_memory", "kept"]


@dataclass(frozen=True)
class ChunkMemory:
    """Bytes of the layers of one stage, virtual stages each on their own, for one micro-batch.

    Attributes:
        kept: of one pass until its backward pass.
        again: beyond that, of what is recomputed at once.
        boundary: one layer's input.
        forward, backward: see `LayerMemory`.
        routing_tables: what the dispatchers keep after a pass.
    """

    kept: int
    again: int
    boundary: int
    forward: int
    backward: int
    routing_tables: int


def chunk_memory(spec: ModelSpec, job: MemoryJob, layers: range, kinds: dict[bool, LayerMemory]) -> ChunkMemory:
    """Some consecutive layers of a rank.

    Args:
        kinds: a layer with experts and one without, as far as the model has them (`layer_kinds`).
    """
    present = _count(spec, layers, kinds)
    boundary = present[0][1].boundary
    largest = max(layer.total for _, layer in present)
    if job.recompute != "full":
        held = sum(n * layer.kept for n, layer in present)
        again = max(layer.recomputed for _, layer in present)
    elif job.recompute_method == "uniform":
        held = -(-len(layers) // job.recompute_layers) * boundary
        again = min(job.recompute_layers, len(layers)) * largest
    else:
        first = range(layers.start, min(layers.stop, layers.start + job.recompute_layers))
        whole = _count(spec, range(first.stop, layers.stop), kinds)
        held = len(first) * boundary + sum(n * layer.total for n, layer in whole)
        again = max(layer.total for _, layer in _count(spec, first, kinds))
    return ChunkMemory(
        kept=held,
        again=again,
        boundary=boundary,
        forward=max(layer.forward for _, layer in present),
        backward=max(layer.backward for _, layer in present),
        routing_tables=sum(n * layer.routing_tables for n, layer in present),
    )


def kept(chunks: Sequence[ChunkMemory], moment: Moment, *, has_head: bool) -> int:
    """Bytes of the activations of all passes that wait.

    Args:
        has_head: the last chunk is the end of the model.
    """
    total = 0
    for number, (waiting, chunk) in enumerate(zip(moment.waiting, chunks, strict=True)):
        is_end = has_head and number == len(chunks) - 1
        total += waiting * (chunk.kept + (0 if is_end else chunk.boundary))
    return total


def _count(spec: ModelSpec, layers: range, kinds: dict[bool, LayerMemory]) -> list[tuple[int, LayerMemory]]:
    dense = sum(layer in layers for layer in spec.dense_layers) if spec.is_moe else len(layers)
    return [(n, kinds[experts]) for n, experts in ((len(layers) - dense, True), (dense, False)) if n]
