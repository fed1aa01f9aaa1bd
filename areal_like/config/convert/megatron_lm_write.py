"""This system's keys as the flags of Megatron-LM's training scripts, Megatron-RL's included."""

from __future__ import annotations

import shlex

from areal_like.alloc import ModelAllocation
from areal_like.config.convert.draft import Draft, Given, Source
from areal_like.config.convert.experts import write_expert_bias
from areal_like.config.convert.megatron_lm_keys import ROWS, SIZES
from areal_like.config.convert.ours import fixed_there, write_rows


def write(source: Source) -> Draft:
    """Flags for a configuration of this system."""
    draft = Draft(source)
    source.taken |= {"cluster.n_nodes", "cluster.n_gpus_per_node", "ref"}
    source.taken |= {"rollout.scheduling_strategy", "actor.scheduling_strategy"}
    if source.value("device") == "cpu":
        fixed_there(source, draft, {"device": "cuda"}, "Megatron-LM")
    write_rows(source, ROWS, draft)
    actor_key = source.take("actor.backend")
    assert actor_key is not None  # a file that loads has one
    actor = ModelAllocation.parse(actor_key.value)
    if actor.backend != "megatron":
        draft.error(f"Megatron-LM cannot train with {actor.backend}", actor_key, "only megatron has a counterpart")
        return draft
    for flag, size in SIZES.write(actor).items():
        draft.put(flag, size, actor_key)
    if actor.tp > 1:
        draft.put("sequence-parallel", True, actor_key)
    if actor.data_parallel_size is not None:
        per_node = min(actor.world_size, int(source.value("cluster.n_gpus_per_node", 8)))
        if actor.world_size % per_node:
            message = f"the actor's {actor.world_size} ranks are no whole number of machines with {per_node} GPUs"
            draft.error(message, actor_key, "set cluster.n_gpus_per_node, or change the layout")
        else:
            draft.values |= {"nnodes": actor.world_size // per_node, "nproc-per-node": per_node}
    _write_rollout(source, draft)
    _write_training(source, draft)
    for given in source.rest():
        draft.left_out(given, "no flag for it is known here")
    return draft


def _write_rollout(source: Source, draft: Draft) -> None:
    given = source.take("rollout.backend")
    assert given is not None
    rollout = ModelAllocation.parse(given.value)
    draft.left_out(given, f"Megatron-RL generates with its own engine: only the sizes of {rollout.backend} go over")
    draft.put("rl-inference-tensor-model-parallel-size", rollout.tp, given)
    draft.put("rl-inference-pipeline-model-parallel-size", rollout.pp, given)
    lag = source.take("rollout.max_head_offpolicyness")
    if lag is not None and lag.value:
        draft.put("rl-partial-rollouts", True, lag)
        if source.value("rollout.generation_lag", None) is None:
            draft.put("rl-generation-lag", float(lag.value), lag)


def _write_training(source: Source, draft: Draft) -> None:
    dtype = source.take("actor.dtype")
    if dtype is not None and dtype.value != "float32":
        draft.put({"bfloat16": "bf16", "float16": "fp16"}[dtype.value], True, dtype)
    write_expert_bias(draft, "moe-router-enable-expert-bias", "moe-router-bias-update-rate")
    draft.put("perform-rl-step", True, Given("actor", None, source.place))
    low, high = source.take("actor.eps_clip"), source.take("actor.eps_clip_higher")
    if low is not None:
        draft.put("grpo-clamp-eps-upper", (high or low).value, high or low)
    steps, prompts = source.take("actor.ppo_n_minibatches"), source.value("train_dataset.batch_size", 1)
    answers = source.value("gconfig.n_samples", 1)
    if steps is not None and (prompts * answers) % steps.value:
        draft.error(f"{prompts * answers} answers do not divide into {steps.value} equal updates", steps)
    elif steps is not None:
        draft.put("global-batch-size", prompts * answers // steps.value, steps)
    draft.put("grpo-iterations", 1, Given("actor", None, source.place))
    source.taken |= {"actor.recompute_logprob", "actor.rejection_sampling"}
    if source.value("actor.kl_ctl"):
        fixed_there(source, draft, {"actor.kl_estimator": "k3"}, "Megatron-RL")
    names = ("mean_level", "std_level", "mean_leave1out", "std_unbiased", "eps", "group_size")
    norm = [source.take(f"actor.reward_norm.{name}") for name in names]
    source.taken.add("actor.reward_norm")
    norms = {"eps": 1e-4, "std_unbiased": False, "mean_leave1out": False}
    fixed_there(source, draft, {f"actor.reward_norm.{name}": v for name, v in norms.items()}, "Megatron-RL")
    if any(given is None or given.value != "group" for given in norm[:2]):
        where = norm[0] or Given("actor.reward_norm", None, source.place)
        draft.left_out(where, "Megatron-RL always normalises by mean and deviation of the group")
    budget, length = source.take("actor.mb_spec.max_tokens_per_mb"), source.take("gconfig.max_tokens")
    if length is not None:
        draft.put("seq-length", length.value, length)
        draft.put("inference-max-seq-length", length.value, length)
    if budget is not None:
        draft.put("rl-use-sequence-packing", True, budget)
        draft.changed(budget, "Megatron-RL packs into bins of seq-length tokens with micro-batch-size 1")
        draft.put("micro-batch-size", 1, budget)
        if length is None:
            draft.put("seq-length", budget.value, budget)
    if not source.value("actor.gradient_checkpointing"):
        for flag in ("recompute-granularity", "recompute-method", "recompute-num-layers", "recompute-modules"):
            draft.values.pop(flag, None)
    if source.value("actor.disable_dropout"):
        draft.values |= {"attention-dropout": 0.0, "hidden-dropout": 0.0}
    ratio, rate = source.take("actor.optimizer.min_lr_ratio"), source.take("actor.optimizer.lr")
    if ratio is not None and rate is not None and ratio.value:
        draft.put("min-lr", ratio.value * rate.value, ratio)
    if source.value("actor.use_decoupled_loss"):
        draft.values["rl-inference-logprobs-is-correction"] = True
        upper, action = source.take("actor.rejection_sampling.upper"), source.value("actor.rejection_sampling.action")
        bounds = {"actor.rejection_sampling.level": "token", "actor.rejection_sampling.metric": "ratio"}
        fixed_there(source, draft, bounds, "Megatron-RL")
        if upper is not None and action == "clamp":
            draft.put("rl-importance-sampling-truncation-coef", upper.value, upper)
        elif upper is not None:
            draft.left_out(upper, "Megatron-RL truncates the ratio; it rejects no token")


def to_flags(draft: Draft) -> str:
    """One flag a line, for a shell."""
    lines = []
    for name, value in sorted(draft.values.items()):
        if value is True:
            lines.append(f"--{name}")
        elif value is not False:
            lines.append(f"--{name} {shlex.quote(f'{value:g}' if isinstance(value, float) else str(value))}")
    return " \\\n".join(lines) + "\n"
