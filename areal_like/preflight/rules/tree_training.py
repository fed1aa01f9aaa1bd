"""AL56: where shared beginnings of sequences cannot be computed once."""

from __future__ import annotations

from collections.abc import Iterator

from areal_like.preflight.job import Job, Role
from areal_like.preflight.registry import Finding, example, rule

ON = "actor.enable_tree_training=true"
CPU = "device=cpu"


@rule(
    "AL561",
    summary="enable_tree_training where shared beginnings cannot be computed once",
    why="Sequences that go on from a shared beginning need attention that knows of it, which the layers of the CPU have"
    " and TransformerEngine's have not. Context parallelism cuts every sequence into chunks of its own. A mixture of"
    " experts would count, balance and limit shared tokens once instead of once a sequence.",
    bad=example(ON, CPU, "actor.backend=megatron:d2c2"),
    good=example(ON, CPU, "actor.backend=megatron:d4"),
)
def tree_training(job: Job) -> Iterator[Finding]:
    for role in job.training:
        if role.section.enable_tree_training and (problem := _problem(job, role)):
            key = f"{role.name}.enable_tree_training"
            yield Finding(f"enable_tree_training: {problem}", "set it to false", key=key)


def _problem(job: Job, role: Role) -> str | None:
    if job.on_gpus:
        return "the attention of GPUs knows no shared beginnings; it needs device: cpu"
    if role.allocation.cp > 1:
        return f"context parallelism (c{role.allocation.cp}) cuts each sequence on its own"
    if role.spec is not None and role.spec.is_moe:
        return "the model is a mixture of experts, whose balance would count shared tokens once"
    return None
