"""From and to verl's configuration: what one key says in several, and what several say in one."""

from __future__ import annotations

from typing import Any

from areal_like.alloc import ModelAllocation
from areal_like.config.convert.common import (
    KL,
    check_sequence_parallel,
    group_norm,
    minibatches,
    put_correction,
    put_kl,
    whole,
)
from areal_like.config.convert.draft import Draft, Given, NoCounterpart, Source, read_rest, read_rows
from areal_like.config.convert.experts import put_expert_bias
from areal_like.config.convert.verl_keys import ROWS, SECTIONS, R, megatron_sizes

DEFAULTS: dict[str, Any] = {row.theirs: row.default for row in ROWS} | {
    f"{R}.actor.strategy": "megatron",
    f"{R}.rollout.tensor_model_parallel_size": 2,
    f"{R}.actor.ppo_mini_batch_size": 256,
    f"{R}.actor.use_dynamic_bsz": False,
    f"{R}.actor.ppo_max_token_len_per_gpu": 16384,
    f"{R}.actor.clip_ratio": 0.2,
    f"{R}.actor.kl_loss_coef": 0.001,
    f"{R}.actor.kl_loss_type": "low_var_kl",
    f"{R}.actor.use_kl_loss": False,
    "algorithm.kl_ctrl.kl_coef": 0.001,
    "algorithm.kl_penalty": "kl",
    "algorithm.use_kl_in_reward": False,
    "algorithm.adv_estimator": "gae",
    "algorithm.norm_adv_by_std_in_grpo": True,
    "algorithm.rollout_correction.rollout_is_threshold": 2.0,
}
_EPS = 1e-6
"""Added to the standard deviation of a group by verl's GRPO."""


def read(source: Source) -> Draft:
    """verl's keys as keys of this system."""
    draft = Draft(source)
    read_rows(source, ROWS, draft)
    _layouts(source, draft)
    _batches(source, draft)
    _loss(source, draft)
    _advantages(source, draft)
    _correction(source, draft)
    _optimizer(source, draft)
    if any(key.startswith("eval_gconfig.") for key in draft.values) and "gconfig.max_new_tokens" in draft.values:
        draft.put_default("eval_gconfig.max_new_tokens", draft.values["gconfig.max_new_tokens"])
    read_rest(source, SECTIONS, draft)
    return draft


def _layouts(source: Source, draft: Draft) -> None:
    """One pool of GPUs, which actor, reference and rollout engine share."""
    nodes, gpus = whole(source.value("trainer.nnodes")), whole(source.value("trainer.n_gpus_per_node"))
    where = source.take("trainer.n_gpus_per_node") or Given("trainer.n_gpus_per_node", None, source.place)
    world = nodes * gpus if nodes and gpus else None
    strategy = source.take(f"{R}.actor.strategy")
    name = str(strategy.value) if strategy else "megatron"
    engine = {"megatron": "megatron", "fsdp": "fsdp", "fsdp2": "fsdp"}.get(name)
    if engine is None and strategy is not None:
        draft.error(f"{strategy.key}: {name} has no backend here", strategy, "megatron and fsdp have")
    elif engine is not None:
        actor = megatron_sizes(f"{R}.actor").read(draft, world, "actor.backend", engine, where)
        check_sequence_parallel(draft, f"{R}.actor.megatron.sequence_parallel", actor)
        _reference(source, draft, world, engine, where, actor)
        _micro_batches(source, draft, actor)
    _rollout(source, draft, world, where)


