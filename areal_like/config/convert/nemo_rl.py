"""From and to NeMo-RL's configuration: what is more than a renaming of one key."""

from __future__ import annotations

from typing import Any

from areal_like.alloc import ModelAllocation
from areal_like.config.convert.common import check_sequence_parallel, group_norm, minibatches, put_correction, whole
from areal_like.config.convert.draft import Draft, Given, Source, read_rest, read_rows
from areal_like.config.convert.nemo_rl_keys import DTENSOR_SIZES, MEGATRON_SIZES, ROWS, SECTIONS, M
from areal_like.config.convert.ours import fixed_there, together, write_rows

DEFAULTS: dict[str, Any] = {row.theirs: row.default for row in ROWS} | {
    f"{M}.enabled": False,
    "policy.dtensor_cfg.enabled": True,
    "policy.train_global_batch_size": 512,
    "policy.train_micro_batch_size": 4,
    "policy.sequence_packing.enabled": True,
    "policy.dynamic_batching.enabled": False,
    "policy.generation.backend": "vllm",
    "policy.generation.colocated.enabled": True,
    "loss_fn.ratio_clip_max": 0.2,
    "loss_fn.use_importance_sampling_correction": False,
    "grpo.normalize_rewards": True,
    "grpo.use_leave_one_out_baseline": True,
    "grpo.async_grpo.enabled": False,
    "grpo.async_grpo.max_trajectory_age_steps": 1,
    "checkpointing.enabled": True,
}
_RESOURCES = "policy.generation.colocated.resources"
_SERVERS = ("vllm", "sglang")


def read(source: Source) -> Draft:
    """NeMo-RL's keys as keys of this system."""
    draft = Draft(source)
    if source.value("checkpointing.enabled") is False:
        source.taken.add("checkpointing.save_period")
        rows = tuple(row for row in ROWS if row.theirs != "checkpointing.save_period")
    else:
        rows = ROWS
    if source.has("data.train.dataset_name") and source.has("data.train.data_path"):
        rows = tuple(row for row in rows if row.theirs != "data.train.dataset_name")
        source.taken.add("data.train.dataset_name")
    read_rows(source, rows, draft)
    draft.put_default("experiment_name", "nemo-rl")
    draft.put_default("device", "cuda")
    _layouts(source, draft)
    _batches(source, draft)
    _algorithm(source, draft)
    _optimizer(source, draft)
    if draft.values.get("actor.kl_ctl"):
        draft.put_default("ref", {})
    read_rest(source, SECTIONS, draft)
    return draft


def _layouts(source: Source, draft: Draft) -> None:
    nodes, gpus = whole(source.value("cluster.num_nodes")), whole(source.value("cluster.gpus_per_node"))
    where = source.take("cluster.gpus_per_node") or Given("cluster.gpus_per_node", None, source.place)
    if nodes is None or gpus is None:
        draft.error("cluster.num_nodes and cluster.gpus_per_node must be whole numbers of at least 1", where)
        return
    world, servers = nodes * gpus, nodes * gpus
    colocated = source.take("policy.generation.colocated.enabled")
    if colocated is not None and colocated.value is False:
        found = _server_gpus(source, draft, nodes, gpus)
        if found is None:
            return
        servers, world = found, world - found
    else:
        draft.put_default("rollout.scheduling_strategy", {"type": "colocation", "target": "actor"})
        draft.put_default("enable_offload", True)  # NeMo-RL moves the policy to the host before it generates
    megatron, dtensor = source.take(f"{M}.enabled"), source.take("policy.dtensor_cfg.enabled")
    uses_megatron = megatron is not None and megatron.value is True
    if uses_megatron and dtensor is not None and dtensor.value is True and not dtensor.default:
        draft.error("megatron_cfg and dtensor_cfg are both enabled", dtensor, "enable one of them")
    if uses_megatron:
        actor = MEGATRON_SIZES.read(draft, world, "actor.backend", "megatron", where)
        check_sequence_parallel(draft, f"{M}.sequence_parallel", actor)
        source.taken |= {*DTENSOR_SIZES.keys.values()}
    else:
        DTENSOR_SIZES.read(draft, world, "actor.backend", "fsdp", where)
        source.taken |= {*MEGATRON_SIZES.keys.values(), MEGATRON_SIZES.expert_tensor}
    _rollout(source, draft, servers)


