"""This system's keys as verl's."""

from __future__ import annotations

from typing import Any

from areal_like.alloc import ModelAllocation
from areal_like.config.convert.draft import Draft, Given, Source, read_rest
from areal_like.config.convert.experts import write_expert_bias
from areal_like.config.convert.ours import fixed_there, together, write_rows
from areal_like.config.convert.verl_keys import ROWS, R, megatron_sizes

_KL = {"k1": "kl", "k2": "mse", "k3": "low_var_kl"}
_NOWHERE = {"": "no counterpart in verl is known here"}


def write(source: Source) -> Draft:
    """verl's keys for a configuration of this system."""
    draft = Draft(source)
    source.taken |= {"cluster.n_nodes", "cluster.n_gpus_per_node", "ref", "eval_gconfig"}
    rows = tuple(row for row in ROWS if not row.ours.startswith("cluster."))
    write_rows(source, rows, draft)
    _offload(source, draft)
    _layouts(source, draft)
    _batches(source, draft)
    _loss(source, draft)
    _advantages(source, draft)
    _optimizer(source, draft)
    read_rest(source, _NOWHERE, draft)
    return draft


def _offload(source: Source, draft: Draft) -> None:
    """One switch for all becomes verl's switches."""
    given = source.take("enable_offload")
    if given is not None and given.value:
        for name in ("param_offload", "grad_offload", "optimizer_offload"):
            draft.put(f"{R}.actor.megatron.{name}", True, given)
        draft.put(f"{R}.ref.megatron.param_offload", True, given)


def _layouts(source: Source, draft: Draft) -> None:
    actor_key, rollout_key = source.take("actor.backend"), source.take("rollout.backend")
    assert actor_key is not None and rollout_key is not None  # a file that loads has both
    actor, rollout = ModelAllocation.parse(actor_key.value), ModelAllocation.parse(rollout_key.value)
    if actor.backend not in ("megatron", "fsdp"):
        draft.error(f"verl has no trainer {actor.backend}", actor_key, "megatron and fsdp have a counterpart")
        return
    draft.put(f"{R}.actor.strategy", actor.backend, actor_key)
    draft.put(f"{R}.ref.strategy", actor.backend, actor_key)
    for key, size in megatron_sizes(f"{R}.actor").write(actor).items():
        draft.put(key, size, actor_key)
    ref = source.take("ref.backend")
    if ref is not None and ref.value != actor_key.value and source.has("ref.backend"):
        draft.left_out(ref, "verl's reference shares the groups of the actor, whatever its keys say")
    if rollout.backend not in ("vllm", "sglang"):
        draft.left_out(rollout_key, f"verl has no inference engine {rollout.backend}; name one with rollout.name")
    else:
        draft.put(f"{R}.rollout.name", rollout.backend, rollout_key)
    draft.put(f"{R}.rollout.tensor_model_parallel_size", rollout.tp, rollout_key)
    if rollout.pp > 1:
        draft.put(f"{R}.rollout.pipeline_model_parallel_size", rollout.pp, rollout_key)
    _world(source, draft, actor, rollout, actor_key, rollout_key)


