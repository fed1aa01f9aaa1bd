"""From finished rollouts to one packed batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from areal_like.data.batch import PackedBatch

PROMPT_VERSION = -1
"""Version of a token that no policy drew."""


@dataclass(frozen=True)
class Trajectory:
    """One answer to one prompt.

    Attributes:
        prompt_ids: tokens that were given, at least one.
        completion_ids: tokens behind it, at least one (an end token counts): drawn, unless `drawn` says otherwise.
        log_probs: log-probability that each was drawn with.
        versions: version of the policy that drew each.
        reward: of the whole answer.
        group: number of the prompt; the answers to one prompt share it.
        truncated: whether the length limit ended it.
        drawn: of each token of `completion_ids`, whether it was drawn (True) or given, as a tool's reply; None: all
            were.
    """

    prompt_ids: Sequence[int]
    completion_ids: Sequence[int]
    log_probs: Sequence[float]
    versions: Sequence[int]
    reward: float
    group: int
    truncated: bool = False
    drawn: Sequence[bool] | None = None

    def __post_init__(self) -> None:
        drawn = len(self.completion_ids)
        if not self.prompt_ids or not drawn:
            raise ValueError(f"a trajectory has {len(self.prompt_ids)} prompt and {drawn} drawn tokens; it needs both")
        if self.drawn is not None and (len(self.drawn) != drawn or not any(self.drawn)):
            raise ValueError(f"drawn marks {len(self.drawn)} of {drawn} tokens; it marks each, at least one as drawn")
        if len(self.log_probs) != drawn or len(self.versions) != drawn:
            raise ValueError(
                f"{drawn} tokens were drawn, but there are {len(self.log_probs)} log-probabilities "
                f"and {len(self.versions)} versions"
            )


def collate(trajectories: Sequence[Trajectory]) -> PackedBatch:
    """Pack trajectories, prompt and completion end to end, in their order.

    Token fields: `loss_mask` float32 (1 on drawn tokens), `old_log_probs` float32 (0 on given ones), `versions`
    int64 (-1 on given ones). Sequence fields: `rewards` float32, `group` int64, `truncated` bool.

    Raises:
        ValueError: there is no trajectory.
    """
    if not trajectories:
        raise ValueError("there is no trajectory to train on")
    ids, masks, log_probs, versions = [], [], [], []
    for t in trajectories:
        given, marks = len(t.prompt_ids), t.drawn or [True] * len(t.completion_ids)
        ids.append([*t.prompt_ids, *t.completion_ids])
        masks.append(torch.tensor([0.0] * given + [float(mark) for mark in marks]))
        own = [float(value) if mark else 0.0 for value, mark in zip(t.log_probs, marks, strict=True)]
        log_probs.append(torch.tensor([0.0] * given + own))
        theirs = [version if mark else PROMPT_VERSION for version, mark in zip(t.versions, marks, strict=True)]
        versions.append(torch.tensor([PROMPT_VERSION] * given + theirs, dtype=torch.int64))
    return PackedBatch.from_sequences(
        ids,
        {"loss_mask": masks, "old_log_probs": log_probs, "versions": versions},
        {
            "rewards": torch.tensor([float(t.reward) for t in trajectories]),
            "group": torch.tensor([t.group for t in trajectories], dtype=torch.int64),
            "truncated": torch.tensor([t.truncated for t in trajectories], dtype=torch.bool),
        },
    )
