"""AL5, third part: reproducibility and recomputation."""

from __future__ import annotations

from collections.abc import Iterator

from areal_like.preflight.job import Job, Role
from areal_like.preflight.registry import Finding, example, rule
from areal_like.preflight.rules.rollouts import runs_ahead


@rule(
    "AL524",
    summary="deterministic kernels in a run whose data are not",
    why="use_deterministic_algorithms makes the same batch give the same update. With a lag, which version draws which"
    " token depends on how fast things happened, so the batch itself differs from run to run.",
    bad=example("actor.megatron.use_deterministic_algorithms=true", "rollout.max_head_offpolicyness=1"),
    good=example("actor.megatron.use_deterministic_algorithms=true", "rollout.max_head_offpolicyness=0"),
    severity="warning",
)
def deterministic_data(job: Job) -> Iterator[Finding]:
    if job.config is None or not job.config.actor.megatron.use_deterministic_algorithms:
        return
    if runs_ahead(job):
        message = "generation runs ahead of training: two runs draw different answers, whatever the kernels do"
        hint = "leave the lag and the granularities out: B/B with lag 0"
        yield Finding(message, hint, key="actor.megatron.use_deterministic_algorithms")


@rule(
    "AL535",
    summary="context parallelism with deterministic kernels on GPUs",
    why="The attention whose bits repeat on GPUs keeps each sequence whole on its ranks; on CPUs c can be had.",
    bad=example("actor.megatron.use_deterministic_algorithms=true", "actor.backend=megatron:d2c2"),
    good=example("actor.megatron.use_deterministic_algorithms=true", "actor.backend=megatron:d4"),
    curable=True,
)
def deterministic_context_parallel(job: Job) -> Iterator[Finding]:
    for role in job.training:
        cp = role.allocation.cp
        if cp > 1 and job.on_gpus and role.section.megatron.use_deterministic_algorithms:
            message = f"deterministic attention has no context parallelism (c{cp})"
            yield Finding(message, "leave c out", "c", role=role)


@rule(
    "AL536",
    summary="an attention that the job cannot have",
    why="fused is TransformerEngine's attention, flex is compiled FlexAttention: both are for GPUs. The gradients of"
    " fused do not repeat; flex keeps each sequence whole on its ranks and drops none of its weights. Left at auto, the"
    " engine takes one that can do what is asked.",
    bad=example("actor.megatron.attention_backend=flex", "actor.backend=megatron:d2c2"),
    good=example("actor.megatron.attention_backend=fused", "actor.backend=megatron:d2c2"),
)
def attention_backend(job: Job) -> Iterator[Finding]:
    for role in job.training:
        if role.allocation.backend == "megatron":
            for key, message, cure in _attention_problems(job, role):
                yield Finding(message, cure, key=f"{role.name}.{key}")


def _attention_problems(job: Job, role: Role) -> Iterator[tuple[str, str, str]]:
    """Key, what is wrong with it, what to do."""
    section, cp = role.section, role.allocation.cp
    asked, deterministic = section.megatron.attention_backend, section.megatron.use_deterministic_algorithms
    key, leave = "megatron.attention_backend", "set attention_backend: auto"
    drops = role.spec is not None and role.spec.attention_dropout > 0 and not section.disable_dropout
    if asked != "auto" and job.config is not None and job.config.device == "cpu":
        yield key, f"attention_backend: {asked} needs a GPU; device is cpu", leave
    elif asked == "fused" and deterministic:
        yield key, "attention_backend: fused has gradients that do not repeat (use_deterministic_algorithms)", leave
    elif asked == "flex" and cp > 1:
        yield key, f"attention_backend: flex has no context parallelism (c{cp})", f"{leave}, or leave c out"
    elif asked == "flex" and drops:
        yield key, "attention_backend: flex has no dropout, and the model has", "set disable_dropout: true"
    elif asked == "auto" and deterministic and drops and job.on_gpus:
        key = "megatron.use_deterministic_algorithms"
        yield key, "the attention whose bits repeat has no dropout, and the model has", "set disable_dropout: true"


@rule(
    "AL525",
    summary="full recomputation without saying of what",
    why="Megatron-Core stops while it builds the model unless full recomputation names a method and a number of"
    " layers.",
    bad=example("actor.gradient_checkpointing=true", "actor.megatron.recompute_method=null"),
    good=example("actor.gradient_checkpointing=true", "actor.megatron.recompute_method=uniform"),
)
def recomputation(job: Job) -> Iterator[Finding]:
    for role in job.training:
        options = role.section.megatron
        if not role.section.gradient_checkpointing or options.recompute_granularity != "full":
            continue
        for name in ("recompute_method", "recompute_num_layers"):
            if getattr(options, name) is None:
                message = f"full recomputation needs {name}"
                yield Finding(
                    message, "recompute_method: uniform, recompute_num_layers: 1", key=f"{role.name}.megatron.{name}"
                )