def _reference(
    source: Source, draft: Draft, world: int | None, engine: str, where: Given, actor: ModelAllocation | None
) -> None:
    """In one process verl's reference has the actor's groups, whatever its own keys say."""
    sizes = megatron_sizes(f"{R}.ref")
    named = [key for key in (*sizes.keys.values(), sizes.expert_tensor) if source.has(key)]
    strategy = source.take(f"{R}.ref.strategy")
    if strategy is not None and str(strategy.value).rstrip("2") != engine:
        draft.left_out(strategy, "the reference runs on the actor's engine")
    if not named:
        return
    trial = Draft(source)
    found = sizes.read(trial, world, "ref.backend", engine, where)
    if found is not None and actor is not None and found != actor:
        first = source.given[named[0]]
        draft.changed(first, f"the reference then has the layout {found}; verl gives it the actor's, {actor}")
        draft.put("ref.backend", str(found), first)
    for problem in trial.diagnostics:
        draft.findings.add(problem)


def _rollout(source: Source, draft: Draft, world: int | None, where: Given) -> None:
    name = source.take(f"{R}.rollout.name")
    server = str(name.value) if name else "vllm"
    if server not in ("vllm", "sglang"):
        draft.error(f"{R}.rollout.name: {server} has no backend here", name, "vllm and sglang have")
        return
    tensor = source.take(f"{R}.rollout.tensor_model_parallel_size")
    stages = source.take(f"{R}.rollout.pipeline_model_parallel_size")
    sizes = {"tensor_parallel_size": tensor, "pipeline_parallel_size": stages}
    values = {field: given.value for field, given in sizes.items() if given is not None}
    instance = 1
    for field, value in values.items():
        if whole(value) is None:
            draft.error(f"the rollout's {field} is {value!r}; it must be a whole number of at least 1", sizes[field])
            return
        instance *= value
    if world is not None and world % instance:
        message = f"{world} GPUs do not divide by the {instance} of one inference server: rollout.backend has no layout"
        draft.error(message, tensor or where, "change the rollout's tensor_model_parallel_size")
        return
    replicas = world // instance if world is not None else None
    if name is None:
        draft.assumed("rollout.backend", _allocation(server, replicas, values), f"{R}.rollout.name is not given")
    else:
        draft.backend("rollout.backend", server, {"data_parallel_size": replicas, **values}, name)
    draft.put_default("rollout.scheduling_strategy", {"type": "colocation", "target": "actor"})


def _allocation(server: str, replicas: int | None, values: dict[str, int]) -> str:
    sizes: dict[str, Any] = {"data_parallel_size": replicas, **values}
    return str(ModelAllocation(backend=server, **sizes))


def _micro_batches(source: Source, draft: Draft, actor: ModelAllocation | None) -> None:
    """verl's budget is of one GPU of a context-parallel group; here it is of the micro-batch."""
    dynamic = source.take(f"{R}.actor.use_dynamic_bsz")
    budget = source.take(f"{R}.actor.ppo_max_token_len_per_gpu")
    per_gpu = source.take(f"{R}.actor.ppo_micro_batch_size_per_gpu") or source.take(f"{R}.actor.ppo_micro_batch_size")
    source.taken |= {f"{R}.actor.ppo_micro_batch_size_per_gpu", f"{R}.actor.ppo_micro_batch_size"}
    if dynamic is not None and dynamic.value is True and budget is not None and whole(budget.value):
        draft.put("actor.mb_spec.max_tokens_per_mb", budget.value * (actor.cp if actor else 1), budget)
    elif per_gpu is not None and whole(per_gpu.value):
        longest = sum(draft.values.get(key) or 0 for key in ("train_dataset.max_length", "gconfig.max_new_tokens"))
        tokens = per_gpu.value * longest
        why = f"{per_gpu.value} sequences of at most {longest} tokens; micro-batches are filled by tokens here"
        draft.assumed("actor.mb_spec.max_tokens_per_mb", tokens, why, per_gpu)


def _batches(source: Source, draft: Draft) -> None:
    minibatches(draft, source.take("data.train_batch_size"), source.take(f"{R}.actor.ppo_mini_batch_size"))


