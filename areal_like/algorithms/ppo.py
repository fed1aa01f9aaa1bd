"""The policy loss of GRPO and PPO: clipped, dual-clipped, decoupled, per token over the whole global batch.

Per loss token, with r = exp(log pi - log anchor) and advantage A:

    surrogate  = min(r * A, clip(r, 1 - eps_clip, 1 + eps_clip_higher) * A)        PPO, arXiv 1707.06347, equation 7;
                                                                                   asymmetric: DAPO, arXiv 2503.14476
    dual clip  : where A < 0, surrogate := max(surrogate, c_clip * A)              arXiv 1912.09729, equation 5
    decoupled  : surrogate *= w, w = exp(log prox - log behave)                    AReaL, arXiv 2505.24298, equation 5
    loss       = -surrogate + kl_coefficient * KL(pi || ref) - entropy_coefficient * H

The anchor is the proximal policy (log-probabilities recomputed by the trainer before the first update) when it is given
or needed, else the behaviour policy that drew the tokens. The sum over loss tokens is divided by the loss tokens of the
*global* batch (token-mean, DAPO section 3.3), which the engine does: rejected tokens stay in the denominator.

AReaL's code applies w only when `rejection_sampling` is set; the paper, and this, apply it in every decoupled loss.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from areal_like.algorithms.fields import loss_mask, mean_by_sequence, sequence_index, token_field
from areal_like.algorithms.kl import KL_ESTIMATORS, approximate_kl
from areal_like.algorithms.rejection import RejectionSampling
from areal_like.data.batch import PackedBatch

if TYPE_CHECKING:
    from areal_like.algorithms.outputs import TokenOutputsLike


@dataclass(frozen=True)
class GRPOLoss:
    """The loss of the module's formulas, satisfying `engines.base.Loss`.

    Token fields read: `loss_mask`, `advantages`; `old_log_probs` (of the behaviour policy, from the rollout);
    `prox_log_probs` when `use_decoupled_loss` or `recompute_log_probs`; `ref_log_probs` when `kl_coefficient` is not
    0, and for the figure `ref_kl` whenever it is there (the divergence may stand in the rewards instead).

    Attributes:
        eps_clip, eps_clip_higher: the clipping range below and above 1; above is as below when None.
        c_clip: dual clip, above 1; None for none.
        kl_coefficient, kl_estimator: KL from the reference in the loss (`kl` says what that means).
        use_decoupled_loss: anchor at the proximal policy and weigh by proximal over behaviour.
        recompute_log_probs: anchor at the proximal policy without the weight.
        rejection: bounds on the weight of the decoupled loss.
        importance_sampling_level: "token", or "sequence": r is the geometric mean over the sequence's loss tokens
            (GSPO, arXiv 2507.18071, equation 7).
        entropy_coefficient: weight of the entropy bonus, in nats.
        report_entropy: compute the entropy for the figures alone.
        temperature: the engine divides the logits by it, so that log-probabilities are of what was sampled from.
    """

    eps_clip: float = 0.2
    eps_clip_higher: float | None = None
    c_clip: float | None = None
    kl_coefficient: float = 0.0
    kl_estimator: str = "k3"
    use_decoupled_loss: bool = False
    recompute_log_probs: bool = False
    rejection: RejectionSampling | None = None
    importance_sampling_level: str = "token"
    entropy_coefficient: float = 0.0
    report_entropy: bool = False
    temperature: float = 1.0

    def __post_init__(self) -> None:
        if not self.eps_clip >= 0:
            raise ValueError(f"eps_clip is {self.eps_clip}; it is at least 0")
        if self.eps_clip_higher is not None and not self.eps_clip_higher >= 0:
            raise ValueError(f"eps_clip_higher is {self.eps_clip_higher}; it is at least 0")
        if self.c_clip is not None and not self.c_clip > 1:
            raise ValueError(f"c_clip is {self.c_clip}; the dual clip lies above 1")
        if not self.temperature > 0:
            raise ValueError(f"temperature is {self.temperature}; log-probabilities need one above 0")
        if self.kl_estimator not in KL_ESTIMATORS:
            raise ValueError(f"kl_estimator {self.kl_estimator!r} is unknown; it is one of {', '.join(KL_ESTIMATORS)}")
        if self.importance_sampling_level not in ("token", "sequence"):
            raise ValueError(
                f"importance_sampling_level is {self.importance_sampling_level!r}; it is token or sequence"
            )
        if self.rejection is not None and not self.use_decoupled_loss:
            raise ValueError("rejection_sampling bounds the weight of the decoupled loss: set use_decoupled_loss: true")

    @property
    def needs_entropy(self) -> bool:
        return self.report_entropy or self.entropy_coefficient != 0

    def weight(self, batch: PackedBatch) -> Tensor:
        """The loss tokens of the batch, a float32 scalar."""
        return loss_mask(batch, "GRPOLoss").sum().float()

    def __call__(self, outputs: TokenOutputsLike, batch: PackedBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss summed over the loss tokens, and figures summed over them: `importance_weight`, `clip_fraction`,
        `dual_clip_fraction`, `approx_kl` (of the anchor from the policy), and as far as they apply `behave_kl`,
        `behave_importance_weight`, `rejected_fraction`, `ref_kl`, `entropy`.

        Raises:
            ValueError: a field is missing; it is named.
        """
        mask = loss_mask(batch, "GRPOLoss")
        # values outside the mask may be anything (even infinite): they are taken out before any exponential
        log_probs = torch.where(mask, outputs.log_probs, 0.0)
        advantages = torch.where(mask, token_field(batch, "advantages", "GRPOLoss").float(), 0.0)
        behave = self._log_probs(batch, "old_log_probs", mask)
        anchor = behave
        if self.use_decoupled_loss or self.recompute_log_probs:
            anchor = self._log_probs(batch, "prox_log_probs", mask)
        figures: dict[str, Tensor] = {}
        kept, weight = mask, None
        if self.use_decoupled_loss:
            kept, weight = self._behave_weight(anchor, behave, mask, batch, figures)
        loss = self._surrogate(log_probs, anchor, advantages, kept, weight, batch, figures)
        if self.kl_coefficient != 0 or "ref_log_probs" in batch.tokens:
            reference = self._log_probs(batch, "ref_log_probs", mask)
            ref_kl = torch.where(kept, approximate_kl(log_probs, reference, self.kl_estimator), 0.0).sum()
            figures["ref_kl"] = ref_kl.detach()
            if self.kl_coefficient != 0:
                loss = loss + self.kl_coefficient * ref_kl
        if self.needs_entropy:
            if outputs.entropy is None:
                raise ValueError("GRPOLoss asked for the entropy, and the engine did not give it")
            figures["entropy"] = torch.where(mask, outputs.entropy, 0.0).sum().detach()
            if self.entropy_coefficient != 0:  # else nothing of it goes through the backward pass
                loss = loss - self.entropy_coefficient * torch.where(kept, outputs.entropy, 0.0).sum()
        return loss, figures

    @staticmethod
    def _log_probs(batch: PackedBatch, name: str, mask: Tensor) -> Tensor:
        return torch.where(mask, token_field(batch, name, "GRPOLoss").float(), 0.0)

    def _behave_weight(
        self, prox: Tensor, behave: Tensor, mask: Tensor, batch: PackedBatch, figures: dict[str, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """(kept tokens, weight proximal / behaviour), without gradient: both were computed before the update."""
        if self.rejection is None:
            kept, weight, touched = mask, (prox - behave).exp(), torch.zeros_like(mask)
        else:
            kept, weight, touched = self.rejection(prox, behave, mask, batch)
        # tokens come from the behaviour policy, so this is k3 of KL(behaviour || proximal)
        figures["behave_kl"] = torch.where(mask, approximate_kl(behave, prox, "k3"), 0.0).sum()
        figures["behave_importance_weight"] = torch.where(kept, weight, 0.0).sum()
        figures["rejected_fraction"] = touched.sum().float()
        return kept, weight

    def _surrogate(
        self,
        log_probs: Tensor,
        anchor: Tensor,
        advantages: Tensor,
        kept: Tensor,
        weight: Tensor | None,
        batch: PackedBatch,
        figures: dict[str, Tensor],
    ) -> Tensor:
        """The clipped policy loss summed over the kept tokens."""
        log_ratio = log_probs - anchor
        if self.importance_sampling_level == "sequence":
            log_ratio = mean_by_sequence(log_ratio, kept, batch)[sequence_index(batch)]
        log_ratio = torch.where(kept, log_ratio, 0.0)
        ratio = log_ratio.exp()
        higher = self.eps_clip if self.eps_clip_higher is None else self.eps_clip_higher
        unclipped = -advantages * ratio
        clipped = -advantages * ratio.clamp(1 - self.eps_clip, 1 + higher)
        loss = torch.maximum(unclipped, clipped)
        dual = torch.zeros_like(kept)
        if self.c_clip is not None:
            bound = -self.c_clip * advantages
            dual = kept & (advantages < 0) & (loss > bound).detach()
            loss = torch.where(dual, bound, loss)
        if weight is not None:
            loss = loss * weight
        figures["importance_weight"] = torch.where(kept, ratio, 0.0).sum().detach()
        figures["clip_fraction"] = (kept & (clipped > unclipped)).sum().float()
        figures["dual_clip_fraction"] = dual.sum().float()
        figures["approx_kl"] = torch.where(kept, torch.expm1(log_ratio) - log_ratio, 0.0).sum().detach()
        return torch.where(kept, loss, 0.0).sum()
