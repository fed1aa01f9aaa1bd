"""Guarding the decoupled loss against stale tokens, where the recomputed policy has left the one that sampled.

The semantics and names are those of AReaL's RejectionSamplingConfig (areal/utils/functional/functional.py,
`apply_rejection_sampling`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from areal_like.algorithms.fields import max_by_sequence, mean_by_sequence, sequence_index, sum_by_sequence
from areal_like.algorithms.kl import approximate_kl
from areal_like.data.batch import PackedBatch

_CHOICES = {
    "level": ("token", "sequence"),
    "action": ("mask", "clamp"),
    "metric": ("ratio", "kl_k1", "kl_k2", "kl_k3"),
    "agg": ("sum", "mean", "max"),
}


@dataclass(frozen=True)
class RejectionSampling:
    """Bounds on how far the proximal policy may be from the behaviour policy.

    Attributes:
        level: "token" judges each token, "sequence" all loss tokens of a sequence together.
        action: "mask" takes what is out of bounds out of the loss (it stays in the denominator); "clamp" clamps its
            importance weight into [lower, upper] and trains on it.
        metric: "ratio" is prox / behave; "kl_k1", "kl_k2", "kl_k3" are `kl.approximate_kl(prox, behave, ...)`.
        agg: how a sequence's value comes from its tokens; of "ratio" in log space, so that "mean" is the geometric mean
            and does not grow with the length.
        upper, lower: the bounds, both inclusive; no lower bound when None.

    With level "sequence" and metric "ratio", the geometric mean is also the importance weight of all its tokens.
    """

    level: str = "token"
    action: str = "mask"
    metric: str = "ratio"
    agg: str = "mean"
    upper: float = 5.0
    lower: float | None = None

    def __post_init__(self) -> None:
        at = "rejection_sampling"
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise ValueError(f"{at}.{name} is {getattr(self, name)!r}; it is one of {', '.join(choices)}")
        if self.lower is not None and self.lower > self.upper:
            raise ValueError(f"{at}.lower ({self.lower}) is above upper ({self.upper})")
        if self.metric == "ratio" and not self.upper > 1:
            raise ValueError(f"{at}.upper is {self.upper}; a ratio's bound lies above 1, where the policies agree")
        if self.metric == "ratio" and self.lower is not None and not 0 <= self.lower < 1:
            raise ValueError(f"{at}.lower is {self.lower}; a ratio's lower bound lies in [0, 1)")
        if self.metric in ("kl_k2", "kl_k3") and not self.upper > 0:
            raise ValueError(f"{at}.upper is {self.upper}; {self.metric} is never negative, bound it above 0")
        if self.action == "clamp" and self.metric != "ratio":
            raise ValueError(f"{at}.action 'clamp' clamps the ratio; with a KL metric the action is 'mask'")

    def __call__(self, prox: Tensor, behave: Tensor, mask: Tensor, batch: PackedBatch) -> tuple[Tensor, Tensor, Tensor]:
        """Judge the tokens of `mask`.

        Args:
            prox, behave: log-probabilities `[tokens]` of the proximal and the behaviour policy, finite inside `mask`.
            mask: boolean `[tokens]`, the loss tokens.

        Returns:
            (kept, weight, touched): boolean `[tokens]` of what stays in the loss; the importance weight prox / behave
            `[tokens]`, clamped as asked; boolean `[tokens]` of what was masked or clamped.
        """
        log_ratio = torch.where(mask, prox - behave, 0.0)
        if self.level == "sequence" and self.metric == "ratio":
            weight = mean_by_sequence(log_ratio, mask, batch).exp()[sequence_index(batch)]
        else:
            weight = log_ratio.exp()
        outside = mask & self._outside(prox, behave, log_ratio, mask, batch)
        if self.action == "mask":
            return mask & ~outside, weight, outside
        clamped = torch.where(outside, weight.clamp(min=self.lower or 0.0, max=self.upper), weight)
        return mask, clamped, outside & (clamped != weight)

    def _outside(self, prox: Tensor, behave: Tensor, log_ratio: Tensor, mask: Tensor, batch: PackedBatch) -> Tensor:
        if self.metric == "ratio":
            value = log_ratio
        else:
            value = torch.where(mask, approximate_kl(prox, behave, self.metric.removeprefix("kl_")), 0.0)
        if self.level == "sequence":
            if self.agg == "sum":
                value = sum_by_sequence(value, batch)
            elif self.agg == "mean":
                value = mean_by_sequence(value, mask, batch)
            else:
                value = max_by_sequence(value, mask, batch)
            value = value[sequence_index(batch)]
        if self.metric == "ratio":
            value = value.exp()
        outside = value > self.upper
        return outside if self.lower is None else outside | (value < self.lower)
