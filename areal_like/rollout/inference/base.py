"""`InferenceInterface`: the one way in which agents reach a model, whatever serves it."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from areal_like.data.rows import Message
from areal_like.engines.base import SamplingParams

__all__ = [
    "Capability",
    "CapabilityError",
    "Generation",
    "InferenceError",
    "InferenceInterface",
    "Prompt",
    "require",
]

type Prompt = str | Sequence[int] | Sequence[Message]
"""Text (one user message), token ids, or a conversation."""


class Capability(StrEnum):
    """What comes back from a model."""

    RAW = "raw text"
    TOKENS = "tokens"
    LOG_PROBS = "log-probabilities"


class InferenceError(RuntimeError):
    """The model did not answer: the engine is down, or refused the request. The message says what to do."""


class CapabilityError(ValueError):
    """What an algorithm needs is not among the capabilities of the form; raised before anything is started."""


@dataclass(frozen=True)
class Generation:
    """What one call of a model gave.

    Attributes:
        text: of the drawn tokens, special tokens left out.
        finish_reason: stop or length.
        prompt_ids, token_ids: with `Capability.TOKENS`; else empty.
        log_probs: of each drawn token at the temperature it was drawn with, before top-p and top-k; with
            `Capability.LOG_PROBS`, else empty.
        versions: of the policy that drew each token; empty when the form does not know.
    """

    text: str
    finish_reason: str
    prompt_ids: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)


class InferenceInterface(ABC):
    """A model behind a form: in process, over HTTP, or Megatron-Core's own.

    Args:
        sampling: what a call leaves open.
    """

    capabilities: frozenset[Capability]

    def __init__(self, sampling: SamplingParams) -> None:
        self.sampling = sampling

    async def agenerate(self, prompt: Prompt, **arguments: Any) -> Generation:
        """Continue a prompt.

        Args:
            prompt: text is one user message, as in `chat`; token ids are continued as they are.
            arguments: fields of `SamplingParams` for this call alone. Each is honoured or refused.

        Raises:
            TypeError: there is no such argument; it is named.
            ValueError: this form cannot honour one of them.
            InferenceError: the model did not answer.
        """
        return await self.answer(prompt, self.sampling.with_arguments(arguments))

    def generate(self, prompt: Prompt, **arguments: Any) -> Generation:
        """`agenerate` for code without an event loop.

        Raises:
            RuntimeError: called from inside one, where it would wait for itself.
        """
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return asyncio.run(self._once(prompt, arguments))
        raise RuntimeError("generate() inside a coroutine would wait for itself: write `await model.agenerate(...)`")

    async def _once(self, prompt: Prompt, arguments: dict[str, Any]) -> Generation:
        try:
            return await self.agenerate(prompt, **arguments)
        finally:
            await self.aclose()

    @abstractmethod
    async def answer(self, prompt: Prompt, sampling: SamplingParams) -> Generation:
        """What a form implements. `sampling.temperature` 0 is greedy. ValueError for what it cannot honour."""

    async def aclose(self) -> None:  # noqa: B027  most forms hold nothing
        """Let go of the connections of this event loop; the next call opens new ones."""


def require(interface: InferenceInterface, needed: Iterable[Capability], why: str) -> None:
    """Check, before a run starts, that a form gives what is needed.

    Args:
        why: who needs it, as the subject of a sentence: "the decoupled loss".

    Raises:
        CapabilityError: names the form, everything that it lacks, and who needs it.
    """
    wanted = set(needed)
    if lacking := [capability for capability in Capability if capability in wanted - interface.capabilities]:
        raise CapabilityError(
            f"{why} needs {' and '.join(lacking)} from the model; {type(interface).__name__} gives "
            f"{', '.join(c for c in Capability if c in interface.capabilities)} only"
        )
