"""AL545 and AL546: training in float16, whose loss is scaled."""

from __future__ import annotations

from collections.abc import Iterator

from areal_like.preflight.job import Job, Role
from areal_like.preflight.registry import Finding, example, rule

FLOAT16 = "actor.dtype=float16"


def _in_float16(job: Job) -> Iterator[Role]:
    for role in job.training:
        if role.allocation.backend == "megatron" and role.section.dtype == "float16":
            yield role


@rule(
    "AL545",
    summary="float16 and a stop at the first gradient that is not finite",
    why="In float16 the loss scale is found by trying: gradients overflow, the step is skipped and the scale halved."
    " check_for_nan_in_grad would end the run at the first of them.",
    bad=example(FLOAT16, "actor.megatron.ddp.check_for_nan_in_grad=true"),
    good=example(FLOAT16),
)
def stop_at_overflow(job: Job) -> Iterator[Finding]:
    for role in _in_float16(job):
        if role.section.optimizer is not None and role.section.megatron.ddp.check_for_nan_in_grad:
            message = "check_for_nan_in_grad stops the run where float16 halves its loss scale"
            key = f"{role.name}.megatron.ddp.check_for_nan_in_grad"
            yield Finding(message, "remove it, or use bfloat16", key=key)


@rule(
    "AL546",
    summary="the lowest loss scale is above the first",
    why="The scale begins at initial_loss_scale and never falls below min_loss_scale.",
    bad=example(FLOAT16, "actor.optimizer.initial_loss_scale=0.5"),
    good=example(FLOAT16, "actor.optimizer.initial_loss_scale=65536.0"),
)
def order_of_loss_scales(job: Job) -> Iterator[Finding]:
    for role in _in_float16(job):
        optimizer = role.section.optimizer
        if optimizer is not None and optimizer.min_loss_scale > optimizer.initial_loss_scale:
            low, first = optimizer.min_loss_scale, optimizer.initial_loss_scale
            message = f"min_loss_scale {low:g} is above initial_loss_scale {first:g}"
            yield Finding(message, "lower min_loss_scale", key=f"{role.name}.optimizer.min_loss_scale")
