"""Every algorithm key of the actor section reaches the algorithm it is about."""

from __future__ import annotations

import pytest

from areal_like.algorithms import GRPOLoss, Normalization, RejectionSampling, advantage_settings, policy_loss
from areal_like.config import ActorConfig, NormConfig, RejectionSamplingConfig


def actor(**keys) -> ActorConfig:
    return ActorConfig(backend="megatron:d1", path="x", **keys)


def test_the_loss_of_areals_gsm8k_grpo_megatron():
    config = actor(
        eps_clip=0.4,
        eps_clip_higher=0.5,
        c_clip=3.0,
        temperature=0.7,
        kl_ctl=0.1,
        kl_estimator="k2",
        entropy_coeff=0.01,
        recompute_logprob=True,
        use_decoupled_loss=True,
        rejection_sampling=RejectionSamplingConfig(
            level="sequence", action="clamp", metric="ratio", upper=4.0, lower=0.5
        ),
    )
    assert policy_loss(config) == GRPOLoss(
        eps_clip=0.4,
        eps_clip_higher=0.5,
        c_clip=3.0,
        temperature=0.7,
        kl_coefficient=0.0,  # in the rewards
        kl_estimator="k2",
        entropy_coefficient=0.01,
        report_entropy=True,
        recompute_log_probs=True,
        use_decoupled_loss=True,
        rejection=RejectionSampling("sequence", "clamp", "ratio", "mean", 4.0, 0.5),
    )


def test_the_advantages():
    config = actor(
        reward_scaling=10.0,
        reward_bias=-0.5,
        reward_clip=5.0,
        kl_ctl=0.1,
        kl_estimator="k3",
        reward_norm=NormConfig(mean_level="group", std_level="group", group_size=4, mean_leave1out=True),
        adv_norm=NormConfig(mean_level="batch", std_level=None, eps=1e-3, std_unbiased=False),
    )
    settings = advantage_settings(config, n_samples=4)
    assert (settings.reward_scaling, settings.reward_bias, settings.reward_clip) == (10.0, -0.5, 5.0)
    assert (settings.kl_coefficient, settings.kl_estimator) == (0.1, "k3")
    assert settings.reward_norm == Normalization("group", True, "group", True, 1e-5)
    assert settings.adv_norm == Normalization("batch", False, None, False, 1e-3)
    assert advantage_settings(actor(), n_samples=4).reward_norm is None


def test_a_group_size_that_is_not_the_groups():
    config = actor(reward_norm=NormConfig(mean_level="group", group_size=2))
    with pytest.raises(ValueError, match=r"actor.reward_norm.group_size is 2, but a group has gconfig.n_samples = 8"):
        advantage_settings(config, n_samples=8)
