"""AL5, low-rank adapters: which models, matrices and layouts can have them."""

from __future__ import annotations

from collections.abc import Iterator

from areal_like.alloc import Diagnostic, ModelAllocation
from areal_like.config import TrainEngineConfig
from areal_like.preflight.job import Job, Role
from areal_like.preflight.registry import Finding, example, rule
from areal_like.spec import ModelSpec
from areal_like.spec.lora import COLUMN_PARALLEL, lora_targets

_ON = ("actor.use_lora=true", "actor.megatron.bridge_type=megatron-bridge")
_CRITIC = "backend: megatron:d4, path: Qwen/Qwen3-0.6B, optimizer: {lr: 1e-6}"
_MOE = ("actor.path=Qwen/Qwen3-30B-A3B", "cluster.n_gpus_per_node=12")


@rule(
    "AL520",
    summary="the rollout engine waits for adapters that nobody trains",
    why="With rollout.use_lora the actor sends its adapters alone, and the rollout engine adds them to the weights it"
    " started with. An actor that trains all weights has none to send. The other way round is fine: an actor with"
    " adapters sends whole weights, adapters merged into them, to a rollout engine that knows of none.",
    bad=example("rollout.use_lora=true"),
    good=example("rollout.use_lora=true", *_ON),
)
def adapters_to_send(job: Job) -> Iterator[Finding]:
    if job.config is not None and job.config.rollout.use_lora and not job.config.actor.use_lora:
        message = "rollout.use_lora is true, but actor.use_lora is false"
        yield Finding(message, "set actor.use_lora: true, or rollout.use_lora: false", key="rollout.use_lora")


@rule(
    "AL521",
    summary="the bridge has no adapters",
    why="mbridge converts whole weights only; adapters need megatron-bridge.",
    bad=example("actor.use_lora=true"),
    good=example(*_ON),
)
def bridge_with_adapters(job: Job) -> Iterator[Finding]:
    for role in _with_adapters(job):
        if role.section.megatron.bridge_type == "mbridge":
            key = f"{role.name}.megatron.bridge_type"
            yield Finding("bridge_type mbridge does not convert adapters", "use megatron-bridge", key=key)


@rule(
    "AL550",
    summary="the backend has no adapters",
    why="Its engine would train, or sample from, all weights instead.",
    bad=example(*_ON, "rollout.backend=sglang:d4", "rollout.use_lora=true"),
    good=example(*_ON, "rollout.backend=huggingface:d4", "rollout.use_lora=true"),
)
def backend_with_adapters(job: Job) -> Iterator[Finding]:
    for role in job.roles:
        section = job.config.rollout if role.name == "rollout" and job.config is not None else role.section
        if section is not None and section.use_lora and not role.backend.capabilities.lora:
            message = f"backend {role.backend.name!r} has no adapters in this version"
            other = "megatron" if role.trains else "huggingface, or rollout.use_lora: false to send merged weights"
            yield Finding(message, f"use {other}", key=f"{role.name}.use_lora")


@rule(
    "AL551",
    summary="a target of adapters that does not exist, or cannot have one",
    why="Adapters are for the matrices of attention and MLP, experts included, under Megatron-Core's names. The router"
    " of a mixture of experts gets none: PEFT has no place for it in the model as Transformers holds it.",
    bad=example(*_ON, "actor.target_modules=[linear_qkv, router]"),
    good=example(*_ON, "actor.target_modules=[linear_qkv, linear_proj]"),
)
def adapter_targets(job: Job) -> Iterator[Finding]:
    for role in _with_adapters(job):
        try:
            lora_targets(role.section.target_modules)
        except ValueError as error:
            message, _, known = str(error).partition("; ")
            yield Finding(message, known, key=f"{role.name}.target_modules")


@rule(
    "AL552",
    summary="an adapter that does not divide over the tensor ranks",
    why="Megatron-Core splits A of linear_qkv and linear_fc1 by its rows, of which there are lora_rank, and B of"
    " linear_proj and linear_fc2 by the hidden size.",
    bad=example(*_ON, "actor.backend=megatron:t4", "actor.lora_rank=6"),
    good=example(*_ON, "actor.backend=megatron:t4", "actor.lora_rank=8"),
    curable=True,
)
def adapter_divides(job: Job) -> Iterator[Finding]:
    for role in _with_adapters(job):
        tp, rank = role.allocation.tp, role.section.lora_rank
        targets = _targets(role)
        if rank % tp and targets & set(COLUMN_PARALLEL):
            message = f"lora_rank {rank} does not divide by t{tp}"
            yield Finding(message, f"take a multiple of {tp}, or a smaller t", "t", role=role)
        elif role.spec and role.spec.hidden_size % tp and targets - set(COLUMN_PARALLEL):
            message = f"B of linear_proj and linear_fc2 has {role.spec.hidden_size} rows, which do not divide by t{tp}"
            yield Finding(message, "take a smaller t, or leave these targets out", "t", role=role)


@rule(
    "AL553",
    summary="adapters of experts that are split over tensor ranks",
    why="megatron-bridge's adapters of split experts are wrong: the output of A is not summed over the ranks, and"
    " neither are its gradients (measured with 0.6.2).",
    bad=example(*_ON, *_MOE, "actor.backend=megatron:(attn:d2t2|ffn:t2e2)", "actor.megatron.moe_grouped_gemm=false"),
    good=example(*_ON, *_MOE, "actor.backend=megatron:(attn:d2t2|ffn:e4)", "actor.megatron.moe_grouped_gemm=false"),
    curable=True,
)
def split_experts(job: Job) -> Iterator[Finding]:
    for role in _with_adapters(job):
        if _on_experts(role) and role.allocation.etp > 1:
            message = f"linear_fc1 and linear_fc2 of the experts are split by t{role.allocation.etp}"
            help = "use t1 for the experts, or target linear_qkv and linear_proj alone"
            yield Finding(message, help, "T", role=role)


