"""AL23: options of a mixture of experts that the engine, the model or the machine does not have."""

from __future__ import annotations

from collections.abc import Iterator

from areal_like.config import MegatronConfig
from areal_like.preflight.job import Job, Role
from areal_like.preflight.registry import Finding, example, rule

MOE = "actor.path=Qwen/Qwen3-30B-A3B"
_BALANCING = "moe_router_load_balancing_type"


def _options(job: Job, *, experts: bool = True) -> Iterator[tuple[Role, MegatronConfig]]:
    """Roles of the Megatron engine whose model has experts (or none), and their options."""
    for role in job.training:
        if role.allocation.backend == "megatron" and role.spec is not None and role.spec.is_moe is experts:
            yield role, role.section.megatron


def _finding(role: Role, name: str, message: str, help: str) -> Finding:
    return Finding(message, help, key=f"{role.name}.megatron.{name}")


@rule(
    "AL212",
    summary="the flex dispatcher where DeepEP cannot run",
    why="flex sends tokens with the kernels of DeepEP: from GPU to GPU, in bfloat16, with router scores in float32, and"
    " only where experts are spread over ranks. The package deep_ep has to be installed where the ranks run; it is"
    " looked for when they start.",
    bad=example(MOE, "actor.megatron.moe_token_dispatcher_type=flex"),
    good=example(MOE, "actor.backend=megatron:d4e4", "actor.megatron.moe_token_dispatcher_type=flex"),
)
def flex_dispatcher(job: Job) -> Iterator[Finding]:
    for role, options in _options(job):
        if options.moe_token_dispatcher_type != "flex":
            continue
        name, use = "moe_token_dispatcher_type", "use alltoall"
        if job.config is not None and job.config.device == "cpu":
            yield _finding(role, name, "flex needs GPUs; device is cpu", use)
        if role.allocation.ep * role.allocation.etp == 1:
            yield _finding(role, name, "flex has nothing to send: every rank holds all experts (e1)", use)
        if role.section.dtype != "bfloat16":
            yield _finding(role, name, f"flex sends bfloat16; dtype is {role.section.dtype}", use)
        if options.moe_router_dtype != "fp32":
            message = f"flex needs moe_router_dtype fp32, not {options.moe_router_dtype or 'null'}"
            yield _finding(role, name, message, "set moe_router_dtype: fp32, or use alltoall")


@rule(
    "AL230",
    summary="a kernel of TransformerEngine without a GPU",
    why="One kernel for sorting tokens, or for the router, exists in TransformerEngine alone, which needs a GPU. Left"
    " out (null), the first is on where it exists.",
    bad=example(MOE, "device=cpu", "actor.megatron.moe_permute_fusion=true"),
    good=example(MOE, "device=cpu"),
)
def fused_kernels(job: Job) -> Iterator[Finding]:
    if job.config is None or job.config.device != "cpu":
        return
    for role, options in _options(job):
        for name, otherwise in (("moe_permute_fusion", "null"), ("moe_router_fusion", "false")):
            if getattr(options, name):
                yield _finding(role, name, f"{name} needs a GPU; device is cpu", f"set it to {otherwise}")


@rule(
    "AL231",
    summary="a load-balancing loss without its factor, or a factor without its loss",
    why="The kind of loss and its factor are two keys. One without the other adds nothing to the gradient.",
    bad=example(MOE, "actor.megatron.moe_aux_loss_coeff=0.001"),
    good=example(
        MOE, "actor.megatron.moe_router_load_balancing_type=aux_loss", "actor.megatron.moe_aux_loss_coeff=0.001"
    ),
)
def balancing_factor(job: Job) -> Iterator[Finding]:
    for role, options in _options(job):
        kind, factor = options.moe_router_load_balancing_type, options.moe_aux_loss_coeff
        if kind == "none" and factor > 0:
            message = f"moe_aux_loss_coeff is {factor:g} and {_BALANCING} is none"
            yield _finding(role, "moe_aux_loss_coeff", message, f"set {_BALANCING}: aux_loss, or remove the factor")
        if kind in ("aux_loss", "global_aux_loss") and factor == 0:
            message = f"{_BALANCING} is {kind} and moe_aux_loss_coeff is 0"
            yield _finding(role, _BALANCING, message, "set moe_aux_loss_coeff, for example 0.001")


