"""AL5, third part: FP8, reproducibility and recomputation."""

from __future__ import annotations

from collections.abc import Iterator

from areal_like.preflight.job import Job, Role
from areal_like.preflight.registry import Finding, example, rule


@rule(
    "AL522",
    summary="FP8 without a GPU",
    why="FP8 kernels exist for GPUs from Hopper on.",
    bad=example("device=cpu", "actor.megatron.fp8_config={recipe: blockwise}"),
    good=example("device=cuda", "actor.megatron.fp8_config={recipe: blockwise}"),
)
def fp8_device(job: Job) -> Iterator[Finding]:
    for role in job.training:
        if job.config is not None and job.config.device == "cpu" and role.section.megatron.fp8_config is not None:
            yield Finding("FP8 needs a GPU; device is cpu", "remove fp8_config", key=f"{role.name}.megatron.fp8_config")


ALIGNMENT = {"blockwise": 128, "mxfp8": 32}
"""Both sizes of every matrix must be multiples of it; 16 for scaling by tensor (TransformerEngine)."""


@rule(
    "AL523",
    summary="a width that FP8 kernels cannot take",
    why="Both sizes of a matrix product in FP8 are multiples of 16, or of the block of the recipe (blockwise 128, mxfp8"
    " 32). t makes the widths that a rank sees smaller.",
    bad=example("actor.backend=megatron:t8", "actor.megatron.fp8_config={recipe: blockwise}", intermediate_size=1536),
    good=example("actor.backend=megatron:t4", "actor.megatron.fp8_config={recipe: blockwise}", intermediate_size=1536),
    curable=True,
)
def fp8_alignment(job: Job) -> Iterator[Finding]:
    for role in job.training:
        options = role.section.megatron.fp8_config
        if options is None or role.spec is None:
            continue
        multiple = ALIGNMENT.get(options.recipe, 16)
        for what, width, letter in _widths(role):
            if width % multiple:
                message = f"{what} is {width} on a rank, no multiple of {multiple} (recipe {options.recipe})"
                yield Finding(message, f"lower {letter}, or choose another recipe", letter, role=role)


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
    lag = job.config.rollout.max_head_offpolicyness
    if lag > 0:
        message = f"with max_head_offpolicyness {lag} two runs draw different answers, whatever the kernels do"
        yield Finding(
            message, "set rollout.max_head_offpolicyness: 0", key="actor.megatron.use_deterministic_algorithms"
        )


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


def _widths(role: Role) -> Iterator[tuple[str, int, str]]:
    """Sizes of the matrices on one rank: what, width, the letter that cuts it."""
    spec, tp, etp = role.spec, role.allocation.tp, role.allocation.etp
    assert spec is not None
    yield "the hidden size", spec.hidden_size, "t"
    qkv = spec.head_dim * (spec.num_attention_heads + 2 * spec.num_key_value_heads)
    yield "the width of queries, keys and values", qkv // tp, "t"
    if spec.is_moe:
        yield "the width of an expert", spec.moe_intermediate_size // etp, "T"
    else:
        yield "the width of the MLP", spec.intermediate_size // tp, "t"
