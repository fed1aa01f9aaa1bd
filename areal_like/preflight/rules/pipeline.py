"""Stages of the pipeline: how many there are (AL2), and which layers each has (AL3)."""

from __future__ import annotations

from collections.abc import Iterator

from areal_like.preflight.job import Job, Role
from areal_like.preflight.registry import Finding, example, layout_rule, rule
from areal_like.spec import stage_sizes
from areal_like.spec.stages import layout_faults


@rule(
    "AL215",
    summary="virtual_pipeline_parallel_size contradicts the letter v",
    why="The letter v of `backend` says how many stages each pipeline rank holds. The key of AReaL says it again; where"
    " the two differ one of them would be ignored.",
    bad=example("actor.backend=megatron:p2", "actor.megatron.virtual_pipeline_parallel_size=2"),
    good=example("actor.backend=megatron:p2v2", "actor.megatron.virtual_pipeline_parallel_size=2"),
)
def virtual_stages_said_twice(job: Job) -> Iterator[Finding]:
    for role in job.training:
        said, v = role.section.megatron.virtual_pipeline_parallel_size, role.allocation.vpp
        if said is None or said == v:
            continue
        key = f"{role.name}.megatron.virtual_pipeline_parallel_size"
        message = f"virtual_pipeline_parallel_size is {said}, {role.name}.backend has v{v}"
        if role.allocation.pp == 1:
            yield Finding(message, "remove the key: without p there are no stages to divide", key=key)
        else:
            other = role.allocation.model_copy(update={"virtual_pipeline_parallel_size": said})
            yield Finding(message, f"write {role.name}.backend: {other}, or remove the key", key=key)


@layout_rule(
    "AL309",
    summary="fewer layers than pipeline stages",
    why="Every stage needs at least one layer. Megatron-Core's own even split drops the rest of a division instead of"
    " saying so; the split here gives every layer to a stage (AL312 shows it).",
    bad=example("actor.backend=megatron:p32", "cluster.n_gpus_per_node=36"),
    good=example("actor.backend=megatron:p28", "cluster.n_gpus_per_node=32"),
)
def stages(role: Role) -> Iterator[Finding]:
    allocation = role.allocation
    assert role.spec is not None
    if allocation.pp * allocation.vpp > role.spec.num_layers:
        count = f"p{allocation.pp}" + (f"v{allocation.vpp}" if allocation.vpp > 1 else "")
        message = f"{role.spec.num_layers} layers cannot fill the {allocation.pp * allocation.vpp} stages of {count}"
        yield Finding(message, f"use p{max(1, role.spec.num_layers // allocation.vpp)} or less", "pv")


@rule(
    "AL312",
    summary="the layers do not divide evenly over the stages",
    why="The stages get different numbers of layers, chosen so that the slowest stage, the last one with the vocabulary"
    " projection included, is as fast as it can be. No layer is lost; the split is shown.",
    bad=example("actor.backend=megatron:p3"),
    good=example("actor.backend=megatron:p1"),
    severity="info",
)
def uneven_stages(job: Job) -> Iterator[Finding]:
    for role in job.training:
        count, layout = role.allocation.pp * role.allocation.vpp, written_layout(role)
        if role.spec is None or count == 1 or count > role.spec.num_layers:
            continue
        if layout is not None and layout_faults(role.spec, role.allocation, layout):
            continue  # AL316
        split = stage_sizes(role.spec, role.allocation, layout)
        if len(set(split)) > 1:
            message = f"{role.spec.num_layers} layers over {count} stages: {runs(split)} layers"
            why = (
                "the last stage also computes the vocabulary projection"
                if layout is None
                else "as pipeline_layout says"
            )
            yield Finding(message, why, "p", role=role)


@rule(
    "AL314",
    summary="tied embeddings are held by two stages",
    why="With p above 1 the first stage embeds and the last one projects: each holds the shared matrix, and its"
    " gradients are added over the two in every step. It costs the memory of one more matrix.",
    bad=example("actor.backend=megatron:p2"),
    good=example("actor.backend=megatron:t2"),
    severity="info",
)
def tied_embeddings(job: Job) -> Iterator[Finding]:
    for role in job.training:
        if role.spec is not None and role.spec.tied_embeddings and role.allocation.pp > 1:
            copies = role.spec.vocab_size * role.spec.hidden_size
            message = f"the embedding is tied to the projection: {copies / 1e6:.0f}M parameters on two of the stages"
            yield Finding(message, "nothing to do: gradients of the two copies are added", "p", role=role)


@layout_rule(
    "AL316",
    summary="pipeline_layout is not a split of the model over the stages",
    why="megatron.pipeline_layout says how many layers each stage has, virtual stages (v) included, in the order of the"
    " model: one number of at least 1 for each of the p x v stages, and all layers together.",
    bad=example("actor.backend=megatron:p4", "actor.megatron.pipeline_layout=[8,8,8]"),
    good=example("actor.backend=megatron:p4", "actor.megatron.pipeline_layout=[8,8,8,4]"),
    curable=False,
)
def layout_of_stages(role: Role) -> Iterator[Finding]:
    layout = written_layout(role) if role.trains else None
    assert role.spec is not None
    if layout is None:
        return
    count, key = role.allocation.pp * role.allocation.vpp, f"{role.name}.megatron.pipeline_layout"
    fits = count <= role.spec.num_layers  # else AL309 says what would
    hint = f"for example {stage_sizes(role.spec, role.allocation)}, or null, which balances" if fits else None
    for fault in layout_faults(role.spec, role.allocation, layout):
        yield Finding(f"pipeline_layout {list(layout)}: {fault}", hint, key=key)


def written_layout(role: Role) -> tuple[int, ...] | None:
    """`megatron.pipeline_layout` of a role."""
    layout: tuple[int, ...] | None = None if role.section is None else role.section.megatron.pipeline_layout
    return layout


def runs(numbers: list[int]) -> str:
    """8, 8, 7 as they are; long lists as "12 x 8, 4 x 7"."""
    if len(numbers) <= 8:
        return ", ".join(map(str, numbers))
    found: list[tuple[int, int]] = []
    for number in numbers:
        if found and found[-1][1] == number:
            found[-1] = (found[-1][0] + 1, number)
        else:
            found.append((1, number))
    return ", ".join(f"{times} x {number}" if times > 1 else str(number) for times, number in found)
