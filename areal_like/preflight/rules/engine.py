"""AL2: what the engines of this version can do. Another version may know more; see AL3 for what no engine could do."""

from __future__ import annotations

from collections.abc import Iterator

from areal_like.alloc.diagnostics import Severity
from areal_like.preflight.job import Job, Role
from areal_like.preflight.registry import Finding, example, layout_rule, rule


@rule(
    "AL205",
    summary="the backend has no engine in this version",
    why="Its strings parse and its layouts are checked, so that a file for a cluster can be examined here; a run with"
    " it is refused before anything starts.",
    bad=example("rollout.backend=sglang:d4"),
    good=example("rollout.backend=huggingface:d4"),
)
def has_engine(job: Job) -> Iterator[Finding]:
    for role in job.roles:
        if not role.backend.engine:
            other = "megatron" if role.trains else "huggingface"
            message = f"backend {role.backend.name!r} is declared but has no engine in this version"
            yield Finding(message, f"use {other}", "backend", role=role)


@layout_rule(
    "AL213",
    summary="t is larger than the number of key-value heads",
    why="Each rank would hold a copy of a key-value head. Megatron-Core and the inference servers copy heads when t is"
    " a multiple of their number; trainers that cut tensors by a mesh stop in a reshape.",
    bad=example("actor.backend=archon:t16", "cluster.n_gpus_per_node=20"),
    good=example("actor.backend=megatron:t16", "cluster.n_gpus_per_node=20"),
)
def copied_key_value_heads(role: Role) -> Iterator[Finding]:
    assert role.spec is not None
    tp, groups = role.allocation.tp, role.spec.num_key_value_heads
    copies = groups and tp > groups and tp % groups == 0 and role.spec.num_attention_heads % tp == 0
    if role.trains and copies and role.allocation.backend != "megatron":
        message = f"t{tp} needs copies of the {groups} key-value heads, which {role.allocation.backend} does not make"
        yield Finding(message, f"use t{groups} or less", "t")


@rule(
    "AL214",
    summary="no way for weights from the trainer to the rollout engine",
    why="New weights reach the rollout engine by a transport that both backends know. Without one the rollouts would"
    " stay those of the first policy for ever: an error between two backends that have engines.",
    bad=example("actor.backend=megatron:d4", "rollout.backend=vllm:d4"),
    good=example("actor.backend=megatron:d4", "rollout.backend=huggingface:d4"),
    severity="info",
)
def weight_transport(job: Job) -> Iterator[Finding]:
    actor, rollout = job.role("actor"), job.role("rollout")
    if actor is None or rollout is None:
        return
    ours, theirs = (role.backend.capabilities.weight_transports for role in (actor, rollout))
    if not ours & theirs:
        message = f"{actor.backend.name} and {rollout.backend.name} share no weight transport in this version"
        severity: Severity = "error" if actor.backend.engine and rollout.backend.engine else "info"
        yield Finding(message, "choose backends that share one", "backend", role=rollout, severity=severity)
