"""Estimators of the Kullback-Leibler divergence from sampled tokens.

J. Schulman, "Approximating KL Divergence" (joschu.net/blog/kl-approx.html, 2020). For x drawn from the policy p and
r = q(x) / p(x), the estimators of KL(p || q) are

    k1 = -log r                  unbiased, can be negative, high variance
    k2 = (log r)^2 / 2           biased, never negative, low variance
    k3 = (r - 1) - log r         unbiased, never negative, low variance

Where the divergence from the reference enters is a choice of the caller, and the two are different algorithms:

- in the token rewards (`AdvantageSettings.kl_coefficient`): AReaL's `kl_ctl`, InstructGPT's form. No gradient flows
  through the estimate, so k1 is the natural one.
- in the loss (`GRPOLoss.kl_coefficient`): GRPO's form (arXiv 2402.03300), verl's `use_kl_loss`. The gradient is that of
  the estimate itself: k2 gives the true gradient of KL(p || q) in expectation, k3 that of another divergence which
  agrees near p = q, and the gradient of k1 is zero in expectation: it regularises nothing there.
"""

from __future__ import annotations

import torch
from torch import Tensor

KL_ESTIMATORS = ("k1", "k2", "k3")


def approximate_kl(log_probs: Tensor, other_log_probs: Tensor, estimator: str) -> Tensor:
    """Per-token estimate of KL(p || q), same shape as the inputs, differentiable in both.

    Args:
        log_probs: log p of each token, the token being drawn from p.
        other_log_probs: log q of the same tokens.
        estimator: one of `KL_ESTIMATORS`.

    Raises:
        ValueError: another estimator.
    """
    log_r = other_log_probs - log_probs
    if estimator == "k1":
        return -log_r
    if estimator == "k2":
        return log_r.square() / 2
    if estimator == "k3":
        return torch.expm1(log_r) - log_r  # expm1 keeps the digits that exp(x) - 1 loses near zero
    raise ValueError(f"kl_estimator {estimator!r} is unknown; it is one of {', '.join(KL_ESTIMATORS)}")
