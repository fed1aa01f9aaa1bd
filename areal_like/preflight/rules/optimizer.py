"""AL571 and later: how gradients are added up and what the optimizer keeps."""

from __future__ import annotations

from collections.abc import Iterator

from areal_like.preflight.job import Job, Role
from areal_like.preflight.registry import Finding, example, rule


def _trained(job: Job) -> Iterator[Role]:
    for role in job.training:
        if role.allocation.backend == "megatron" and role.section.optimizer is not None:
            yield role


@rule(
    "AL571",
    summary="gradients that no matrix product can add up",
    why="gradient_accumulation_fusion lets TransformerEngine's layers add the gradient of a weight to its buffer. On a"
    " CPU there are none, and with adapters the weights in these layers have no gradients. Left out (null), it is on"
    " where it can be.",
    bad=example("device=cpu", "actor.megatron.gradient_accumulation_fusion=true"),
    good=example("device=cpu"),
)
def fused_gradients(job: Job) -> Iterator[Finding]:
    for role in _trained(job):
        if not role.section.megatron.gradient_accumulation_fusion:
            continue
        key = f"{role.name}.megatron.gradient_accumulation_fusion"
        if job.config is not None and job.config.device == "cpu":
            yield Finding("gradient_accumulation_fusion needs a GPU; device is cpu", "leave it out", key=key)
        elif role.section.use_lora:
            message = "gradient_accumulation_fusion has nothing to fuse: with use_lora the model's weights are frozen"
            yield Finding(message, "leave it out", key=key)
