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


AWARE = "actor.megatron.use_precision_aware_optimizer=true"
_TYPES = ("main_grads_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
STANDSTILL = 1 - 2**-9
"""beta2 from which a bfloat16 number times beta2 rounds back to itself: less than half of its last bit is taken off."""


@rule(
    "AL572",
    summary="an optimizer that cannot keep remainders of parameters",
    why="use_precision_aware_optimizer is TransformerEngine's Adam, sharded over data-parallel ranks, which makes the"
    " float32 copy of a bfloat16 parameter from the parameter and 16 bits. Parameters in FP8 have copies of their own.",
    bad=example("actor.dtype=float32", AWARE),
    good=example(AWARE),
)
def precision_aware(job: Job) -> Iterator[Finding]:
    for role in _trained(job):
        section, fp8 = role.section, role.section.megatron.fp8_config
        if not section.megatron.use_precision_aware_optimizer:
            continue
        trained = section.lora_dtype if section.use_lora and section.lora_dtype else section.dtype
        problems = {
            "needs a GPU; device is cpu": job.config is not None and job.config.device == "cpu",
            f"needs adam; optimizer.type is {section.optimizer.type}": section.optimizer.type != "adam",
            "needs ddp.use_distributed_optimizer: true": not section.megatron.ddp.use_distributed_optimizer,
            f"needs parameters in bfloat16, not {trained}": trained != "bfloat16",
            "cannot have fp8_config.param: true": fp8 is not None and fp8.param,
        }
        for problem, there in problems.items():
            if there:
                key = f"{role.name}.megatron.use_precision_aware_optimizer"
                yield Finding(f"use_precision_aware_optimizer {problem}", "leave it out", key=key)


@rule(
    "AL573",
    summary="a type of the optimizer's numbers that nothing takes",
    why="The types of gradients and moments are the precision-aware optimizer's; the ordinary one is float32 all over."
    " It reads gradients from their buffer, whose type ddp.grad_reduce_in_fp32 decides.",
    bad=example("actor.megatron.exp_avg_dtype=bfloat16"),
    good=example("actor.megatron.exp_avg_dtype=bfloat16", AWARE),
)
def types_of_the_optimizer(job: Job) -> Iterator[Finding]:
    for role in _trained(job):
        options = role.section.megatron
        where = f"{role.name}.megatron"
        if not options.use_precision_aware_optimizer:
            for name in _TYPES:
                if getattr(options, name) not in (None, "float32"):
                    message = f"{name} has no effect without use_precision_aware_optimizer"
                    yield Finding(message, "set use_precision_aware_optimizer: true", key=f"{where}.{name}")
            continue
        kept = "float32" if options.ddp.grad_reduce_in_fp32 else "bfloat16"
        if options.main_grads_dtype not in (None, kept):
            message = f"main_grads_dtype is {options.main_grads_dtype}, but the gradient buffer is {kept}"
            other = str(not options.ddp.grad_reduce_in_fp32).lower()
            hint = f"leave it out, or set ddp.grad_reduce_in_fp32: {other}"
            yield Finding(message, hint, key=f"{where}.main_grads_dtype")


@rule(
    "AL574",
    summary="a mean of squared gradients that can only grow",
    why="With beta2 above 0.998 an update takes less than a five-hundredth off the mean, which bfloat16 rounds away:"
    " the largest squared gradient that was ever seen stays, and the steps of its parameter become ever smaller.",
    bad=example(AWARE, "actor.megatron.exp_avg_sq_dtype=bfloat16"),
    good=example(AWARE, "actor.megatron.exp_avg_sq_dtype=bfloat16", "actor.optimizer.beta2=0.95"),
    severity="warning",
)
def standing_still(job: Job) -> Iterator[Finding]:
    for role in _trained(job):
        options, beta2 = role.section.megatron, role.section.optimizer.beta2
        if options.use_precision_aware_optimizer and options.exp_avg_sq_dtype == "bfloat16" and beta2 > STANDSTILL:
            message = f"in bfloat16 exp_avg_sq cannot fall: beta2 is {beta2:g}"
            hint = "set exp_avg_sq_dtype: float32, or optimizer.beta2 below 0.998"
            yield Finding(message, hint, key=f"{role.name}.megatron.exp_avg_sq_dtype")
