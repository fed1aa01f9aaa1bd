"""AL6: predicted memory of each rank against its GPU, and of each node against the host."""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil
from typing import Any

from areal_like.alloc.diagnostics import Severity
from areal_like.preflight.continuing import is_on
from areal_like.preflight.flow import requests_per_replica
from areal_like.preflight.job import GIB, Job, Role
from areal_like.preflight.memory_options import memory_options
from areal_like.preflight.offloading import offload_of
from areal_like.preflight.registry import Finding, example, rule
from areal_like.preflight.rules.batches import answers_an_update, full_groups, longest_sequence, room
from areal_like.spec.memory import MemoryJob, MemoryPlan, predict

SHOWN = 3
"""Parts of a phase that a message names, the largest first."""


@rule(
    "AL601",
    summary="a model needs more memory than a GPU has",
    why="Weights, gradients, optimizer, activations and logits of the fullest rank in its fullest phase, with"
    " micro-batches at their token budget, and what other roles keep on the same GPU. `areal-like explain`"
    " prints all of it. Where nobody said how much memory a GPU has, 80 GiB are assumed and the finding is a warning.",
    bad=example("actor.path=Qwen/Qwen3-30B-A3B", cluster="gpus=8,memory=80GiB"),
    good=example(
        "actor.path=Qwen/Qwen3-30B-A3B",
        "actor.backend=megatron:d2t4p2e8",
        "rollout.backend=sglang:d2t8",
        cluster="nodes=4,gpus=8,memory=80GiB",
    ),
    curable=True,
)
def gpu_memory(job: Job) -> Iterator[Finding]:
    for role in _predictable(job):
        plan = _plan(job, role)
        if plan is None:
            continue
        rank = max(plan.ranks, key=lambda rank: max(p.total for p in rank.phases if p.name != "rollout"))
        phase = max((p for p in rank.phases if p.name != "rollout"), key=lambda p: p.total)
        parts = phase.parts | _others(job, role)
        needed, present = sum(parts.values()), job.cluster.gpu_memory_bytes
        if needed > present:
            said = f"{role.name} needs {_gib(needed)} in its {phase.name} ({_largest(parts)})"
            message = f"{said}; a GPU has {_gib(present)}"
            hint = "more ranks, gradient_checkpointing, or a lower mb_spec.max_tokens_per_mb"
            yield Finding(message, hint, "", role=role, severity=_severity(job))


@rule(
    "AL602",
    summary="the rollout engine does not fit on a GPU",
    why="Its weights, the cache of one answer as long as it may be, and what a trainer keeps on the same GPU. The cache"
    " of more answers takes what is left.",
    bad=example("actor.path=Qwen/Qwen3-30B-A3B", cluster="nodes=4,gpus=8,memory=48GiB"),
    good=example(cluster="gpus=8,memory=48GiB"),
    curable=True,
)
def rollout_memory(job: Job) -> Iterator[Finding]:
    actor, rollout = job.role("actor"), job.role("rollout")
    if actor is None or rollout is None or actor not in _predictable(job):
        return
    plan = _plan(job, actor)
    ranks = [] if plan is None else [rank for rank in plan.everything for p in rank.phases if p.name == "rollout"]
    if not ranks:
        return
    phase = max((rank.phase("rollout") for rank in ranks), key=lambda p: p.total)
    present = job.cluster.gpu_memory_bytes
    if phase.total > present:
        message = f"generation needs {_gib(phase.total)} ({_largest(phase.parts)}); a GPU has {_gib(present)}"
        hint = "a smaller model or larger GPUs, t where the backend has it, or GPUs apart from the trainer's"
        yield Finding(message, hint, "", role=rollout, severity=_severity(job))


