"""AL5, fourth part: FP8."""

from __future__ import annotations

from collections.abc import Iterator

from areal_like.alloc import Diagnostic, ModelAllocation
from areal_like.config import FP8Config
from areal_like.preflight.job import Job, Role
from areal_like.preflight.registry import Finding, example, rule
from areal_like.spec import ModelSpec, fp8_alignment


def _roles(job: Job) -> Iterator[tuple[Role, FP8Config]]:
    """Roles that compute in FP8."""
    for role in job.training:
        options: FP8Config | None = role.section.megatron.fp8_config
        if options is not None:
            yield role, options


@rule(
    "AL522",
    summary="FP8 without a GPU",
    why="FP8 kernels exist for GPUs from Hopper on.",
    bad=example("device=cpu", "actor.megatron.fp8_config={recipe: blockwise}"),
    good=example("device=cuda", "actor.megatron.fp8_config={recipe: blockwise}"),
)
def fp8_device(job: Job) -> Iterator[Finding]:
    for role, _ in _roles(job):
        if job.config is not None and job.config.device == "cpu":
            yield Finding("FP8 needs a GPU; device is cpu", "remove fp8_config", key=f"{role.name}.megatron.fp8_config")


@rule(
    "AL523",
    summary="a width that FP8 kernels cannot take",
    why="Both sizes of a matrix product in FP8 are multiples of 16, or of the block of the recipe (blockwise 128, mxfp8"
    " 32). t makes the widths that a rank sees smaller.",
    bad=example("actor.backend=megatron:t8", "actor.megatron.fp8_config={recipe: blockwise}", intermediate_size=1536),
    good=example("actor.backend=megatron:t4", "actor.megatron.fp8_config={recipe: blockwise}", intermediate_size=1536),
    curable=True,
)
def fp8_widths(job: Job) -> Iterator[Finding]:
    for role, options in _roles(job):
        if role.spec is not None:
            for message, letter in _unaligned(role.allocation, role.spec, options.recipe):
                yield Finding(message, f"lower {letter}, or choose another recipe", letter, role=role)


def _unaligned(allocation: ModelAllocation, spec: ModelSpec, recipe: str) -> Iterator[tuple[str, str]]:
    """What is wrong, and the letter that cuts the width."""
    multiple = fp8_alignment(recipe)
    for what, width, letter in _widths(allocation, spec):
        if width % multiple:
            yield f"{what} is {width} on a rank, no multiple of {multiple} (recipe {recipe})", letter


def _widths(allocation: ModelAllocation, spec: ModelSpec) -> Iterator[tuple[str, int, str]]:
    """Sizes of the matrices on one rank: what, width, the letter that cuts it."""
    tp, etp = allocation.tp, allocation.etp
    yield "the hidden size", spec.hidden_size, "t"
    heads = spec.head_dim * spec.num_attention_heads
    yield "the width of queries, keys and values", (heads + 2 * spec.head_dim * spec.num_key_value_heads) // tp, "t"
    yield "the width of the attention's output", heads // tp, "t"
    if spec.is_moe:
        yield "the width of an expert", spec.moe_intermediate_size // etp, "T"
    else:
        yield "the width of the MLP", spec.intermediate_size // tp, "t"


def fp8_problems(
    allocation: ModelAllocation, spec: ModelSpec, recipe: str | None, dtype: str, device: str
) -> list[Diagnostic]:
    """What the rules say of a model that is tried without a configuration."""
    if recipe is None:
        return []
    found = [("AL523", message) for message, _ in _unaligned(allocation, spec, recipe)]
    if device == "cpu":
        found.append(("AL522", "FP8 needs a GPU; device is cpu"))
    if dtype != "bfloat16":
        found.append(("AL530", f"FP8 needs dtype bfloat16, not {dtype}"))
    return [Diagnostic(code=code, severity="error", message=message) for code, message in found]


@rule(
    "AL530",
    summary="FP8 beside a type other than bfloat16",
    why="What is not a matrix product, and the outermost layers on request, stay in the type of the model."
    " TransformerEngine's FP8 layers are made for bfloat16 there.",
    bad=example("actor.dtype=float32", "actor.megatron.fp8_config={recipe: tensorwise}"),
    good=example("actor.dtype=bfloat16", "actor.megatron.fp8_config={recipe: tensorwise}"),
)
def fp8_dtype(job: Job) -> Iterator[Finding]:
    for role, _ in _roles(job):
        if role.section.dtype != "bfloat16":
            message = f"fp8_config needs dtype bfloat16, not {role.section.dtype}"
            yield Finding(message, "set dtype: bfloat16", key=f"{role.name}.dtype")


