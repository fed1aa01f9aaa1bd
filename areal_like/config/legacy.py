"""Keys that belong to another system, or to an older AReaL: what to write here instead.

Two sources: `LEGACY` below, for keys that are wrong everywhere, that have been removed, or that one line here replaces;
and the tables of `convert`, which know every key of verl, NeMo-RL and Megatron-LM that goes over one by one.

A key is recognised wherever its last steps match: `actor_rollout_ref.actor.optim.lr`, `actor.optim.lr`, an override
with Hydra's `+`, and a flag, `--grpo-group-size`, which is the key `grpo_group_size`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from areal_like.config import paths
from areal_like.config.written import shown

ROOTS: dict[str, str] = {
    "actor_rollout_ref": "verl",
    "algorithm": "verl",
    "trainer": "verl",
    "data": "verl",
    "reward_model": "verl",
    "custom_reward_function": "verl",
    "global_profiler": "verl",
    "grpo": "nemo-rl",
    "policy": "nemo-rl",
    "loss_fn": "nemo-rl",
    "checkpointing": "nemo-rl",
}
"""Sections at the top of a file of another system, and its name for `areal-like convert --from`."""


ROLES = {"actor": "actor", "ref": "ref", "critic": "critic", "rollout": "rollout", "generation": "rollout"}
"""Steps that say which section here a key of another system belongs to."""


@dataclass(frozen=True)
class Legacy:
    """One key.

    Attributes:
        key: its last steps, dotted; without `actor_rollout_ref`.
        what: completes "KEY is ...".
        instead: what to write; `{value}` is the value given, `{role}` the section that it stands in, `{engine}` a
            backend of that role.
    """

    key: str
    what: str
    instead: str


def _letter(letter: str, name: str) -> tuple[Legacy, ...]:
    """A parallel size, in the spellings of verl, Megatron-LM, AReaL and of configuration files in general."""
    example = f"{{engine}}:{'' if letter == 'd' else 'd1'}{letter}{{value}}"
    instead = f"write the letter {letter} of {{role}}.backend, as in {example}"
    spellings = [f"{name}_model_parallel_size", f"{name}_parallel_size"]
    return tuple(Legacy(key, "a parallel size, which the `backend` string says", instead) for key in spellings)


_CAP = (
    "behave_imp_weight_cap: X is rejection_sampling: {{level: token, action: mask, metric: ratio, upper: X}}; "
    "behave_imp_weight_mode names level and action: token_mask, token_truncate (clamp), sequence_mask, "
    "sequence_truncate, or disabled, which is rejection_sampling: null"
)
_PROFILE = "write {role}.profiler.ranks, {role}.profiler.step_start and {role}.profiler.step_end, in optimizer steps"
_WRONG = "no key of any version of verl"

LEGACY: tuple[Legacy, ...] = (
    # parallel sizes
    *_letter("t", "tensor"),
    *_letter("p", "pipeline"),
    *_letter("c", "context"),
    *_letter("e", "expert"),
    *_letter("d", "data"),
    Legacy(
        "virtual_pipeline_model_parallel_size",
        "a parallel size, which the `backend` string says",
        "write the letter v of {role}.backend, as in megatron:p2v{value}",
    ),
    Legacy(
        "expert_tensor_parallel_size",
        "a parallel size, which the `backend` string says",
        "write the letter t of ffn in {role}.backend, as in megatron:(attn:d1t2|ffn:e2t{value})",
    ),
    Legacy("sequence_parallel", "not set apart here", "remove it: it is on wherever t is above 1"),
    # AReaL, removed or renamed (areal.md A.4, C.5, D.7)
    Legacy("behave_imp_weight_cap", "replaced by rejection_sampling", _CAP),
    Legacy("behave_imp_weight_mode", "replaced by rejection_sampling", _CAP),
    Legacy("behav_imp_weight_cap", "a misspelt key of older files, replaced by rejection_sampling", _CAP),
    Legacy(
        "allocation_mode",
        "replaced by one `backend` for each role",
        "sglang:d4+megatron:d4 is rollout.backend: sglang:d4 and actor.backend: megatron:d4",
    ),
    Legacy("launcher", "gone: nothing is launched outside the run", "remove the section"),
    Legacy(
        "moe_enable_deepep",
        "said by the dispatcher here",
        "write {role}.megatron.moe_token_dispatcher_type: flex, which is DeepEP, and remove the key",
    ),
    Legacy("async_training", "replaced by rollout.max_head_offpolicyness", "0 is synchronous"),
    Legacy("dataset_kwargs", "named kwargs here", "write kwargs: {{...}}"),
    Legacy("actor.group_size", "said once, for sampling and for advantages", "write gconfig.n_samples: {value}"),
    # verl: keys that documents name and that do not exist (peers.md 1B to 1D)
    Legacy("actor.kl_coeff", _WRONG, "write actor.kl_ctl: {value}, and `ref: {{}}`"),
    Legacy("algorithm.group_size", _WRONG, "write gconfig.n_samples: {value}"),
    Legacy("actor.gradient_clipping", _WRONG, "write actor.optimizer.gradient_clipping: {value}"),
    Legacy("generation_batch_size", _WRONG, "remove it: the rollout engine batches by itself"),
    Legacy("generation_batch_size_per_gpu", _WRONG, "remove it: the rollout engine batches by itself"),
    Legacy("default_megatron_kwargs", "an argument of a class that verl has removed", "write {role}.backend"),
    Legacy("process_on_nodes", "an argument of verl's RayResourcePool", "processes follow from {role}.backend"),
    Legacy("max_colocate_count", "an argument of verl's RayResourcePool", "processes follow from {role}.backend"),
    Legacy("use_profile", "gone from verl", _PROFILE),
    Legacy("profile_ranks", "gone from verl", _PROFILE),
    Legacy("profile.step_start", "gone from verl", _PROFILE),
    Legacy("profile.step_end", "gone from verl", _PROFILE),
    Legacy("profile.save_path", "gone from verl", _PROFILE),
    Legacy("param_offload", "a switch of the engine", "write {role}.megatron.param_offload: {value}"),
    Legacy("grad_offload", "a switch of the engine", "write {role}.megatron.grad_offload: {value}"),
    Legacy("optimizer_offload", "a switch of the engine", "write {role}.megatron.optimizer_offload: {value}"),
    Legacy("kl_ctrl.type", "verl's control of the divergence", "remove it: the weight actor.kl_ctl is fixed"),
    Legacy("kl_ctrl.horizon", "verl's control of the divergence", "remove it: the weight actor.kl_ctl is fixed"),
    Legacy("kl_ctrl.target_kl", "verl's control of the divergence", "remove it: the weight actor.kl_ctl is fixed"),
    Legacy("model_path", "a flag that verl's evaluation does not have", "write actor.path: {value}"),
    Legacy("eval_data", "a flag that verl's evaluation does not have", "write valid_dataset.path: {value}"),
    Legacy("dry_run", "an option that verl does not have", "`areal-like check FILE` does it"),
    # verl: keys that exist, and that several keys here replace
    Legacy(
        "algorithm.adv_estimator",
        "verl's choice of advantages",
        "grpo is actor.reward_norm: {{mean_level: group, std_level: group}}; rloo is {{mean_level: group, "
        "std_level: null, mean_leave1out: true}}; gae needs a value model",
    ),
    Legacy(
        "norm_adv_by_std_in_grpo",
        "verl's switch between GRPO and Dr.GRPO",
        "false is actor.reward_norm.std_level: null",
    ),
    Legacy("actor.use_kl_loss", "verl's switch", "actor.kl_ctl above 0 with `ref: {{}}` switches the divergence on"),
    Legacy("actor.kl_loss_coef", "verl's weight of the divergence", "write actor.kl_ctl: {value}, and `ref: {{}}`"),
    Legacy("actor.kl_loss_type", "verl's estimator", "write actor.kl_estimator: low_var_kl is k3, kl is k1, mse is k2"),
    Legacy(
        "algorithm.kl_penalty", "verl's estimator", "write actor.kl_estimator: low_var_kl is k3, kl is k1, mse is k2"
    ),
    Legacy("algorithm.use_kl_in_reward", "verl's switch", "actor.kl_ctl above 0 with `ref: {{}}` switches it on"),
    Legacy("kl_ctrl.kl_coef", "verl's weight of the divergence", "write actor.kl_ctl: {value}, and `ref: {{}}`"),
    Legacy(
        "ppo_mini_batch_size",
        "verl's mini-batch in prompts",
        "actor.ppo_n_minibatches counts them: train_dataset.batch_size / {value}",
    ),
    Legacy("actor.clip_ratio", "verl's clipping", "write actor.eps_clip: {value}"),
    Legacy("actor.clip_ratio_low", "verl's clipping", "write actor.eps_clip: {value}"),
    Legacy("actor.clip_ratio_high", "verl's clipping", "write actor.eps_clip_higher: {value}"),
    Legacy(
        "ppo_micro_batch_size_per_gpu",
        "verl's micro-batch in sequences",
        "micro-batches are filled by tokens: actor.mb_spec.max_tokens_per_mb, {value} times the longest sequence",
    ),
    Legacy(
        "ppo_micro_batch_size",
        "verl's micro-batch in sequences",
        "micro-batches are filled by tokens: actor.mb_spec.max_tokens_per_mb",
    ),
    Legacy(
        "ppo_max_token_len_per_gpu",
        "verl's token budget of one GPU",
        "write actor.mb_spec.max_tokens_per_mb: {value}, times c of actor.backend",
    ),
    Legacy("use_dynamic_bsz", "verl's switch", "remove it: micro-batches are always filled by tokens"),
    Legacy("actor.strategy", "verl's choice of engine", "actor.backend begins with it: {value}:d..."),
    Legacy("rollout.name", "verl's choice of engine", "rollout.backend begins with it: {value}:d..."),
    Legacy("optim.betas", "a list of verl", "write actor.optimizer.beta1 and beta2"),
    Legacy("optimizer.clip_grad", "verl's and Megatron's name", "write {role}.optimizer.gradient_clipping: {value}"),
    Legacy("recompute_activations", "a flag of Megatron-LM", "write actor.gradient_checkpointing: true"),
    Legacy(
        "override_transformer_config.recompute_granularity",
        "Megatron-Core's",
        "write actor.gradient_checkpointing: true and actor.megatron.recompute_granularity: {value}",
    ),
    # NeMo-RL
    Legacy(
        "grpo.use_leave_one_out_baseline",
        "NeMo-RL's choice of advantages",
        "write actor.reward_norm.mean_leave1out: {value}, with mean_level: group",
    ),
    Legacy(
        "grpo.normalize_rewards", "NeMo-RL's choice", "write actor.reward_norm: {{mean_level: group, std_level: group}}"
    ),
    Legacy(
        "train_global_batch_size",
        "NeMo-RL's mini-batch in answers",
        "actor.ppo_n_minibatches counts them: batch_size * n_samples / {value}",
    ),
    Legacy("loss_fn.ratio_clip_max", "NeMo-RL's clipping", "write actor.eps_clip_higher: {value}"),
    Legacy("max_trajectory_age_steps", "NeMo-RL's bound of staleness", "write rollout.max_head_offpolicyness: {value}"),
    # Megatron-RL (peers.md 1A)
    Legacy("rl_partial_rollouts", "a flag of Megatron-RL", "rollout.generation_lag says it, and the granularities"),
    Legacy("grpo_clamp_eps_upper", "a flag of Megatron-RL", "write actor.eps_clip_higher: {value}"),
    Legacy("perform_rl_step", "a flag of Megatron-RL", "remove it"),
    Legacy("rl_inference_logprobs_is_correction", "a flag of Megatron-RL", "write actor.use_decoupled_loss: true"),
    Legacy(
        "rl_importance_sampling_truncation_coef",
        "a flag of Megatron-RL",
        "write actor.rejection_sampling: {{level: token, action: clamp, metric: ratio, upper: {value}}}",
    ),
    *(
        Legacy(
            f"rl_inference_{name}_model_parallel_size",
            "a flag of Megatron-RL",
            f"write the letter {letter} of rollout.backend, as in sglang:d1{letter}{{value}}",
        )
        for letter, name in (("t", "tensor"), ("p", "pipeline"))
    ),
    Legacy(
        "micro_batch_size",
        "a size of Megatron-LM",
        "micro-batches are filled by tokens: actor.mb_spec.max_tokens_per_mb",
    ),
    Legacy("global_batch_size", "a size of Megatron-LM", "train_dataset.batch_size counts prompts"),
    Legacy("seq_length", "a size of Megatron-LM", "write gconfig.max_tokens: {value}, prompt and answer together"),
    Legacy(
        "env_config", "a flag that Megatron-RL's trainer does not have", "rewards are given to the trainer in Python"
    ),
)


def look_up(path: str, value: Any) -> tuple[str, str] | None:
    """What an unknown key is, and what to write instead; None for one that nobody knows.

    Args:
        path: the whole key as the user wrote it, dotted.
        value: its value; not shown when it is a section or a list.
    """
    steps = _normal(path)
    if not steps:
        return None
    if steps[-1] == "allocation_mode":
        return _allocation_mode(value)
    role = next((ROLES[step] for step in steps if step in ROLES), "actor")
    engine = "sglang" if role == "rollout" else "megatron"
    given = "..." if isinstance(value, dict | list) or value is None else shown(value)
    for start in range(len(steps)):
        found = _legacy().get(".".join(steps[start:]))
        if found is not None:
            return found.what, found.instead.format(value=given, role=role, engine=engine)
    return _converted(steps, path.lstrip("+").startswith("-"), value)


def _normal(path: str) -> list[str]:
    """The steps of a key: flags as keys, without verl's common root and list positions."""
    steps = [str(step) for step in paths.split(path.lstrip("+~")) or () if not isinstance(step, int)]
    if steps and steps[0].startswith("--"):
        steps = [steps[0].lstrip("-").replace("-", "_"), *steps[1:]]
    return steps[1:] if steps[:1] == ["actor_rollout_ref"] else steps


