"""The roles of reinforcement learning: what is computed with a model, beyond what any trained model needs."""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator
from pydantic_core import PydanticCustomError

from areal_like.config.fields import Section, key
from areal_like.config.training import OptimizerConfig, TrainEngineConfig

_NO_VALUES = "Predict a value for each token instead of the next token."
_GRPO = "advantages are GRPO's: one for each answer, without a value model or a discount"


class NormConfig(Section):
    """Subtract a mean and divide by a standard deviation, each over the batch or over a group."""

    mean_level: Literal["batch", "group"] | None = key("batch", "Where the mean is taken; null subtracts nothing.")
    std_level: Literal["batch", "group"] | None = key(
        "batch", "Where the standard deviation is taken; null divides by nothing."
    )
    group_size: int = key(
        1, "Answers of a group: those of one prompt.", unit="answers", ge=1, same_as="gconfig.n_samples"
    )
    eps: float = key(1e-5, "Added to the standard deviation.", ge=0.0)
    mean_leave1out: bool = key(False, "Leave an answer itself out of its mean.")
    std_unbiased: bool = key(True, "Divide the variance by n - 1 instead of n.")


class RejectionSamplingConfig(Section):
    """What happens to tokens whose policy has moved too far from the one that drew them.

    The ratio is exp(log-probability under the policy before this update - log-probability when drawn).
    """

    level: Literal["token", "sequence"] = key("token", "Judge each token, or each answer as a whole.")
    action: Literal["mask", "clamp"] = key("mask", "Leave out of the loss, or clamp the ratio to the bounds.")
    metric: Literal["ratio", "kl_k1", "kl_k2", "kl_k3"] = key(
        "ratio", "Compare the ratio r, or a KL estimate: k1 log r, k2 (log r)^2 / 2, k3 r - log r - 1."
    )
    lower: float | None = key(None, "Least value that is kept; null sets no limit.")
    upper: float = key(5.0, "Greatest value that is kept.")
    agg: Literal["mean", "sum", "max"] = key(
        "mean", "How the tokens of an answer are joined at level `sequence`; of a ratio, in its logarithm."
    )

    @model_validator(mode="after")
    def _bounds(self) -> RejectionSamplingConfig:
        if self.action == "clamp" and self.metric != "ratio":
            raise PydanticCustomError(
                "bounds", "clamp bounds a ratio: use metric ratio, or action mask", {"key": "action"}
            )
        if self.lower is not None and self.lower > self.upper:
            raise PydanticCustomError("bounds", "lower is above upper: nothing would be kept", {"key": "lower"})
        if self.metric == "ratio" and self.upper <= 1.0:
            raise PydanticCustomError("bounds", "a ratio of 1 means no change: upper must be above 1", {"key": "upper"})
        if self.metric == "ratio" and self.lower is not None and not 0.0 <= self.lower < 1.0:
            raise PydanticCustomError(
                "bounds", "a ratio of 1 means no change: lower must be at least 0 and below 1", {"key": "lower"}
            )
        if self.metric in ("kl_k2", "kl_k3") and self.upper <= 0.0:
            raise PydanticCustomError("bounds", "k2 and k3 are never negative: upper must be above 0", {"key": "upper"})
        return self