def _world(
    source: Source, draft: Draft, actor: ModelAllocation, rollout: ModelAllocation, where: Given, other: Given
) -> None:
    """verl has one pool of GPUs: the actor's ranks fill it and the servers share it."""
    if actor.data_parallel_size is None:
        draft.left_out(where, "d is '*': give trainer.nnodes and trainer.n_gpus_per_node")
        return
    world, per_node = actor.world_size, int(source.value("cluster.n_gpus_per_node", 8))
    gpus = min(world, per_node)
    if world % gpus:
        message = f"the actor's {world} ranks are no whole number of machines with {per_node} GPUs"
        draft.error(message, where, "set cluster.n_gpus_per_node, or change the layout")
        return
    draft.put("trainer.nnodes", world // gpus, where)
    draft.put("trainer.n_gpus_per_node", gpus, where)
    instance = rollout.tp * rollout.pp
    if rollout.backend in ("vllm", "sglang"):
        if world % instance:
            message = f"verl puts inference servers of {instance} GPUs on the actor's {world}, which do not divide"
            draft.error(message, other, "change t or p of rollout.backend")
        elif not together(source):
            draft.changed(other, f"verl puts the {world // instance} servers on the actor's {world} GPUs")
        elif rollout.data_parallel_size != world // instance:
            why = f"verl shares the actor's {world} GPUs: the servers become {world // instance}"
            draft.changed(other, why)


def _batches(source: Source, draft: Draft) -> None:
    batch, steps = source.take("train_dataset.batch_size"), source.take("actor.ppo_n_minibatches")
    if batch is not None and steps is not None:
        if batch.value % steps.value:
            message = f"a batch of {batch.value} prompts does not divide into {steps.value} mini-batches of verl"
            draft.error(message, steps, "make train_dataset.batch_size a multiple of actor.ppo_n_minibatches")
        else:
            draft.put(f"{R}.actor.ppo_mini_batch_size", batch.value // steps.value, steps)
    consumer = source.take("rollout.consumer_batch_size")
    if consumer is not None and batch is not None and consumer.value != batch.value:
        draft.left_out(consumer, "verl trains on the batch that it has generated")
    budget = source.take("actor.mb_spec.max_tokens_per_mb")
    if budget is not None:
        backend = source.take("actor.backend")
        parts = ModelAllocation.parse(backend.value).cp if backend else 1
        draft.put(f"{R}.actor.use_dynamic_bsz", True, budget)
        draft.put(f"{R}.actor.ppo_max_token_len_per_gpu", max(1, budget.value // parts), budget)


def _loss(source: Source, draft: Draft) -> None:
    low, high = source.take("actor.eps_clip"), source.take("actor.eps_clip_higher")
    if low is not None:
        draft.put(f"{R}.actor.clip_ratio_low", low.value, low)
        draft.put(f"{R}.actor.clip_ratio_high", (high or low).value, high or low)
        draft.put(f"{R}.actor.clip_ratio", low.value, low)
    weight, estimator = source.take("actor.kl_ctl"), source.take("actor.kl_estimator")
    if weight is not None and weight.value:
        draft.put("algorithm.use_kl_in_reward", True, weight)
        draft.put("algorithm.kl_ctrl.kl_coef", weight.value, weight)
        draft.put("algorithm.kl_penalty", _KL[estimator.value if estimator else "k1"], estimator or weight)
    level = "algorithm.rollout_correction"
    decoupled = source.take("actor.use_decoupled_loss")
    keys = ("level", "action", "metric", "lower", "upper")
    rejection = {name: source.take(f"actor.rejection_sampling.{name}") for name in keys}
    source.taken.add("actor.rejection_sampling")
    upper, where = rejection["upper"], rejection["level"]
    if decoupled is None or not decoupled.value:
        return
    if upper is None or where is None:
        draft.left_out(decoupled, "verl weighs by that ratio only with a bound on it: give rejection_sampling")
    elif _value(rejection["action"]) != "clamp" or _value(rejection["metric"]) != "ratio":
        draft.left_out(upper, "verl's rollout_rs rejects by measures of its own; clamping a ratio goes over")
    else:
        draft.put(f"{level}.rollout_is", where.value, where)
        draft.put(f"{level}.rollout_is_threshold", upper.value, upper)
        lower = rejection["lower"]
        if lower is not None:
            draft.left_out(lower, "verl bounds the ratio from above alone")


def _value(given: Given | None) -> Any:
    return given.value if given else None


def _advantages(source: Source, draft: Draft) -> None:
    names = ("mean_level", "std_level", "mean_leave1out", "std_unbiased", "eps", "group_size")
    norm = {name: source.take(f"actor.reward_norm.{name}") for name in names}
    source.taken.add("actor.reward_norm")
    fixed = {"actor.reward_norm.eps": 1e-6, "actor.reward_norm.std_unbiased": True}
    fixed_there(source, draft, fixed, "verl")
    recompute = source.take("actor.recompute_logprob")
    if recompute is not None and not recompute.value and not source.value("actor.use_decoupled_loss"):
        draft.put("algorithm.rollout_correction.bypass_mode", True, recompute)
    mean, std = norm["mean_level"], norm["std_level"]
    if mean is None or mean.value != "group":
        where = mean or Given("actor.reward_norm", None, source.place)
        draft.left_out(where, "only normalisation by group is an advantage estimator of verl (grpo, rloo)")
    elif _value(norm["mean_leave1out"]):
        draft.put("algorithm.adv_estimator", "rloo", mean)
        if std is not None:
            draft.left_out(std, "verl's rloo does not divide by a deviation")
    elif std is not None and std.value != "group":
        draft.left_out(std, "verl's grpo divides by the deviation of the group, or by nothing")
    else:
        draft.put("algorithm.adv_estimator", "grpo", mean)
        draft.put("algorithm.norm_adv_by_std_in_grpo", std is not None, std or mean)


def _optimizer(source: Source, draft: Draft) -> None:
    first, second = source.take("actor.optimizer.beta1"), source.take("actor.optimizer.beta2")
    if first is not None and second is not None and [first.value, second.value] != [0.9, 0.999]:
        draft.put(f"{R}.actor.optim.betas", [first.value, second.value], first)
    ratio, rate = source.take("actor.optimizer.min_lr_ratio"), source.take("actor.optimizer.lr")
    if ratio is not None and rate is not None and ratio.value:
        draft.put(f"{R}.actor.optim.min_lr", ratio.value * rate.value, ratio)
    recompute = source.take("actor.gradient_checkpointing")
    granularity = source.take("actor.megatron.recompute_granularity")
    prefix = f"{R}.actor.megatron.override_transformer_config"
    write_expert_bias(draft, f"{prefix}.moe_router_enable_expert_bias", f"{prefix}.moe_router_bias_update_rate")
    if recompute is not None and recompute.value and granularity is not None:
        draft.put(f"{prefix}.recompute_granularity", granularity.value, recompute)
    else:
        for key in ("recompute_method", "recompute_num_layers", "recompute_modules"):
            draft.values.pop(f"{prefix}.{key}", None)