@cache
def _legacy() -> dict[str, Legacy]:
    return {row.key: row for row in LEGACY}


def _allocation_mode(value: Any) -> tuple[str, str]:
    from areal_like.config.convert.allocation_mode import advice

    row = _legacy()["allocation_mode"]
    fields = advice(value)
    return row.what, f"write {fields}" if fields else row.instead.format()


def _converted(steps: list[str], is_flag: bool, value: Any) -> tuple[str, str] | None:
    """From the tables of `convert`. They are read only here: a file without foreign keys does not need them."""
    rows = _rows()
    role = steps[0] if steps[0] in ("ref", "critic") else "actor"
    found = rows.get(".".join(steps)) or (rows.get(".".join(["actor", *steps[1:]])) if role != "actor" else None)
    if found is None or (found[0] == "Megatron-LM" and not is_flag and steps[0] in _our_names()):
        return None
    system, row = found
    if not row.ours:
        return f"a key of {system} without counterpart", f"remove it: {row.note}" if row.note else "remove it"
    from areal_like.config.convert.draft import NoCounterpart

    text = "..."
    if not isinstance(value, dict | list) and value is not None:
        try:
            text = shown(row.forth(value) if row.forth else value)
        except NoCounterpart as error:
            text = f"... ({error})"
    ours = f"{role}.{row.ours.removeprefix('actor.')}" if row.ours.startswith("actor.") else row.ours
    return f"a key of {system}", f"write {ours}: {text}"


@cache
def _rows() -> dict[str, Any]:
    from areal_like.config.convert import megatron_lm_keys, nemo_rl_keys, verl_keys

    found: dict[str, Any] = {}
    for row in megatron_lm_keys.ROWS:
        found[row.theirs.replace("-", "_")] = ("Megatron-LM", row)
    for row in nemo_rl_keys.ROWS:
        found[row.theirs] = ("NeMo-RL", row)
    for row in verl_keys.ROWS:
        found[row.theirs.removeprefix("actor_rollout_ref.")] = ("verl", row)
    return found


@cache
def _our_names() -> frozenset[str]:
    """Last steps of this system's keys: a bare `lr` is rather one of ours in the wrong place than a flag."""
    from areal_like.config.experiment import RLConfig

    return frozenset(str(steps[-1]) for steps, _ in paths.keys(RLConfig))