@rule(
    "AL603",
    summary="a node has too little host memory",
    why="Checkpoints and weight transfers pass through the memory of the host; when it is full the kernel ends a"
    " process without a word.",
    bad=example("actor.path=Qwen/Qwen3-30B-A3B", cluster="gpus=8,memory=80GiB,host-memory=16GiB"),
    good=example(cluster="gpus=8,memory=80GiB,host-memory=1TiB"),
)
def host_memory(job: Job) -> Iterator[Finding]:
    present = job.cluster.host_memory_bytes
    for role in _predictable(job) if present is not None else ():
        plan = _plan(job, role)
        if plan is None or not plan.host or present is None:
            continue
        phase, needed = max(plan.host.items(), key=lambda item: item[1])
        if needed > present:
            message = f"{role.name} needs {_gib(needed)} of host memory on a node ({phase}); it has {_gib(present)}"
            yield Finding(message, "spread the ranks over more nodes", "", role=role)


def _predictable(job: Job) -> list[Role]:
    """Training roles on GPUs whose layout can hold the model at all."""
    if job.config is None or not job.on_gpus:
        return []
    return [
        role
        for role in job.running()
        if role.trains and role.spec is not None and role.allocation.pp * role.allocation.vpp <= role.spec.num_layers
    ]


def _plan(job: Job, role: Role) -> MemoryPlan | None:
    assert job.config is not None and role.spec is not None
    longest, fits, section = longest_sequence(job.config)[0], room(role), role.section
    sequences = max(1, ceil(answers_an_update(job.config) / role.allocation.dp))
    tokens = fits if fits else longest * ceil(sequences / (section.mb_spec.n_mbs or 1))
    trained = role.name == "actor" and section.optimizer is not None
    memory_job = MemoryJob(
        micro_tokens=max(1, tokens),
        seq=max(1, min(longest, tokens)),
        micro_batches=full_groups(role, max(section.mb_spec.n_mbs or 1, ceil(sequences * longest / max(1, tokens)))),
        **memory_options(section, trained=trained),
        offload=frozenset(part for part, away in vars(offload_of(job.config, section)).items() if away),
        gpu_memory=job.cluster.gpu_memory_bytes,
        gpus_per_node=job.cluster.gpus_per_node,
        recovery=trained and is_on(job.config.recover),
        **_rollout(job, role),
    )
    try:
        return predict(role.spec, role.allocation, memory_job)
    except ValueError:  # the layers cannot fill the stages so, which is a finding of its own
        return None


def _severity(job: Job) -> Severity:
    return "error" if job.cluster.memory_is_known else "warning"


def _rollout(job: Job, role: Role) -> dict[str, Any]:
    """The rollout engine as a part of the actor's job."""
    rollout = job.role("rollout")
    assert job.config is not None
    if role.name != "actor" or rollout is None:
        return {}
    sequences = requests_per_replica(job.config, rollout.allocation.dp)
    both = role.allocation.world_size + rollout.allocation.world_size
    together = bool(rollout.backend.engine) and both > job.cluster.gpus  # a server never shares: see AL403
    return {"rollout": rollout.allocation, "colocated": together, "rollout_sequences": max(1, sequences)}


def _others(job: Job, role: Role) -> dict[str, int]:
    """What other roles keep on the GPUs of the actor while it works: the reference's weights, and the rollout's."""
    if role.name != "actor":
        return {}
    found = {}
    reference = next((r for r in _predictable(job) if r.name == "ref"), None)
    if reference is not None and (plan := _plan(job, reference)) is not None:
        found["reference"] = max(min(p.total for p in rank.phases) for rank in plan.ranks)
    plan = _plan(job, role)
    if plan is not None and plan.job.colocated:
        found["rollout weights"] = max(rank.phase("rollout").parts["rollout weights"] for rank in plan.ranks)
    return found


def _gib(number: int) -> str:
    return f"{number / GIB:.1f} GiB"


def _largest(parts: dict[str, int]) -> str:
    ordered = sorted(parts.items(), key=lambda part: -part[1])
    return ", ".join(f"{name} {size / GIB:.1f}" for name, size in ordered[:SHOWN])
