"""Megatron-RL's names for knobs of the loop, at the top of a file or as `name=value`: read as this system's keys.

Only names whose value means the same here. Everything else of Megatron-LM is answered with what to write (`legacy`), or
goes over by `areal-like convert`.
"""

from __future__ import annotations

from collections.abc import Sequence

from areal_like.config.findings import COMMAND_LINE, Findings, Place, diagnostic
from areal_like.config.nodes import Entry

__all__ = ["ALIASES", "apply", "renamed"]

ALIASES = {
    "grpo_prompts_per_step": "train_dataset.batch_size",
    "grpo_group_size": "gconfig.n_samples",
    "grpo_iterations": "actor.update_iterations",
    "grpo_clamp_eps_lower": "actor.eps_clip",
    "grpo_clamp_eps_upper": "actor.eps_clip_higher",
    "grpo_kl_beta": "actor.kl_ctl",
    "grpo_entropy_term_weight": "actor.entropy_coeff",
    "grpo_filter_groups_with_same_reward": "rollout.filter_groups_with_same_reward",
    "rl_generation_lag": "rollout.generation_lag",
    "rl_max_inflight_requests": "rollout.max_inflight_requests",
    "rl_submission_granularity": "rollout.submission_granularity",
    "rl_consumption_granularity": "rollout.consumption_granularity",
    "rl_default_temperature": "gconfig.temperature",
    "rl_prompts_per_eval": "evaluator.prompts_per_environment",
    "langrl_env_config": "rollout.environments",
}


def renamed(overrides: Sequence[str], findings: Findings) -> list[str]:
    """Overrides with their keys in this system's words."""
    found = []
    for number, override in enumerate(overrides, start=1):
        name, equals, value = override.partition("=")
        path = ALIASES.get(name)
        if path is not None:
            _say(name, path, Place(COMMAND_LINE, number, 1, override, len(name)), findings)
        found.append(f"{path or name}{equals}{value}")
    return found


def apply(root: Entry, findings: Findings) -> None:
    """Move the aliases of a file to where they belong. One whose key is given too is an error: which counts?"""
    for name in [name for name in root.value if name in ALIASES]:
        entry: Entry = root.value.pop(name)
        path = ALIASES[name]
        *sections, last = path.split(".")
        parent = root
        for section in sections:
            child = parent.value.get(section)
            if child is None or child.value is None:
                child = parent.value[section] = Entry({}, entry.at, entry.value_at)
            parent = child
        if not isinstance(parent.value, dict):
            continue  # a finding of its own: a section that is no mapping
        if last in parent.value:
            message = f"{name} is {path}, which is given too"
            findings.error("AL816", message, entry.at, path=name, help="keep one of them")
            continue
        parent.value[last] = entry
        _say(name, path, entry.at, findings)


def _say(name: str, path: str, place: Place, findings: Findings) -> None:
    findings.add(diagnostic("AL818", f"{name} is read as {path}", place, path=path, severity="info"))
