"""From rollouts to the batch that is trained on, and the figures that describe them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from areal_like.data.batch import PackedBatch
from areal_like.data.collate import Trajectory, collate
from areal_like.rollout.groups import RolloutGroup

__all__ = ["log_prob_figures", "rollout_figures", "to_batch"]


def to_batch(groups: Sequence[RolloutGroup]) -> PackedBatch:
    """All answers as one packed batch, with the fields of `data.collate`."""
    return collate(
        [
            Trajectory(
                prompt_ids=group.prompt.prompt_ids,
                completion_ids=answer.token_ids,
                log_probs=answer.log_probs,
                versions=answer.versions,
                reward=answer.rewarded,
                group=group.prompt.index,
                truncated=answer.finish_reason == "length",
            )
            for group in groups
            for answer in group.finished()
        ]
    )


def rollout_figures(groups: Sequence[RolloutGroup], batch: PackedBatch, version: int) -> dict[str, float]:
    """What a batch is like, for people.

    `reward/mean`, `reward/std` over answers; `reward/groups_without_spread`: share of the groups whose answers all have
    the same reward, which teach nothing; `rollout/answer_tokens`: mean length; `rollout/truncated`: share that ran into
    the length limit; `rollout/lag_mean`, `rollout/lag_max`: versions between drawing a token and training on it.
    """
    rewards = torch.tensor([[answer.rewarded for answer in group.finished()] for group in groups])
    drawn = batch.tokens["loss_mask"] != 0
    lag = (version - batch.tokens["versions"][drawn]).float()
    return {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std(unbiased=False)),
        "reward/groups_without_spread": float((rewards.amax(1) == rewards.amin(1)).float().mean()),
        "rollout/answer_tokens": float(drawn.sum()) / len(batch),
        "rollout/truncated": float(batch.sequences["truncated"].float().mean()),
        "rollout/lag_mean": float(lag.mean()),
        "rollout/lag_max": float(lag.max()),
    }


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
