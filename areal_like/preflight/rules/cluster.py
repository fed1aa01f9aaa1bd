"""AL4: the roles against the machines."""

from __future__ import annotations

from collections.abc import Iterator

from areal_like.preflight.job import ROLES, Job, Role
from areal_like.preflight.registry import Finding, example, rule


@rule(
    "AL401",
    summary="a role needs more GPUs than there are",
    why="Every rank of a GPU job has a GPU of its own. Schedulers that count round the machine again start two ranks on"
    " one GPU instead, which ends in a duplicate-GPU error of NCCL or out of memory.",
    bad=example("actor.backend=megatron:d16"),
    good=example("actor.backend=megatron:d8", "rollout.backend=huggingface:d8"),
    curable=True,
)
def enough_gpus(job: Job) -> Iterator[Finding]:
    if not job.on_gpus:
        return
    for role in job.running():
        needed, present = role.allocation.world_size, job.cluster.gpus
        if needed > present and role.unresolved is None:
            message = f"{role.allocation} needs {needed} GPUs; the cluster has {present}"
            help = "lower the layout, or raise cluster.n_nodes or cluster.n_gpus_per_node"
            yield Finding(message, help, "", role=role)


@rule(
    "AL403",
    summary="roles that live at the same time need more GPUs than there are",
    why="A server keeps its GPUs for the whole run, and the trainer cannot have the same ones: separate roles add."
    " Colocated roles share, and need what the larger one needs.",
    bad=example("rollout.backend=sglang:d6", "actor.backend=megatron:d4"),
    good=example("rollout.backend=sglang:d4", "actor.backend=megatron:d4"),
    curable=True,
)
def enough_gpus_together(job: Job) -> Iterator[Finding]:
    apart = _apart(job)
    needed = sum(role.allocation.world_size for role in apart)
    if not job.on_gpus or not needed > job.cluster.gpus:
        return
    rollout = job.role("rollout")
    if rollout is not None and not rollout.backend.engine and not any(_alone_too_large(job, r) for r in apart):
        parts = " + ".join(f"{role.allocation.world_size} ({role.name})" for role in apart)
        message = f"{parts} = {needed} GPUs at the same time; the cluster has {job.cluster.gpus}"
        yield Finding(message, "lower a layout, or add nodes", "", role=rollout)


@rule(
    "AL404",
    summary="actor and rollout share GPUs",
    why="They stand side by side where there is room for both. Here there is not: both hold their weights on the same"
    " GPUs and compute in turns.",
    bad=example("cluster.n_gpus_per_node=4"),
    good=example("cluster.n_gpus_per_node=8"),
    severity="info",
)
def shared_gpus(job: Job) -> Iterator[Finding]:
    actor, rollout = job.role("actor"), job.role("rollout")
    if not job.on_gpus or actor is None or rollout is None or not rollout.backend.engine:
        return
    worlds = actor.allocation.world_size, rollout.allocation.world_size
    if sum(worlds) > job.cluster.gpus >= max(worlds):
        gpus = "one GPU" if job.cluster.gpus == 1 else f"{job.cluster.gpus} GPUs"
        message = f"actor ({worlds[0]}) and rollout ({worlds[1]}) share {gpus}"
        yield Finding(message, "both models must fit into the memory of one GPU", "", role=rollout)


@rule(
    "AL405",
    summary="t crosses nodes",
    why="Every layer adds its activations over the ranks of t, twice forward and twice backward. Between nodes the link"
    " is about ten times slower than within one.",
    bad=example("actor.backend=megatron:t16", cluster="nodes=4,gpus=8"),
    good=example("actor.backend=megatron:d2t8", cluster="nodes=4,gpus=8"),
    severity="warning",
)
def tensor_parallel_across_nodes(job: Job) -> Iterator[Finding]:
    for role in _on_several_nodes(job):
        tp, node = role.allocation.tp, job.cluster.gpus_per_node
        if node % tp:
            sizes = [n for n in range(1, node + 1) if node % n == 0]
            message = f"t{tp} crosses nodes of {node} GPUs"
            yield Finding(message, f"t stays within a node as {', '.join(map(str, sizes))}", "t", role=role)


@rule(
    "AL406",
    summary="e crosses nodes",
    why="Tokens travel to the ranks of their experts and back in every MoE layer. Between nodes that is slower; large"
    " models accept it, small ones need not.",
    bad=example("actor.path=Qwen/Qwen3-30B-A3B", "actor.backend=megatron:d16e16", cluster="nodes=4,gpus=8"),
    good=example("actor.path=Qwen/Qwen3-30B-A3B", "actor.backend=megatron:d16e8", cluster="nodes=4,gpus=8"),
    severity="info",
)
def experts_across_nodes(job: Job) -> Iterator[Finding]:
    for role in _on_several_nodes(job):
        ranks, node = role.allocation.ep * role.allocation.etp, job.cluster.gpus_per_node
        if node % ranks:
            message = f"the {ranks} ranks of an expert group cross nodes of {node} GPUs"
            yield Finding(message, f"e within a node: a divisor of {node}", "eT", role=role)


