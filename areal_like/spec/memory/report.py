"""A `MemoryPlan` as a table and as plain data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from areal_like.spec.memory.job import GIB, PARTS
from areal_like.spec.memory.recovery import checkpoint_bytes

if TYPE_CHECKING:
    from areal_like.spec.memory.plan import MemoryPlan, RankMemory

__all__ = ["render", "to_dict"]

ORDER = (
    "weights",
    "FP8 copies",
    "parameters as built",
    "gradients",
    "optimizer",
    "gradients in float32",
    "moments in float32",
    "rollout weights",
    "KV cache",
    "activations",
    "logits",
    "head gradients",
    "export",
    "batch",
    "workspaces",
    "CUDA context",
    "communicators",
)
"""Parts from the top of a table to its bottom."""


def render(plan: MemoryPlan) -> str:
    """One block for each class of ranks: phases down, parts across, in GiB."""
    job, gpus = plan.job, plan.allocation.world_size
    lines = [
        f"{plan.allocation}: {gpus} GPU{'s' * (gpus > 1)}, {job.dtype}, micro-batches of {job.micro_tokens:,} tokens "
        f"({job.micro_batches} a step), sequences of {job.seq:,}, recompute {job.recompute}",
        "stages: " + " + ".join(map(str, plan.split)) + f" = {plan.spec.num_layers} layers",
    ]
    for rank in _distinct(plan):
        lines += ["", _title(rank, plan), *_table(rank)]
    if plan.rollout is not None:
        lines += ["", f"rollout {job.rollout}: each GPU", *_table(plan.rollout)]
    worst = plan.worst
    place = "rollout GPUs" if worst.ranks is None else _span(worst)
    lines += ["", f"worst: {place} in {worst.peak.name}, {_gib(plan.peak)} GiB"]
    if job.gpu_memory is not None:
        room = job.gpu_memory - plan.peak
        verdict = f"fits, {_gib(room)} GiB to spare" if room >= 0 else f"does NOT fit: {_gib(-room)} GiB too much"
        lines[-1] += f" of {_gib(job.gpu_memory)}: {verdict}"
    if job.offload:
        names = ", ".join(part for part in PARTS if part in job.offload)
        lines.append(f"offload of {names}: {_gib(_freed(plan))} GiB of the fullest GPU are free while the model rests")
    lines.append(f"Megatron-LM's formula (weights, optimizer, activations): {_gib(plan.megatron)} GiB")
    lines.append(
        "host memory of the first node: "
        + ", ".join(f"{name} {_gib(size)}" for name, size in plan.host.items())
        + " GiB"
    )
    if stored := checkpoint_bytes(plan.spec, plan.allocation, job):
        lines.append(f"a recovery checkpoint: {_gib(stored)} GiB on disk")
    return "\n".join(lines)


def to_dict(plan: MemoryPlan) -> dict[str, Any]:
    """Bytes throughout."""
    worst = plan.worst
    return {
        "allocation": str(plan.allocation),
        "stages": plan.split,
        "ranks": [_rank_dict(rank) for rank in plan.ranks],
        "rollout": None if plan.rollout is None else _rank_dict(plan.rollout),
        "worst": {
            "where": "rollout" if worst.ranks is None else _span(worst),
            "phase": worst.peak.name,
            "bytes": plan.peak,
        },
        "gpu_memory": plan.job.gpu_memory,
        "fits": plan.fits,
        "megatron_formula": plan.megatron,
        "host": plan.host,
        "recovery_checkpoint": checkpoint_bytes(plan.spec, plan.allocation, plan.job),
    }


def _freed(plan: MemoryPlan) -> int:
    """Bytes that offloading takes off the GPU that holds most of the model."""
    rows = [PARTS[part] for part in plan.job.offload] + (["FP8 copies"] if "parameters" in plan.job.offload else [])
    return max(
        sum(rank.phase("update" if plan.job.optimizer else "load").parts[row] for row in rows) for rank in plan.ranks
    )


def _rank_dict(rank: RankMemory) -> dict[str, Any]:
    found: dict[str, Any] = {
        phase.name: {"total": phase.total, "allocated": phase.allocated, "parts": phase.parts} for phase in rank.phases
    }
    if rank.ranks is None:
        return {"phases": found}
    counts = rank.ranks.counts
    return {
        "stage": rank.ranks.stage,
        "first_rank": rank.ranks.first_rank,
        "count": rank.ranks.ranks,
        "layers": [[layers.start, layers.stop] for layers in rank.ranks.layers],
        "parameters": {
            "embedding": counts.embedding,
            "dense": counts.dense,
            "expert": counts.expert,
            "output": counts.output,
            "total": counts.total,
        },
        "phases": found,
    }


def _distinct(plan: MemoryPlan) -> list[RankMemory]:
    """The classes worth a table: all of a few stages, else the first, the last and the fullest."""
    if len(plan.ranks) <= 4:
        return list(plan.ranks)
    fullest = max(plan.ranks, key=lambda rank: rank.peak.total)
    chosen = [plan.ranks[0], fullest, plan.ranks[-1]]
    return [rank for i, rank in enumerate(chosen) if rank not in chosen[:i]]


def _title(rank: RankMemory, plan: MemoryPlan) -> str:
    ranks = rank.ranks
    assert ranks is not None  # only the rollout's table has none
    layers = ", ".join(f"{r.start}-{r.stop - 1}" for r in ranks.layers)
    return (
        f"stage {ranks.stage} of {plan.allocation.pp}: {_span(rank)}, layers {layers}, "
        f"{ranks.counts.total:,} parameters each"
    )


def _span(rank: RankMemory) -> str:
    ranks = rank.ranks
    assert ranks is not None
    last = ranks.first_rank + ranks.ranks - 1
    return f"rank {last}" if ranks.ranks == 1 else f"ranks {ranks.first_rank}-{last}"


def _table(rank: RankMemory) -> list[str]:
    """Parts down, phases across."""
    names = [part for part in ORDER if any(phase.parts.get(part) for phase in rank.phases)]
    width = max(map(len, [*names, "total"]))
    heads = [phase.name for phase in rank.phases]
    lines = ["  " + " " * width + "".join(f"  {head:>{max(8, len(head))}}" for head in heads)]
    for name in names:
        lines.append(_row(name, width, heads, [phase.parts.get(name, 0) for phase in rank.phases]))
    lines.append(_row("total", width, heads, [phase.total for phase in rank.phases]))
    return lines


def _row(name: str, width: int, heads: list[str], sizes: list[int]) -> str:
    cells = "".join(
        f"  {_gib(size) if size else '':>{max(8, len(head))}}" for head, size in zip(heads, sizes, strict=True)
    )
    return (f"  {name:<{width}}" + cells).rstrip()


def _gib(size: int) -> str:
    return f"{size / GIB:.2f}"