@rule(
    "AL554",
    summary="adapters of experts whose matrices are one",
    why="With moe_grouped_gemm a rank holds the matrices of all its experts in one module, whose adapters this version"
    " does not have. On GPUs it is on unless it is false.",
    bad=example(*_ON, *_MOE, "actor.backend=megatron:d4e4"),
    good=example(*_ON, *_MOE, "actor.backend=megatron:d4e4", "actor.megatron.moe_grouped_gemm=false"),
)
def grouped_experts(job: Job) -> Iterator[Finding]:
    for role in _with_adapters(job):
        grouped = role.section.megatron.moe_grouped_gemm
        if _on_experts(role) and (job.on_gpus if grouped is None else grouped):
            help = "set moe_grouped_gemm: false, or target linear_qkv and linear_proj alone"
            yield Finding("grouped experts get no adapters", help, key=f"{role.name}.megatron.moe_grouped_gemm")


@rule(
    "AL555",
    summary="adapters of a model that is not trained",
    why="B of a new adapter is 0: it changes nothing until it is trained.",
    bad=example(*_ON, "actor.kl_ctl=0.1", "ref={backend: megatron:d4, path: Qwen/Qwen3-0.6B, use_lora: true}"),
    good=example(*_ON, "actor.kl_ctl=0.1", "ref={backend: megatron:d4, path: Qwen/Qwen3-0.6B}"),
)
def adapters_are_trained(job: Job) -> Iterator[Finding]:
    for role in _with_adapters(job):
        if role.section.optimizer is None:
            yield Finding(f"{role.name} has no optimizer", "set use_lora: false", key=f"{role.name}.use_lora")


@rule(
    "AL556",
    summary="adapters with a router bias that is updated",
    why="moe_router_bias_update_rate changes a part of the model itself, which adapters leave as it is: the trained"
    " adapter would not fit the model it is saved for.",
    bad=example(*_ON, *_MOE, "actor.target_modules=[linear_qkv]", "actor.megatron.moe_router_bias_update_rate=0.001"),
    good=example(*_ON, *_MOE, "actor.target_modules=[linear_qkv]"),
)
def router_bias_is_frozen(job: Job) -> Iterator[Finding]:
    for role in _with_adapters(job):
        if role.section.megatron.moe_router_bias_update_rate:
            key = f"{role.name}.megatron.moe_router_bias_update_rate"
            yield Finding("the bias of the router is not part of an adapter", "set it to 0", key=key)


@rule(
    "AL557",
    summary="adapters and FP8 together",
    why="This version computes matrix products in FP8 only where all weights are trained.",
    bad=example(*_ON, "actor.megatron.fp8_config={recipe: tensorwise}"),
    good=example(*_ON),
)
def adapters_in_fp8(job: Job) -> Iterator[Finding]:
    for role in _with_adapters(job):
        if role.section.megatron.fp8_config is not None:
            message = "adapters cannot be trained on matrices in FP8"
            yield Finding(message, "remove fp8_config, or set use_lora: false", key=f"{role.name}.megatron.fp8_config")


@rule(
    "AL558",
    summary="adapters of a value model",
    why="Adapters alone would be trained, and not the head, which starts from nothing.",
    bad=example(*_ON, f"critic={{{_CRITIC}, use_lora: true, megatron: {{bridge_type: megatron-bridge}}}}"),
    good=example(*_ON, f"critic={{{_CRITIC}}}"),
)
def value_head_is_trained(job: Job) -> Iterator[Finding]:
    for role in _with_adapters(job):
        if role.section.is_critic:
            yield Finding(
                "the head of a value model gets no adapter", "set use_lora: false", key=f"{role.name}.use_lora"
            )


def adapter_problems(
    allocation: ModelAllocation, spec: ModelSpec, section: TrainEngineConfig, device: str
) -> list[Diagnostic]:
    """What the rules say of one model's adapters, without the rest of a job."""
    role = Role("actor", allocation, str(allocation), spec=spec, section=section)
    job = Job(roles=(role,), on_gpus=device == "cuda")
    rules = (bridge_with_adapters, adapter_targets, adapter_divides, split_experts, grouped_experts, adapters_in_fp8)
    codes = ("AL521", "AL551", "AL552", "AL553", "AL554", "AL557")
    return [
        Diagnostic(code, "error", finding.message, help=finding.help)
        for code, function in zip(codes, rules, strict=True)
        for finding in function(job)
    ]


def _with_adapters(job: Job) -> Iterator[Role]:
    for role in job.training:
        if role.section is not None and role.allocation.backend == "megatron" and role.section.use_lora:
            yield role


def _targets(role: Role) -> set[str]:
    """The targets that exist; AL551 names the others."""
    try:
        return set(lora_targets(role.section.target_modules))
    except ValueError:
        return set()


def _on_experts(role: Role) -> bool:
    return role.spec is not None and role.spec.is_moe and bool(_targets(role) & {"linear_fc1", "linear_fc2"})
