"""Keys that are each right and do not go together."""

from __future__ import annotations

from collections.abc import Callable

from areal_like.config.experiment import RLConfig
from areal_like.config.findings import Findings, Place, diagnostic

Locate = Callable[[str], Place]


def check(config: RLConfig, locate: Locate, findings: Findings) -> None:
    """Findings AL816 (errors) and AL817 (warnings)."""

    def error(path: str, message: str, help: str) -> None:
        findings.add(diagnostic("AL816", message, locate(path), path=path, help=help))

    def warn(path: str, message: str, help: str) -> None:
        findings.add(diagnostic("AL817", message, locate(path), path=path, severity="warning", help=help))

    _training(config, error, warn)
    _sampling(config, error, warn)
    _reference(config, error, warn)
    _evaluation(config, warn)
    _problems(config, error, warn)


Say = Callable[[str, str, str], None]


def _training(config: RLConfig, error: Say, warn: Say) -> None:
    actor = config.actor
    if actor.optimizer is None:
        error("actor.optimizer", "the actor has no optimizer", "give at least actor.optimizer: {lr: 1e-6}")
    if actor.rejection_sampling is not None and not actor.use_decoupled_loss:
        hint = "set actor.use_decoupled_loss: true, or leave rejection_sampling out"
        warn("actor.rejection_sampling", "rejection_sampling does nothing without use_decoupled_loss", hint)
    ddp = actor.megatron.ddp
    if ddp.overlap_param_gather and not (ddp.overlap_grad_reduce and ddp.use_distributed_optimizer):
        path = "actor.megatron.ddp.overlap_param_gather"
        hint = "set overlap_grad_reduce and use_distributed_optimizer to true"
        error(path, "overlap_param_gather needs overlap_grad_reduce and use_distributed_optimizer", hint)
    answers = (config.rollout.consumer_batch_size or config.train_dataset.batch_size) * config.gconfig.n_samples
    if actor.ppo_n_minibatches > answers:
        message = f"{actor.ppo_n_minibatches} optimizer steps cannot share the {answers} answers of a batch"
        error("actor.ppo_n_minibatches", message, "lower it, or raise train_dataset.batch_size or gconfig.n_samples")


def _sampling(config: RLConfig, error: Say, warn: Say) -> None:
    for name in ("gconfig", "eval_gconfig"):
        sampling = config.gconfig if name == "gconfig" else config.eval_gconfig
        if sampling is not None and sampling.min_new_tokens > sampling.max_new_tokens:
            message = f"min_new_tokens {sampling.min_new_tokens} is above max_new_tokens {sampling.max_new_tokens}"
            error(f"{name}.min_new_tokens", message, "lower min_new_tokens")
    samples = config.gconfig.n_samples
    if config.gconfig.greedy and samples > 1:
        message = "greedy answers of one prompt are all equal: their group carries no advantage"
        warn("gconfig.greedy", message, "set greedy: false")
    for name in ("reward_norm", "adv_norm"):
        norm = config.actor.reward_norm if name == "reward_norm" else config.actor.adv_norm
        if norm is None or "group" not in (norm.mean_level, norm.std_level):
            continue
        if samples == 1:
            message = "a group of one answer has no mean to compare with: its normalised reward is always 0"
            warn("gconfig.n_samples", message, "raise gconfig.n_samples")


def _reference(config: RLConfig, error: Say, warn: Say) -> None:
    if config.actor.kl_ctl > 0 and config.ref is None:
        message = f"kl_ctl {config.actor.kl_ctl:g} weighs the divergence from `ref`, which is not given"
        error("actor.kl_ctl", message, "add `ref: {}` to measure from the actor's starting weights, or set kl_ctl: 0")
    if config.actor.kl_ctl == 0 and config.ref is not None:
        warn("ref", "ref is not started: actor.kl_ctl is 0", "leave `ref` out, or give actor.kl_ctl")


def _evaluation(config: RLConfig, warn: Say) -> None:
    timer = config.evaluator
    due = timer.freq_epochs or timer.freq_steps or timer.freq_secs
    if due and config.valid_dataset is None and config.rollout.environments is None:
        warn("evaluator", "nothing is evaluated: there is no valid_dataset", "add valid_dataset, or drop evaluator")
    if config.valid_dataset is not None and not due:
        warn("valid_dataset", "it is never evaluated: evaluator has no frequency", "set evaluator.freq_epochs: 1")


def _problems(config: RLConfig, error: Say, warn: Say) -> None:
    """Where the problems come from: rows, or environments."""
    given = config.rollout.environments is not None
    if not given and not config.train_dataset.path:
        help = "give train_dataset.path (openai/gsm8k, reasoning_gym/chain_sum, a folder), or rollout.environments"
        error("train_dataset", "nothing says what to train on", help)
    if given and config.train_dataset.path:
        message = "rollout.environments poses the problems: train_dataset.path is not read"
        warn("train_dataset.path", message, "leave train_dataset.path out; train_dataset.batch_size is read")
    if given and config.total_train_steps is None:
        message = "the problems of environments have no end, so no number of epochs ends the run"
        error("total_train_steps", message, "give total_train_steps")