@rule(
    "AL232",
    summary="a way of balancing experts that packed sequences or the checkpoint rule out",
    why="seq_aux_loss balances each sequence; to Megatron-Core a packed row is one sequence, so it would be aux_loss"
    " under another name. sinkhorn chooses other experts in training than in log-probabilities, over the part of the"
    " tokens that a rank happens to hold, and weighs them by another rule than the checkpoint's.",
    bad=example(MOE, "actor.megatron.moe_router_load_balancing_type=seq_aux_loss"),
    good=example(
        MOE, "actor.megatron.moe_router_load_balancing_type=aux_loss", "actor.megatron.moe_aux_loss_coeff=0.001"
    ),
)
def balancing_kind(job: Job) -> Iterator[Finding]:
    for role, options in _options(job):
        kind = options.moe_router_load_balancing_type
        if kind == "seq_aux_loss":
            message = "seq_aux_loss cannot tell the sequences of a packed row apart"
            yield _finding(role, _BALANCING, message, "use aux_loss or global_aux_loss")
        elif kind == "sinkhorn":
            message = "sinkhorn routes otherwise in training than in log-probabilities"
            yield _finding(role, _BALANCING, message, "use aux_loss or global_aux_loss")


@rule(
    "AL233",
    summary="an expert bias in a fused router",
    why="The bias moves the choice among softmax scores. TransformerEngine's fused router takes a bias for sigmoid"
    " scores alone.",
    bad=example(MOE, "actor.megatron.moe_router_bias_update_rate=0.001", "actor.megatron.moe_router_fusion=true"),
    good=example(MOE, "actor.megatron.moe_router_bias_update_rate=0.001"),
)
def fused_bias(job: Job) -> Iterator[Finding]:
    for role, options in _options(job):
        if options.moe_router_fusion and options.moe_router_bias_update_rate > 0:
            message = "moe_router_fusion does not know the expert bias (moe_router_bias_update_rate)"
            yield _finding(role, "moe_router_fusion", message, "set moe_router_fusion: false")


@rule(
    "AL234",
    summary="shared experts that cannot overlap",
    why="Shared experts can be computed while tokens travel to the others: if the model has shared experts, and if"
    " tokens travel by alltoall.",
    bad=example(MOE, "actor.megatron.moe_shared_expert_overlap=true"),
    good=example(MOE, "actor.megatron.moe_shared_expert_overlap=false"),
)
def shared_experts(job: Job) -> Iterator[Finding]:
    for role, options in _options(job):
        if not options.moe_shared_expert_overlap:
            continue
        assert role.spec is not None
        name, off = "moe_shared_expert_overlap", "set moe_shared_expert_overlap: false"
        if not role.spec.shared_expert_intermediate_size:
            yield _finding(role, name, "the model has no shared experts", off)
        elif options.moe_token_dispatcher_type != "alltoall":
            message = f"shared experts overlap with alltoall, not with {options.moe_token_dispatcher_type}"
            yield _finding(role, name, message, off)


@rule(
    "AL235",
    summary="MoE options of a model without experts",
    why="The model has no router and no experts, so there is nothing that the key could act on.",
    bad=example("actor.megatron.moe_z_loss_coeff=0.001"),
    good=example(MOE, "actor.megatron.moe_z_loss_coeff=0.001"),
    severity="warning",
)
def no_experts(job: Job) -> Iterator[Finding]:
    for role, options in _options(job, experts=False):
        for name in sorted(options.model_fields_set):
            default = MegatronConfig.model_fields[name].default
            if name.startswith("moe_") and getattr(options, name) != default:
                yield _finding(role, name, f"{name} has no effect: the model has no experts", "remove it")


@rule(
    "AL236",
    summary="the rollout engine does not know the expert bias",
    why="The bias is no part of a Qwen3 checkpoint: it stays with the trainer and its recovery checkpoints. The rollout"
    " engine and the saved model choose experts without it, so their log-probabilities differ from the trainer's by"
    " more than rounding. use_decoupled_loss weighs that; a load-balancing loss avoids it.",
    bad=example(MOE, "actor.megatron.moe_router_bias_update_rate=0.001"),
    good=example(
        MOE, "actor.megatron.moe_router_load_balancing_type=aux_loss", "actor.megatron.moe_aux_loss_coeff=0.001"
    ),
    severity="warning",
)
def bias_stays_here(job: Job) -> Iterator[Finding]:
    for role, options in _options(job):
        if options.moe_router_bias_update_rate > 0 and role.spec is not None and not role.spec.router_correction_bias:
            message = "the rollout engine and saved models choose experts without the expert bias"
            yield _finding(role, "moe_router_bias_update_rate", message, "use a load-balancing loss, or accept it")
