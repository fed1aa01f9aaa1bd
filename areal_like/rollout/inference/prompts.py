"""From a prompt of the inference interface to tokens, and the check of what a call asks for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from jinja2 import TemplateError

from areal_like.data.prompts import Tokenizer
from areal_like.data.rows import Message
from areal_like.engines.base import SamplingParams
from areal_like.rollout.inference.base import Prompt

__all__ = ["check_sampling", "encode", "messages_of"]


def messages_of(prompt: Prompt) -> list[Message] | None:
    """The conversation that a prompt is: text is one user message; None for token ids."""
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    if prompt and not isinstance(prompt[0], int):
        return list(cast("Sequence[Message]", prompt))
    return None


def encode(prompt: Prompt, tokenizer: Tokenizer) -> list[int]:
    """Token ids up to where the answer begins: through the chat template, or as plain text when there is none; token
    ids as they are.

    Raises:
        ValueError: nothing to continue, or the chat template refuses the conversation.
    """
    messages = messages_of(prompt)
    if messages is None:
        ids = list(cast("Sequence[int]", prompt))
    elif tokenizer.chat_template:
        try:
            ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
        except TemplateError as error:
            raise ValueError(f"the tokenizer's chat template refuses the conversation: {error}") from error
    else:
        ids = tokenizer.encode("\n".join(message["content"] for message in messages))
    if not ids:
        raise ValueError("the prompt is empty: there is nothing to continue")
    return [int(i) for i in ids]


def check_sampling(sampling: SamplingParams) -> None:
    """ValueError names the first argument that has no meaning."""
    rules = (
        (sampling.max_new_tokens >= 1, "max_new_tokens is at least 1"),
        (0 <= sampling.min_new_tokens <= sampling.max_new_tokens, "min_new_tokens lies between 0 and max_new_tokens"),
        (sampling.temperature >= 0, "temperature is not negative; 0 is greedy"),
        (0 < sampling.top_p <= 1, "top_p lies in (0, 1]"),
        (sampling.top_k >= 0, "top_k is not negative; 0 means no limit"),
        ("" not in sampling.stop, "a stop string is not empty"),
    )
    for holds, rule in rules:
        if not holds:
            raise ValueError(f"{rule}: {sampling}")