@rule(
    "AL531",
    summary="recipe delayed with layers in bfloat16",
    why="Delayed scaling shares its largest values once for all layers; it cannot be left for some of them.",
    bad=example("actor.megatron.fp8_config={recipe: delayed, first_last_layers_bf16: true}"),
    good=example("actor.megatron.fp8_config={recipe: tensorwise, first_last_layers_bf16: true}"),
)
def fp8_delayed_everywhere(job: Job) -> Iterator[Finding]:
    for role, options in _roles(job):
        if options.recipe == "delayed" and options.first_last_layers_bf16:
            key = f"{role.name}.megatron.fp8_config.first_last_layers_bf16"
            yield Finding("recipe delayed computes every layer in FP8", "use recipe tensorwise or blockwise", key=key)


@rule(
    "AL532",
    summary="more layers in bfloat16 than a pipeline rank holds",
    why="Megatron-Core stops while it builds the model when num_layers_at_start_in_bf16 or num_layers_at_end_in_bf16"
    " is above the number of layers divided by p.",
    bad=example(
        "actor.backend=megatron:p4",
        "actor.megatron.fp8_config={first_last_layers_bf16: true, num_layers_at_end_in_bf16: 8}",
    ),
    good=example(
        "actor.backend=megatron:p4",
        "actor.megatron.fp8_config={first_last_layers_bf16: true, num_layers_at_end_in_bf16: 7}",
    ),
)
def fp8_outer_layers(job: Job) -> Iterator[Finding]:
    for role, options in _roles(job):
        if role.spec is None or not options.first_last_layers_bf16:
            continue
        most = role.spec.num_layers // role.allocation.pp
        for name in ("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16"):
            asked = getattr(options, name)
            if asked > most:
                message = f"{name} is {asked}; at most {most} layers, those of a pipeline rank, can stay in bfloat16"
                yield Finding(message, f"use at most {most}", key=f"{role.name}.megatron.fp8_config.{name}")


@rule(
    "AL533",
    summary="parameters in FP8 that nothing keeps in float32",
    why="FP8 parameters are written from float32 copies, which only the distributed Adam optimizer keeps. For recipe"
    " mxfp8 this version has no such path.",
    bad=example("actor.megatron.fp8_config={param: true}", "actor.megatron.ddp.use_distributed_optimizer=false"),
    good=example("actor.megatron.fp8_config={param: true}"),
)
def fp8_parameters(job: Job) -> Iterator[Finding]:
    for role, options in _roles(job):
        optimizer = role.section.optimizer
        if not options.param:
            continue
        key = f"{role.name}.megatron.fp8_config.param"
        if options.recipe == "mxfp8":
            yield Finding("parameters in FP8 cannot be had with recipe mxfp8", "set param: false", key=key)
        if optimizer is None:
            continue
        if not role.section.megatron.ddp.use_distributed_optimizer:
            hint = "leave use_distributed_optimizer at true, or set param: false"
            yield Finding("parameters in FP8 need the distributed optimizer", hint, key=key)
        if optimizer.type != "adam":
            message = f"parameters in FP8 need optimizer.type adam, not {optimizer.type}"
            yield Finding(message, "use adam, or set param: false", key=key)


_OF_DELAYED = ("margin", "amax_history_len", "amax_compute_algo", "wgrad", "tp_only_amax_red")


@rule(
    "AL534",
    summary="an option that the FP8 recipe does not have",
    why="Only delayed scaling looks at past values, and only it can leave weight gradients out; with another recipe"
    " these keys would be ignored.",
    bad=example("actor.megatron.fp8_config={recipe: tensorwise, wgrad: false}"),
    good=example("actor.megatron.fp8_config={recipe: delayed, wgrad: false}"),
)
def fp8_options_of_delayed(job: Job) -> Iterator[Finding]:
    for role, options in _roles(job):
        if options.recipe == "delayed":
            continue
        for name in _OF_DELAYED:
            if getattr(options, name) != FP8Config.model_fields[name].default:
                message = f"{name} is an option of recipe delayed; with {options.recipe} it does nothing"
                key = f"{role.name}.megatron.fp8_config.{name}"
                yield Finding(message, "leave it out, or use recipe: delayed", key=key)