class ActorConfig(TrainEngineConfig):
    """The policy that is trained."""

    is_critic: bool = key(False, _NO_VALUES, unsupported_unless=(False,), why="the actor draws tokens")
    temperature: float = key(
        1.0,
        "Logits are divided by it in the loss; it should be that of the rollouts.",
        gt=0.0,
        inherits="gconfig.temperature",
    )
    max_new_tokens: int = key(1024, "Longest answer again.", unit="tokens", ge=1, same_as="gconfig.max_new_tokens")

    reward_scaling: float = key(1.0, "Rewards become (reward + reward_bias) * reward_scaling.")
    reward_bias: float = key(0.0, "Added to a reward before it is scaled.")
    reward_clip: float = key(20.0, "Greatest absolute value of a scaled reward.", gt=0.0)
    reward_norm: NormConfig | None = key(None, "Normalisation of rewards; GRPO takes mean and deviation of the group.")
    adv_norm: NormConfig | None = key(None, "Normalisation of advantages, over loss tokens.")

    eps_clip: float = key(0.2, "The ratio of the update is clipped at 1 - eps_clip below.", gt=0.0)
    eps_clip_higher: float | None = key(
        None, "The ratio is clipped at 1 + eps_clip_higher above; null takes eps_clip.", gt=0.0
    )
    c_clip: float | None = key(
        None, "Bound of the loss for negative advantages (dual clip), above 1; null sets none.", gt=1.0
    )
    kl_ctl: float = key(0.0, "Weight of the KL divergence from `ref`; 0 starts no reference model.", ge=0.0)
    kl_estimator: Literal["k1", "k2", "k3"] = key("k1", "Estimator of that divergence.")
    entropy_coeff: float = key(0.0, "Weight of the entropy that is added to the objective.", ge=0.0)

    ppo_n_minibatches: int = key(4, "Optimizer steps that one batch of rollouts is divided into.", unit="steps", ge=1)
    update_iterations: int = key(
        1,
        "Times that a batch of rollouts is trained on, each divided into ppo_n_minibatches; Megatron-RL's"
        " grpo_iterations.",
        ge=1,
    )
    recompute_logprob: bool = key(
        False, "Take old log-probabilities from the actor before the update instead of from the rollout engine."
    )
    use_decoupled_loss: bool = key(
        False, "Clip against the actor before the update, and weigh by its ratio to the policy that drew the tokens."
    )
    rejection_sampling: RejectionSamplingConfig | None = key(
        None, "Treatment of tokens that have become too unlikely or too likely; needs use_decoupled_loss."
    )
    importance_sampling_level: Literal["token", "sequence"] = key(
        "token", "The ratio of the update is of each token, or the geometric mean over the answer (GSPO)."
    )
    prox_logp_method: Literal["recompute", "loglinear", "metrics"] = key(
        "recompute",
        "Where the log-probabilities before the update come from.",
        unsupported_unless=("recompute",),
        why="they are always computed by a forward pass",
    )
    discount: float = key(1.0, "Discount of later rewards.", unsupported_unless=(1.0,), why=_GRPO)
    gae_lambda: float = key(1.0, "Lambda of generalised advantages.", unsupported_unless=(1.0,), why=_GRPO)
    mask_no_eos_with_zero: bool = key(
        False,
        "Leave answers that ran into the length limit out of the loss.",
        unsupported_unless=(False,),
        why="all answers of a group are trained on",
    )
    log_agent_stats: bool = key(
        False, "Figures of agent trajectories.", no_effect="rollouts have one turn; their figures are always logged"
    )


class RefConfig(TrainEngineConfig):
    """The frozen policy that the KL divergence is measured from."""

    is_critic: bool = key(False, _NO_VALUES, unsupported_unless=(False,), why="the reference is a policy")
    backend: str = key("", "Engine and layout; the actor's when empty.", role="train", inherits="actor.backend")
    path: str = key("", "Weights; the actor's starting weights when empty.", inherits="actor.path")
    dtype: Literal["float32", "bfloat16", "float16"] = key(
        "bfloat16", "Type of parameters and arithmetic.", inherits="actor.dtype"
    )
    optimizer: OptimizerConfig | None = key(
        None, "A reference model is not trained.", unsupported_unless=(None,), why="a reference model is not trained"
    )


class CriticConfig(TrainEngineConfig):
    """A value model."""

    is_critic: bool = key(True, "Predict a value for each token.", unsupported_unless=(True,), why="it is the critic")
    backend: str = key("", "Engine and layout; the actor's when empty.", role="train", inherits="actor.backend")
    path: str = key("", "Weights; the actor's starting weights when empty.", inherits="actor.path")
    ppo_n_minibatches: int = key(4, "Optimizer steps that one batch is divided into.", unit="steps", ge=1)
    eps_clip: float = key(0.5, "Clipping of the value loss.", gt=0.0)
    mask_no_eos_with_zero: bool = key(False, "Leave answers that ran into the length limit out of the loss.")