def _loss(source: Source, draft: Draft) -> None:
    clip = source.take(f"{R}.actor.clip_ratio")
    low = source.take(f"{R}.actor.clip_ratio_low") or clip
    high = source.take(f"{R}.actor.clip_ratio_high") or clip
    if low is not None and high is not None:
        draft.put("actor.eps_clip", low.value, low)
        if high.value != low.value:
            draft.put("actor.eps_clip_higher", high.value, high)
    in_loss, in_reward = source.value(f"{R}.actor.use_kl_loss"), source.value("algorithm.use_kl_in_reward")
    loss_weight, loss_type = source.take(f"{R}.actor.kl_loss_coef"), source.take(f"{R}.actor.kl_loss_type")
    weight, kind = source.take("algorithm.kl_ctrl.kl_coef"), source.take("algorithm.kl_penalty")
    control = source.take("algorithm.kl_ctrl.type")
    if control is not None and control.value != "fixed":
        draft.left_out(control, "the weight of the divergence is fixed")
    if in_loss is True and in_reward is True and loss_weight is not None:
        draft.error("verl has the divergence in the loss and in the rewards; here it has one weight", loss_weight)
    elif in_loss is True:
        put_kl(draft, loss_weight, _estimator(loss_type, draft), in_loss=True)
    elif in_reward is True:
        put_kl(draft, weight, _estimator(kind, draft), in_loss=False)


def _estimator(given: Given | None, draft: Draft) -> Any:
    if given is None:
        return None
    try:
        return KL[0](given.value)
    except NoCounterpart as error:
        draft.left_out(given, str(error))
        return None


def _advantages(source: Source, draft: Draft) -> None:
    estimator, by_std = source.take("algorithm.adv_estimator"), source.value("algorithm.norm_adv_by_std_in_grpo")
    if estimator is None:
        return
    if estimator.value == "grpo":
        group_norm(draft, estimator, std=by_std is not False, leave_one_out=False, eps=_EPS)
    elif estimator.value == "rloo":
        group_norm(draft, estimator, std=False, leave_one_out=True, eps=_EPS)
    elif estimator.default:
        draft.changed(estimator, "this default of verl needs a value model: no advantage estimator is written")
    else:
        draft.left_out(estimator, "grpo and rloo have a counterpart, in actor.reward_norm")


def _correction(source: Source, draft: Draft) -> None:
    """verl recomputes old log-probabilities with the trainer, and may weigh by their ratio to the rollout's."""
    prefix = "algorithm.rollout_correction"
    bypass = source.take(f"{prefix}.bypass_mode")
    level, bound = source.take(f"{prefix}.rollout_is"), source.take(f"{prefix}.rollout_is_threshold")
    draft.put_default("actor.recompute_logprob", not (bypass is not None and bypass.value is True))
    if level is None:
        return
    if level.value not in ("token", "sequence"):
        draft.left_out(level, "levels are token and sequence")
        return
    put_correction(draft, level, level=level.value, bound=bound)


def _optimizer(source: Source, draft: Draft) -> None:
    betas = source.take(f"{R}.actor.optim.betas")
    if betas is not None:
        if isinstance(betas.value, list) and len(betas.value) == 2:
            draft.put("actor.optimizer.beta1", betas.value[0], betas)
            draft.put("actor.optimizer.beta2", betas.value[1], betas)
        else:
            draft.error(f"{betas.key} must be a list of two numbers", betas)
    least, rate = source.take(f"{R}.actor.optim.min_lr"), draft.values.get("actor.optimizer.lr")
    if least is not None and isinstance(rate, float) and rate > 0 and isinstance(least.value, int | float):
        draft.put("actor.optimizer.min_lr_ratio", least.value / rate, least)
    recompute = source.take(f"{R}.actor.megatron.override_transformer_config.recompute_granularity")
    if recompute is not None:
        draft.put("actor.gradient_checkpointing", True, recompute)
        draft.put("actor.megatron.recompute_granularity", recompute.value, recompute)
    prefix = f"{R}.actor.megatron.override_transformer_config"
    put_expert_bias(draft, f"{prefix}.moe_router_enable_expert_bias", f"{prefix}.moe_router_bias_update_rate")