@rule(
    "AL407",
    summary="a role does not fill whole nodes",
    why="Schedulers hand out whole nodes to a role that spans several, and groups that are cut at the edge of a node"
    " communicate over the slow link.",
    bad=example("actor.backend=megatron:d12", cluster="nodes=4,gpus=8"),
    good=example("actor.backend=megatron:d16", cluster="nodes=4,gpus=8"),
    severity="warning",
)
def whole_nodes(job: Job) -> Iterator[Finding]:
    for role in _on_several_nodes(job):
        world, node = role.allocation.world_size, job.cluster.gpus_per_node
        if world % node:
            message = f"{role.allocation} has {world} ranks, {world / node:.2f} nodes of {node} GPUs"
            near = " or ".join(str(n) for n in (world // node * node, -(-world // node) * node))
            yield Finding(message, f"use {near} ranks", "", role=role)


@rule(
    "AL408",
    summary="a role is colocated with one that it cannot be colocated with",
    why="scheduling_strategy names the role whose GPUs are shared. A name that is no role, the role itself, or a circle"
    " leaves nobody who has GPUs.",
    bad=example("actor.scheduling_strategy={type: colocation, target: trainer}"),
    good=example("actor.scheduling_strategy={type: colocation, target: rollout}"),
)
def colocation_targets(job: Job) -> Iterator[Finding]:
    targets = {role.name: target for role in job.roles if (target := _target(role)) is not None}
    present = [name for name in ROLES if job.role(name) is not None]
    for name, target in targets.items():
        key = f"{name}.scheduling_strategy"
        if target not in present:
            others = ", ".join(other for other in present if other != name)
            message = f"{name} is colocated with {target!r}, which this job does not have"
            yield Finding(message, f"its other roles: {others}", key=key)
        elif name in _chain(name, targets):
            circle = " -> ".join((name, *_chain(name, targets)))
            yield Finding(f"the colocation is a circle: {circle}", "let one of them have GPUs of its own", key=key)


@rule(
    "AL409",
    summary="colocated roles have different numbers of ranks",
    why="Some GPUs then hold one of the two models only, and wait while the other computes.",
    bad=example("actor.scheduling_strategy={type: colocation, target: rollout}", "rollout.backend=huggingface:d2"),
    good=example("actor.scheduling_strategy={type: colocation, target: rollout}", "rollout.backend=huggingface:d4"),
    severity="warning",
)
def colocated_sizes(job: Job) -> Iterator[Finding]:
    for role in job.roles:
        other = job.role(_target(role) or "")
        if other is not None and other.allocation.world_size != role.allocation.world_size:
            message = f"{role.name} has {role.allocation.world_size} ranks, {other.name} {other.allocation.world_size}"
            yield Finding(message, "give both the same number of ranks", key=f"{role.name}.scheduling_strategy")


@rule(
    "AL410",
    summary="'*' cannot be filled on this cluster",
    why="d* takes as many replicas as the GPUs hold: they must be a multiple of one replica, and the experts must"
    " divide the ranks.",
    bad=example("actor.backend=megatron:d*t8", "rollout.backend=huggingface:d1", "cluster.n_gpus_per_node=12"),
    good=example("actor.backend=megatron:d*t8", "rollout.backend=huggingface:d4", "cluster.n_gpus_per_node=12"),
)
def open_replicas(job: Job) -> Iterator[Finding]:
    for role in job.roles:
        if role.unresolved is not None:
            fault = role.unresolved.diagnostics[0]
            yield Finding(fault.message, fault.help, "d", role=role)


def _on_several_nodes(job: Job) -> Iterator[Role]:
    if job.on_gpus and job.cluster.nodes > 1:
        for role in job.running():
            if role.allocation.world_size > job.cluster.gpus_per_node:
                yield role


def _apart(job: Job) -> list[Role]:
    """Roles with GPUs of their own: rollout and actor, and others that say so; the rest shares the actor's."""
    found = []
    for role in job.running():
        strategy = getattr(role.section, "scheduling_strategy", None) or {}
        own = role.name in ("actor", "rollout") or strategy.get("type") == "separation"
        if own and _target(role) is None:
            found.append(role)
    return found


def _alone_too_large(job: Job, role: Role) -> bool:
    return role.allocation.world_size > job.cluster.gpus


def _target(role: Role) -> str | None:
    strategy = getattr(role.section, "scheduling_strategy", None)
    if not isinstance(strategy, dict) or strategy.get("type") != "colocation":
        return None
    return str(strategy.get("target"))


def _chain(name: str, targets: dict[str, str]) -> list[str]:
    """Whom a role leads to, until a role repeats."""
    found: list[str] = []
    while name in targets and targets[name] not in found:
        name = targets[name]
        found.append(name)
    return found
