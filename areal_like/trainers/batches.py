"""From rollouts to the batch that is trained on, and the figures that describe them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from areal_like.data.batch import PackedBatch
from areal_like.data.collate import collate
from areal_like.rollout.rows import trajectories
from areal_like.rollout.trajectories import RolloutGroup, TokenRollout

__all__ = ["log_prob_figures", "rollout_figures", "to_batch"]


def to_batch(groups: Sequence[RolloutGroup]) -> PackedBatch:
    """All attempts that did not fail as one packed batch, with the fields of `data.collate`; an episode whose turns are
    not prefixes of one another is several sequences. `group` counts from 0 in the order of `groups`.

    Raises:
        ValueError: an attempt says nothing of tokens (`Rollout`), or nothing was drawn at all.
    """
    rows = []
    for number, group in enumerate(groups):
        for member in group.members:
            if member.failed:
                continue
            if not isinstance(member, TokenRollout):
                raise ValueError(
                    f"problem {group.index} of {group.environment} was answered as text alone: training needs tokens"
                )
            rows += trajectories(member, number)
    return collate(rows)


def rollout_figures(groups: Sequence[RolloutGroup], batch: PackedBatch, version: int) -> dict[str, float]:
    """What a batch is like, for people.

    `reward/mean`, `reward/std` over attempts; `reward/groups_without_spread`: share of the groups whose attempts all
    have the same reward, which teach nothing; `rollout/answer_tokens`: tokens drawn in an attempt, in the mean;
    `rollout/turns`: calls of the model in it; `rollout/truncated`: share that ran into the length limit;
    `rollout/sequences`: that the attempts became; `rollout/lag_mean`, `rollout/lag_max`: versions between drawing a
    token and training on it; and the mean of each figure that environments report, as `environment/NAME`.
    """
    members = [member for group in groups for member in group.members if isinstance(member, TokenRollout)]
    members = [member for member in members if not member.failed]
    rewards = torch.tensor([float(member.reward or 0.0) for member in members])
    spreads = [max(group.rewards) - min(group.rewards) for group in groups if group.rewards]
    drawn = batch.tokens["loss_mask"] != 0
    lag = (version - batch.tokens["versions"][drawn]).float()
    return {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std(unbiased=False)),
        "reward/groups_without_spread": sum(spread == 0 for spread in spreads) / len(spreads),
        "rollout/answer_tokens": float(drawn.sum()) / len(members),
        "rollout/turns": sum(len(member.turns) for member in members) / len(members),
        "rollout/truncated": sum(member.truncated for member in members) / len(members),
        "rollout/sequences": float(len(batch)),
        "rollout/lag_mean": float(lag.mean()),
        "rollout/lag_max": float(lag.max()),
        **_reported(members),
    }


def _reported(members: Sequence[TokenRollout]) -> dict[str, float]:
    """Means of what environments say about their attempts, each over the attempts that say it."""
    values: dict[str, list[float]] = {}
    for member in members:
        for name, value in member.figures.items():
            values.setdefault(f"environment/{name}", []).append(value)
    return {name: sum(given) / len(given) for name, given in values.items()}


def log_prob_figures(batch: PackedBatch) -> dict[str, float]:
    """How far the trainer's log-probabilities are from those that the tokens were drawn with, over drawn tokens.

    On-policy it is what the two engines compute differently; running ahead, the change of the policy adds to it.
    """
    drawn = batch.tokens["loss_mask"] != 0
    difference = (batch.tokens["prox_log_probs"] - batch.tokens["old_log_probs"])[drawn].abs()
    return {
        "rollout/log_prob_difference_mean": float(difference.mean()),
        "rollout/log_prob_difference_max": float(difference.max()),
    }
