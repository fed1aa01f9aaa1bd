"""A conversation as tokens: what the model saw and drew stays as it was, and only what is new is encoded.

A chat template turns messages into text and text into tokens. Encoded anew at each turn, the model's own words may
come out as other tokens than it drew; the turns of an episode then are no prefixes of one another, and each has to be
trained on by itself. Here turn n + 1 begins with the very tokens of turn n, unless the template rewrites what was said
(some take the thinking of earlier turns out): then the whole is encoded, as the model would see it in service.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from areal_like.data.rows import Message
from areal_like.rollout.inference.base import Generation

__all__ = ["Conversation"]


class Conversation:
    """The tokens of one conversation with a model.

    Args:
        tokenizer: of the model, as Transformers loads it.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._said: list[Message] = []
        self._answer = ""
        self._ids: list[int] = []

    def encode(self, text: str) -> list[int]:
        """Token ids of a text as it is."""
        return [int(i) for i in self._tokenizer.encode(text)]

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """Token ids up to where the model's answer begins.

        Raises:
            ValueError: there is no message, or the chat template refuses them.
        """
        if not messages:
            raise ValueError("a conversation needs at least one message")
        if not self._tokenizer.chat_template:
            return self.encode("\n".join(message["content"] for message in messages))
        new = self._continuation(messages)
        return [*self._ids, *new] if new is not None else self.encode_text(self._text(messages, prompt=True))

    def answered(self, messages: Sequence[Message], answer: Generation) -> None:
        """The model was shown `messages` and gave this answer."""
        self._said, self._answer = list(messages), answer.text
        self._ids = [*answer.prompt_ids, *answer.token_ids]

    def encode_text(self, text: str) -> list[int]:
        """Token ids of a text that the template made: it holds its special tokens itself."""
        return [int(i) for i in self._tokenizer.encode(text, add_special_tokens=False)]

    def _continuation(self, messages: Sequence[Message]) -> list[int] | None:
        """The tokens behind those of the last answer; None when these messages do not go on from it."""
        count = len(self._said)
        if not self._ids or list(messages[:count]) != self._said or len(messages) < count + 2:
            return None
        if messages[count]["role"] != "assistant" or messages[count]["content"] != self._answer:
            return None
        before, whole = self._text(self._said, prompt=True), self._text(messages, prompt=True)
        if not whole.startswith(before + self._answer):
            return None
        rest = self.encode_text(whole[len(before) + len(self._answer) :])
        # The template closes the answer with the token that the model, unless it ran out of room, drew itself.
        return rest[1:] if rest and rest[0] == self._ids[-1] else rest

    def _text(self, messages: Sequence[Message], *, prompt: bool) -> str:
        from jinja2 import TemplateError

        try:
            text: str = self._tokenizer.apply_chat_template(
                list(messages), add_generation_prompt=prompt, tokenize=False
            )
        except TemplateError as error:
            raise ValueError(f"the tokenizer's chat template refuses the conversation: {error}") from error
        return text