def _server_gpus(source: Source, draft: Draft, nodes: int, gpus: int) -> int | None:
    """GPUs of the inference servers when they stand apart from the trainer."""
    per_node, count = source.take(f"{_RESOURCES}.gpus_per_node"), source.take(f"{_RESOURCES}.num_nodes")
    taken = (whole(per_node.value) if per_node else gpus if nodes > 1 else None, whole(count.value) if count else 1)
    place = per_node or count or Given(_RESOURCES, None, source.place)
    if taken[0] is None or taken[1] is None:
        draft.error(f"generation is not colocated, so {_RESOURCES}.gpus_per_node and num_nodes say its GPUs", place)
        return None
    used = taken[0] * taken[1]
    if used >= nodes * gpus:
        draft.error(f"generation takes {used} of {nodes * gpus} GPUs: none is left to train on", place)
        return None
    return used


def _rollout(source: Source, draft: Draft, world: int) -> None:
    name = source.take("policy.generation.backend")
    server = str(name.value) if name else "vllm"
    if name is None or server not in _SERVERS:
        draft.error(f"policy.generation.backend: {server} has no backend here", name, "vllm and sglang have")
        return
    sizes: dict[str, int] = {}
    prefix = f"policy.generation.{server}_cfg"
    for field, theirs in (("tensor", "tensor_parallel_size"), ("pipeline", "pipeline_parallel_size")):
        given = source.take(f"{prefix}.{theirs}")
        if given is not None and whole(given.value) is None:
            draft.error(f"{given.key} is {given.value!r}; it must be a whole number of at least 1", given)
            return
        sizes[f"{field}_parallel_size"] = given.value if given else 1
    experts = source.take(f"{prefix}.expert_parallel_size")
    if experts is not None and experts.value != 1:
        draft.left_out(experts, "inference backends take no letter e")
    instance = sizes["tensor_parallel_size"] * sizes["pipeline_parallel_size"]
    if world % instance:
        message = f"{world} GPUs do not divide by the {instance} of one inference server: rollout.backend has no layout"
        draft.error(message, name, f"change {prefix}.tensor_parallel_size")
        return
    draft.backend("rollout.backend", server, {"data_parallel_size": world // instance, **sizes}, name)


def _batches(source: Source, draft: Draft) -> None:
    prompts, answers = source.take("grpo.num_prompts_per_step"), source.take("grpo.num_generations_per_prompt")
    mini = source.take("policy.train_global_batch_size")
    if prompts is not None and answers is not None and mini is not None:
        both = whole(prompts.value), whole(answers.value)
        if both[0] and both[1]:
            key = "num_prompts_per_step * num_generations_per_prompt"
            minibatches(draft, Given(key, both[0] * both[1], prompts.place, prompts.default), mini)
    size, longest = source.take("policy.train_micro_batch_size"), source.take("policy.max_total_sequence_length")
    for kind in ("sequence_packing", "dynamic_batching"):
        budget = source.take(f"policy.{kind}.train_mb_tokens")
        if source.value(f"policy.{kind}.enabled") is True and budget is not None and whole(budget.value):
            draft.put("actor.mb_spec.max_tokens_per_mb", budget.value, budget)
    if size is not None and longest is not None and whole(size.value) and whole(longest.value):
        why = f"{size.value} sequences of at most {longest.value} tokens; micro-batches are filled by tokens here"
        draft.assumed("actor.mb_spec.max_tokens_per_mb", size.value * longest.value, why, size)


def _algorithm(source: Source, draft: Draft) -> None:
    prefix = "grpo.adv_estimator" if source.has("grpo.adv_estimator.name") else "grpo"
    name = source.take("grpo.adv_estimator.name")
    by_std = source.take(f"{prefix}.normalize_rewards") or source.take("grpo.normalize_rewards")
    others = source.take(f"{prefix}.use_leave_one_out_baseline") or source.take("grpo.use_leave_one_out_baseline")
    source.taken |= {"grpo.normalize_rewards", "grpo.use_leave_one_out_baseline"}
    if name is not None and name.value != "grpo":
        draft.left_out(name, "grpo has a counterpart, in actor.reward_norm")
    elif by_std is not None and others is not None:
        group_norm(draft, by_std, std=by_std.value is True, leave_one_out=others.value is True, eps=1e-6)
    high = source.take("loss_fn.ratio_clip_max")
    if high is not None and high.value != draft.values.get("actor.eps_clip", 0.2):
        draft.put("actor.eps_clip_higher", high.value, high)
    draft.put_default("actor.recompute_logprob", True)
    correction = source.take("loss_fn.use_importance_sampling_correction")
    bound = source.take("loss_fn.truncated_importance_sampling_ratio")
    if correction is not None and correction.value is True:
        put_correction(draft, correction, level="token", bound=bound)
    ahead, age = source.take("grpo.async_grpo.enabled"), source.take("grpo.async_grpo.max_trajectory_age_steps")
    if ahead is not None and ahead.value is True and age is not None:
        draft.put("rollout.max_head_offpolicyness", age.value, age)


def _optimizer(source: Source, draft: Draft) -> None:
    rate = draft.values.get("actor.optimizer.lr")
    least = source.take(f"{M}.optimizer.min_lr")
    if least is not None and isinstance(rate, float) and rate > 0 and isinstance(least.value, int | float):
        if draft.values.get("actor.optimizer.lr_scheduler_type", "constant") == "constant":
            source.taken.add(least.key)  # nothing falls to it under a constant rate
        else:
            draft.put("actor.optimizer.min_lr_ratio", least.value / rate, least)
    warmup, steps = source.take(f"{M}.scheduler.lr_warmup_iters"), draft.values.get("total_train_steps")
    if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
        steps = None
    if warmup is not None and steps is not None and isinstance(warmup.value, int):
        draft.put("actor.optimizer.warmup_steps_proportion", min(1.0, warmup.value / steps), warmup)
    elif warmup is not None:
        draft.left_out(warmup, "a share of all steps is not known without grpo.max_num_steps")


def write(source: Source) -> Draft:
    """NeMo-RL's keys for a configuration of this system."""
    draft = Draft(source)
    source.taken |= {"cluster.n_nodes", "cluster.n_gpus_per_node", "ref"}
    if source.value("device") == "cpu":
        fixed_there(source, draft, {"device": "cuda"}, "NeMo-RL")
    skipped = ("cluster.n_nodes", "cluster.n_gpus_per_node")
    write_rows(source, tuple(row for row in ROWS if row.ours not in skipped), draft)
    if source.take("saver.freq_steps") is None:
        draft.values["checkpointing.enabled"] = False
    _write_layouts(source, draft)
    _write_batches(source, draft)
    _write_algorithm(source, draft)
    if "total_train_steps" not in source.given:
        warmup = source.take("actor.optimizer.warmup_steps_proportion")
        if warmup is not None and source.has(warmup.key):
            draft.left_out(warmup, "NeMo-RL counts warm-up in steps, and total_train_steps is not given")
    read_rest(source, {"": "no counterpart in NeMo-RL is known here"}, draft)
    return draft


def _write_layouts(source: Source, draft: Draft) -> None:
    actor_key, rollout_key = source.take("actor.backend"), source.take("rollout.backend")
    assert actor_key is not None and rollout_key is not None  # a file that loads has both
    actor, rollout = ModelAllocation.parse(actor_key.value), ModelAllocation.parse(rollout_key.value)
    ref = source.take("ref.backend")
    if ref is not None and ref.value != actor_key.value and source.has("ref.backend"):
        draft.left_out(ref, "NeMo-RL's reference has the layout of the policy")
    if actor.backend not in ("megatron", "fsdp"):
        draft.error(f"NeMo-RL has no trainer {actor.backend}", actor_key, "megatron and fsdp have a counterpart")
        return
    if actor.vpp > 1:
        draft.left_out(actor_key, "NeMo-RL has no key for virtual pipeline stages (the letter v)")
    megatron = actor.backend == "megatron"
    draft.put(f"{M}.enabled", megatron, actor_key)
    draft.put("policy.dtensor_cfg.enabled", not megatron, actor_key)
    for key, size in (MEGATRON_SIZES if megatron else DTENSOR_SIZES).write(actor).items():
        draft.put(key, size, actor_key)
    if megatron and actor.tp > 1:
        draft.put(f"{M}.sequence_parallel", True, actor_key)
    if rollout.backend not in _SERVERS:
        draft.left_out(rollout_key, f"NeMo-RL has no inference engine {rollout.backend} that this command knows")
    else:
        draft.put("policy.generation.backend", rollout.backend, rollout_key)
        draft.put(f"policy.generation.{rollout.backend}_cfg.tensor_parallel_size", rollout.tp, rollout_key)
        if rollout.pp > 1:
            draft.put(f"policy.generation.{rollout.backend}_cfg.pipeline_parallel_size", rollout.pp, rollout_key)
    _write_cluster(source, draft, actor, rollout, actor_key, rollout_key)


def _write_cluster(
    source: Source, draft: Draft, actor: ModelAllocation, rollout: ModelAllocation, where: Given, other: Given
) -> None:
    """Together on the same GPUs when the file says so, else side by side."""
    if actor.data_parallel_size is None or rollout.data_parallel_size is None:
        draft.left_out(where, "d is '*': give cluster.num_nodes and cluster.gpus_per_node")
        return
    shared = together(source)
    if shared and actor.world_size != rollout.world_size:
        message = f"actor and rollout share their GPUs, but have {actor.world_size} and {rollout.world_size} ranks"
        draft.error(message, other, "give both the same number of ranks")
        return
    world = actor.world_size + (0 if shared else rollout.world_size)
    per_node = min(world, int(source.value("cluster.n_gpus_per_node", 8)))
    if world % per_node or (not shared and world > per_node and rollout.world_size % per_node):
        message = f"{world} GPUs are no whole number of machines with {per_node}"
        draft.error(message, where, "set cluster.n_gpus_per_node, or change a layout")
        return
    nodes = world // per_node
    draft.put("cluster.num_nodes", nodes, where)
    draft.put("cluster.gpus_per_node", per_node, where)
    draft.put("policy.generation.colocated.enabled", shared, other)
    offload = source.take("enable_offload")
    if offload is not None and bool(offload.value) != shared:
        draft.left_out(
            offload, "NeMo-RL moves the policy to the host if, and only if, it shares its GPUs with generation"
        )
    if not shared:
        draft.put(f"{_RESOURCES}.gpus_per_node", rollout.world_size if nodes == 1 else per_node, other)
        draft.put(f"{_RESOURCES}.num_nodes", 1 if nodes == 1 else rollout.world_size // per_node, other)


def _write_batches(source: Source, draft: Draft) -> None:
    prompts, answers = source.value("train_dataset.batch_size", 1), source.value("gconfig.n_samples", 1)
    steps = source.take("actor.ppo_n_minibatches")
    if steps is not None:
        total = prompts * answers
        if total % steps.value:
            draft.error(f"{total} answers do not divide into {steps.value} equal updates", steps)
        else:
            draft.put("policy.train_global_batch_size", total // steps.value, steps)
    draft.values |= {"grpo.num_prompts_per_step": prompts, "grpo.num_generations_per_prompt": answers}
    budget = source.take("actor.mb_spec.max_tokens_per_mb")
    if budget is not None:
        draft.put("policy.sequence_packing.enabled", True, budget)
        draft.put("policy.sequence_packing.train_mb_tokens", budget.value, budget)


def _write_algorithm(source: Source, draft: Draft) -> None:
    names = ("mean_level", "std_level", "mean_leave1out", "std_unbiased", "eps", "group_size")
    norm = {name: source.take(f"actor.reward_norm.{name}") for name in names}
    source.taken |= {"actor.reward_norm", "actor.rejection_sampling"}
    fixed: dict[str, Any] = {"actor.reward_norm.eps": 1e-6, "actor.reward_norm.std_unbiased": True}
    fixed |= {"actor.rejection_sampling.metric": "ratio"}
    fixed_there(source, draft, fixed, "NeMo-RL")
    mean, std, others = norm["mean_level"], norm["std_level"], norm["mean_leave1out"]
    if mean is None or mean.value != "group":
        where = mean or Given("actor.reward_norm", None, source.place)
        draft.left_out(where, "NeMo-RL's GRPO always normalises by group")
    else:
        draft.put("grpo.normalize_rewards", std is not None and std.value == "group", std or mean)
        draft.put("grpo.use_leave_one_out_baseline", others is not None and bool(others.value), others or mean)
    low, high = source.take("actor.eps_clip"), source.take("actor.eps_clip_higher")
    if low is not None:
        draft.put("loss_fn.ratio_clip_max", (high or low).value, high or low)
    source.taken |= {"actor.recompute_logprob"}
    decoupled, upper = source.take("actor.use_decoupled_loss"), source.take("actor.rejection_sampling.upper")
    action, level = source.take("actor.rejection_sampling.action"), source.take("actor.rejection_sampling.level")
    if decoupled is not None and decoupled.value:
        draft.put("loss_fn.use_importance_sampling_correction", True, decoupled)
        if upper is not None and action is not None and action.value == "clamp":
            if level is None or level.value == "token":
                draft.put("loss_fn.truncated_importance_sampling_ratio", upper.value, upper)
            else:
                draft.left_out(upper, "NeMo-RL truncates the ratio of tokens, not of answers")
        elif upper is not None:
            draft.left_out(upper, "NeMo-RL truncates the ratio; it rejects no token")
    lag = source.take("rollout.max_head_offpolicyness")
    if lag is not None and lag.value:
        draft.put("grpo.async_grpo.enabled", True, lag)
        draft.put("grpo.async_grpo.max_trajectory_age_steps", lag.value, lag)
