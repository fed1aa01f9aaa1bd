"""From the `actor` section of a configuration to the values of the algorithms."""

from __future__ import annotations

from areal_like.algorithms.advantages import AdvantageSettings, Normalization
from areal_like.algorithms.ppo import GRPOLoss
from areal_like.algorithms.rejection import RejectionSampling
from areal_like.config import ActorConfig, NormConfig


def policy_loss(actor: ActorConfig) -> GRPOLoss:
    """The loss of the actor. `kl_ctl` is not in it: as in AReaL, the divergence is taken off the rewards."""
    rejection = actor.rejection_sampling
    return GRPOLoss(
        eps_clip=actor.eps_clip,
        eps_clip_higher=actor.eps_clip_higher,
        c_clip=actor.c_clip,
        kl_estimator=actor.kl_estimator,
        use_decoupled_loss=actor.use_decoupled_loss,
        recompute_log_probs=actor.recompute_logprob,
        rejection=None
        if rejection is None
        else RejectionSampling(
            level=rejection.level,
            action=rejection.action,
            metric=rejection.metric,
            agg=rejection.agg,
            upper=rejection.upper,
            lower=rejection.lower,
        ),
        importance_sampling_level=actor.importance_sampling_level,
        entropy_coefficient=actor.entropy_coeff,
        report_entropy=True,
        temperature=actor.temperature,
    )


def advantage_settings(actor: ActorConfig, *, n_samples: int) -> AdvantageSettings:
    """How rewards become advantages.

    Args:
        n_samples: answers of a group, which `group_size` of a normalisation by group must be.

    Raises:
        ValueError: it is not; the key is named.
    """
    return AdvantageSettings(
        reward_scaling=actor.reward_scaling,
        reward_bias=actor.reward_bias,
        reward_clip=actor.reward_clip,
        reward_norm=_normalization(actor.reward_norm, "reward_norm", n_samples),
        adv_norm=_normalization(actor.adv_norm, "adv_norm", n_samples),
        kl_coefficient=actor.kl_ctl,
        kl_estimator=actor.kl_estimator,
        discount=actor.discount,
        gae_lambda=actor.gae_lambda,
        mask_no_eos_with_zero=actor.mask_no_eos_with_zero,
    )


def _normalization(norm: NormConfig | None, key: str, n_samples: int) -> Normalization | None:
    if norm is None:
        return None
    if "group" in (norm.mean_level, norm.std_level) and norm.group_size != n_samples:
        raise ValueError(
            f"actor.{key}.group_size is {norm.group_size}, but a group has gconfig.n_samples = {n_samples} answers: "
            "write ${gconfig.n_samples}, or leave it out"
        )
    return Normalization(norm.mean_level, norm.mean_leave1out, norm.std_level, norm.std_unbiased, norm.eps)
