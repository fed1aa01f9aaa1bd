"""From the sections of the configuration to the values that algorithms and engines take."""

from __future__ import annotations

import hashlib

from areal_like.algorithms import AdvantageSettings, GRPOLoss, Normalization, RejectionSampling
from areal_like.alloc import Diagnostic, DiagnosticError
from areal_like.config import ActorConfig, GenerationConfig, NormConfig
from areal_like.engines.base import SamplingParams

__all__ = ["advantage_settings", "needs_proximal", "policy_loss", "sample_seed", "sampling_params"]


def advantage_settings(actor: ActorConfig) -> AdvantageSettings:
    return AdvantageSettings(
        reward_scaling=actor.reward_scaling,
        reward_bias=actor.reward_bias,
        reward_clip=actor.reward_clip,
        reward_norm=_normalization(actor.reward_norm),
        adv_norm=_normalization(actor.adv_norm),
        kl_coefficient=actor.kl_ctl,
        kl_estimator=actor.kl_estimator,
    )


def _normalization(norm: NormConfig | None) -> Normalization | None:
    if norm is None:
        return None
    return Normalization(
        mean_level=norm.mean_level,
        mean_leave1out=norm.mean_leave1out,
        std_level=norm.std_level,
        std_unbiased=norm.std_unbiased,
        eps=norm.eps,
    )


def policy_loss(actor: ActorConfig) -> GRPOLoss:
    rejection = None
    if actor.rejection_sampling is not None and actor.use_decoupled_loss:
        section = actor.rejection_sampling
        rejection = RejectionSampling(
            level=section.level,
            action=section.action,
            metric=section.metric,
            agg=section.agg,
            upper=section.upper,
            lower=section.lower,
        )
    return GRPOLoss(
        eps_clip=actor.eps_clip,
        eps_clip_higher=actor.eps_clip_higher,
        c_clip=actor.c_clip,
        use_decoupled_loss=actor.use_decoupled_loss,
        recompute_log_probs=actor.recompute_logprob,
        rejection=rejection,
        importance_sampling_level=actor.importance_sampling_level,
        entropy_coefficient=actor.entropy_coeff,
        temperature=actor.temperature,
    )


def needs_proximal(actor: ActorConfig) -> bool:
    """Whether the log-probabilities under the policy before the update are computed by a forward pass."""
    return actor.recompute_logprob or actor.use_decoupled_loss


def sampling_params(section: GenerationConfig, prompt_length: int, seed: int) -> SamplingParams:
    """How one answer to a prompt of `prompt_length` tokens is drawn.

    Raises:
        DiagnosticError: `max_tokens` leaves no room for an answer.
    """
    longest = section.max_new_tokens
    if section.max_tokens is not None:
        longest = min(longest, section.max_tokens - prompt_length)
        if longest < 1:
            message = (
                f"a prompt of {prompt_length} tokens leaves nothing of max_tokens {section.max_tokens} to an answer"
            )
            help = "raise gconfig.max_tokens, or leave long prompts out by train_dataset.max_length"
            raise DiagnosticError([Diagnostic("AL568", "error", message, key="gconfig.max_tokens", help=help)])
    return SamplingParams(
        max_new_tokens=longest,
        min_new_tokens=min(section.min_new_tokens, longest),
        temperature=section.temperature,
        top_p=section.top_p,
        top_k=section.top_k,
        greedy=section.greedy or section.temperature == 0,
        stop_token_ids=section.stop_token_ids,
        stop=section.stop,
        seed=seed,
    )


def sample_seed(seed: int, purpose: str, prompt: int, sample: int) -> int:
    """A seed for one answer, which depends on what it is and not on where or when it is drawn."""
    digest = hashlib.blake2b(f"{seed}/{purpose}/{prompt}/{sample}".encode(), digest_size=4).digest()
    return int.from_bytes(digest) >> 1
