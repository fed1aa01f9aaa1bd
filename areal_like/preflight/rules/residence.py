"""AL58, AL71: what a model keeps on its device between its uses."""

from __future__ import annotations

from collections.abc import Iterator

from areal_like.preflight.job import Job, Role
from areal_like.preflight.offloading import offload_of
from areal_like.preflight.registry import Finding, example, rule

SWITCHES = ("param_offload", "grad_offload", "optimizer_offload")


@rule(
    "AL581",
    summary="offload of what the model does not have",
    why="A model without an optimizer has neither gradients nor optimizer states; param_offload is the switch that does"
    " something for it.",
    bad=example("actor.kl_ctl=0.1", "ref={megatron: {optimizer_offload: true}}"),
    good=example("actor.kl_ctl=0.1", "ref={megatron: {param_offload: true}}"),
)
def nothing_to_offload(job: Job) -> Iterator[Finding]:
    for role in job.training:
        if role.section is None or role.section.optimizer is not None:
            continue
        for name in SWITCHES[1:]:
            if getattr(role.section.megatron, name):
                message = f"{role.name} is not trained: it has nothing that {name} could move"
                yield Finding(message, "remove it; param_offload moves its weights", key=f"{role.name}.megatron.{name}")


@rule(
    "AL585",
    summary="the backend does not give its memory back",
    why="Its engine keeps its model where it is, so the switch would do nothing.",
    bad=example("actor.backend=fsdp:d4", "actor.megatron.param_offload=true"),
    good=example("actor.backend=megatron:d4", "actor.megatron.param_offload=true"),
)
def cannot_offload(job: Job) -> Iterator[Finding]:
    for role in job.training:
        if job.config is None or role.section is None or role.backend.capabilities.colocation:
            continue
        if offload_of(job.config, role.section).any:
            message = f"backend {role.backend.name!r} of {role.name} cannot offload a model in this version"
            yield Finding(message, "use megatron, or remove the switch", key=_switch(role))


@rule(
    "AL711",
    summary="offload makes room for nobody",
    why="Moving a model to the host and back takes time in every step. It is worth it where another model works on the"
    " same GPUs meanwhile. On a CPU both copies are in the same memory.",
    bad=example("actor.megatron.param_offload=true"),
    good=example("actor.megatron.param_offload=true", "actor.backend=megatron:d8", "rollout.backend=huggingface:d8"),
    severity="warning",
)
def room_for_nobody(job: Job) -> Iterator[Finding]:
    if job.config is None:
        return
    for role in job.running():
        if not role.trains or role.section is None or not offload_of(job.config, role.section).any:
            continue
        if job.config.device == "cpu":
            message = f"{role.name} is offloaded, and its device is the host already: memory is copied, none is saved"
        elif job.on_gpus and not _shares(job, role):
            message = f"{role.name} is offloaded, and no other model is on its GPUs"
        else:
            continue
        yield Finding(message, "remove the offload switches", key=_switch(role))


def _shares(job: Job, role: Role) -> bool:
    """Whether another model lives on this one's GPUs (`trainers.placement.place`)."""
    others = [other for other in job.running() if other is not role]
    if any(other.trains for other in others):
        return True  # they all begin at GPU 0
    return any(role.allocation.world_size + other.allocation.world_size > job.cluster.gpus for other in others)


def _switch(role: Role) -> str:
    """The key that asks for it."""
    own = (f"{role.name}.megatron.{name}" for name in SWITCHES if getattr(role.section.megatron, name))
    return next(own, "enable_offload")
