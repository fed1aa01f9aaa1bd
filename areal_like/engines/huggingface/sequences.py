"""One request in generation: what it has, what it may still draw, and when it is finished."""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from areal_like.engines.base import Completion, GenerationRequest


class Sequence:
    """The state of one request; `request` itself is left as it is.

    Args:
        request: what to continue.
        end_ids: tokens at which the model itself ends; the request's `stop_token_ids` come on top.
        context: longest sequence of the model in tokens; generation ends there with reason "length".
        tokenizer: needed for stop strings only.
        seed: of the draws when the request names none.

    Raises:
        ValueError: the request cannot be continued; the message names its id and the field.
    """

    def __init__(
        self,
        request: GenerationRequest,
        *,
        end_ids: frozenset[int],
        vocabulary: int,
        context: int,
        tokenizer: PreTrainedTokenizerBase | None,
        seed: np.random.SeedSequence,
    ) -> None:
        _check(request, vocabulary, context, tokenizer)
        sampling = request.sampling
        self.request_id = request.request_id
        self.sampling = sampling
        self.prompt = request.prompt_ids
        self.prefix = array("q", self.prompt).tobytes()
        """The prompt, as a key whose hash is computed once."""
        self.generated = list(request.generated)
        self.log_probs = list(request.log_probs)
        self.versions = list(request.versions)
        self.greedy = sampling.greedy or sampling.temperature == 0
        self.temperature = sampling.temperature or 1.0  # of a greedy choice, only its log-probability depends on it
        self.end_ids = end_ids | frozenset(sampling.stop_token_ids)
        self.most = min(sampling.max_new_tokens, context - len(self.prompt))
        self.tokenizer = tokenizer
        # A stop string of n bytes covers at most n tokens, plus the one that completes it.
        self.stop_window = max((len(stop.encode()) for stop in sampling.stop), default=0) + 1
        self.draws = np.random.default_rng(seed if sampling.seed is None else sampling.seed)
        self.draws.random(len(self.generated))  # token i takes draw i, also after an interruption
        self.finish_reason: str | None = None
        self._finish()

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.generated

    @property
    def last(self) -> int:
        """The newest token."""
        return self.generated[-1] if self.generated else self.prompt[-1]

    @property
    def may_end(self) -> bool:
        """Whether the next token may be an end token."""
        return len(self.generated) >= self.sampling.min_new_tokens

    def draw(self) -> float:
        """The uniform number in [0, 1) that decides the next token."""
        return self.draws.random()

    def append(self, token: int, log_prob: float, version: int) -> None:
        """Take a drawn token."""
        self.generated.append(token)
        self.log_probs.append(log_prob)
        self.versions.append(version)
        self._finish()

    def completion(self) -> Completion:
        return Completion(
            self.request_id, self.generated, self.log_probs, self.versions, self.finish_reason or "interrupted"
        )

    def _finish(self) -> None:
        count = len(self.generated)
        if count and count >= self.sampling.min_new_tokens and (self.generated[-1] in self.end_ids or self._stopped()):
            self.finish_reason = "stop"
        elif count >= self.most:
            self.finish_reason = "length"

    def _stopped(self) -> bool:
        """Whether the last token completed a stop string."""
        if not self.sampling.stop or self.tokenizer is None:
            return False
        window = self.generated[-self.stop_window :]
        text, before = _decode(self.tokenizer, window), _decode(self.tokenizer, window[:-1])
        return any(text.count(stop) > before.count(stop) for stop in self.sampling.stop)


def _decode(tokenizer: Any, ids: list[int]) -> str:
    text: str = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return text


def _check(
    request: GenerationRequest, vocabulary: int, context: int, tokenizer: PreTrainedTokenizerBase | None
) -> None:
    sampling, name = request.sampling, f"request {request.request_id}"
    if not request.prompt_ids:
        raise ValueError(f"{name}: prompt_ids is empty")
    if len(request.prompt_ids) >= context:
        raise ValueError(f"{name}: the prompt has {len(request.prompt_ids)} tokens, the model's context {context}")
    for token in (*request.prompt_ids, *request.generated):
        if not 0 <= token < vocabulary:
            raise ValueError(f"{name}: token id {token} is not in the model's vocabulary of {vocabulary}")
    if not len(request.generated) == len(request.log_probs) == len(request.versions):
        raise ValueError(f"{name}: generated, log_probs and versions differ in length")
    if sampling.temperature < 0 or not 0 < sampling.top_p <= 1 or sampling.top_k < 0:
        raise ValueError(f"{name}: temperature and top_k are not negative, top_p is in (0, 1]: {sampling}")
    if sampling.stop and (tokenizer is None or "" in sampling.stop):
        reason = "an empty text" if "" in sampling.stop else "no tokenizer was given to find them with"
        raise ValueError(f"{name}: stop strings: {reason}")
