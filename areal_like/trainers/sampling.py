"""From the sampling sections of the configuration to the parameters of each answer."""

from __future__ import annotations

from areal_like.alloc import Diagnostic, DiagnosticError
from areal_like.config import GenerationConfig
from areal_like.engines.base import SamplingParams

__all__ = ["sampling_params"]


def sampling_params(section: GenerationConfig, prompt_length: int, seed: int | None) -> SamplingParams:
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
