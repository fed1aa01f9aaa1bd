"""AL54: what the backward pass is asked to compute again, and cannot or would not."""

from __future__ import annotations

from collections.abc import Iterator

from areal_like.preflight.job import Job, Role
from areal_like.preflight.registry import Finding, example, rule

SELECTIVE = (
    "actor.gradient_checkpointing=true",
    "actor.megatron.recompute_granularity=selective",
    "actor.megatron.recompute_method=null",
    "actor.megatron.recompute_num_layers=null",
)
MOE = "actor.path=Qwen/Qwen3-30B-A3B"


def _recomputing(job: Job) -> Iterator[Role]:
    for role in job.training:
        if role.allocation.backend == "megatron" and role.section.gradient_checkpointing:
            yield role


@rule(
    "AL541",
    summary="recompute_modules names a part that is not there to be recomputed",
    why="With recompute_granularity selective the named parts of a layer are computed again in the backward pass. A"
    " part that the model does not have, or that is one kernel with what follows it, would save nothing.",
    bad=example(*SELECTIVE, "actor.megatron.recompute_modules=[moe]"),
    good=example(MOE, *SELECTIVE, "actor.megatron.recompute_modules=[moe]"),
)
def recomputed_parts(job: Job) -> Iterator[Finding]:
    for role in _recomputing(job):
        options = role.section.megatron
        if role.spec is None or options.recompute_granularity != "selective":
            continue
        names = options.recompute_modules or ()
        for name in names:
            if problem := _missing(name, names, role, job):
                key = f"{role.name}.megatron.recompute_modules"
                yield Finding(f"recompute_modules: {name}: {problem}", f"remove {name}", key=key)


def _missing(name: str, names: tuple[str, ...], role: Role, job: Job) -> str | None:
    """Why a part cannot be recomputed; None when it can."""
    spec, options = role.spec, role.section.megatron
    assert spec is not None
    on_cpu = job.config is not None and job.config.device == "cpu"
    if name in ("moe", "moe_act") and not spec.is_moe:
        return "the model has no experts"
    if name == "moe_act" and (not options.moe_grouped_gemm if on_cpu else options.moe_grouped_gemm is False):
        return "the activation of experts is recomputed in moe_grouped_gemm alone, which is off" + (
            " on a CPU unless it is true" if on_cpu else ""
        )
    if name == "moe_act" and "moe" in names:
        return "moe recomputes the activation already"
    if name == "mlp" and spec.is_moe and not spec.dense_layers:
        return "every layer of the model has experts instead of an MLP"
    if name == "layernorm" and on_cpu:
        return "Megatron-Core recomputes norms with TransformerEngine alone, which needs a GPU"
    if name == "mla_up_proj" and spec.latent_attention is None:
        return "the model has no latent attention"
    if name == "shared_experts" and not spec.shared_expert_intermediate_size:
        return "the model has no shared experts"
    return None


@rule(
    "AL542",
    summary="recomputation that is asked for and switched off, or of parts where whole layers are recomputed",
    why="gradient_checkpointing asks for recomputation and recompute_granularity says of what: null would recompute"
    " nothing. recompute_modules belongs to selective; full recomputes whole layers.",
    bad=example("actor.gradient_checkpointing=true", "actor.megatron.recompute_granularity=null"),
    good=example(*SELECTIVE),
)
def recomputed_how(job: Job) -> Iterator[Finding]:
    for role in _recomputing(job):
        options, prefix = role.section.megatron, f"{role.name}.megatron"
        if options.recompute_granularity is None:
            message = "gradient_checkpointing is true and recompute_granularity is null"
            yield Finding(message, "use full or selective", key=f"{prefix}.recompute_granularity")
        elif options.recompute_granularity == "full" and options.recompute_modules is not None:
            message = "recompute_modules does not go with recompute_granularity full"
            yield Finding(message, "use selective, or remove recompute_modules", key=f"{prefix}.recompute_modules")
