"""`OpenAIInference`: any server that speaks the OpenAI protocol, over HTTP.

Conversations go to `chat/completions`, token ids to `completions`. What is beyond the protocol depends on the server,
so its dialect has to be named:

- openai: text only. Log-probabilities are of temperature 1 and come without token ids, so they are not offered.
- vllm: tokens (`return_token_ids`, since 0.10.2) and log-probabilities as the server was started: `raw` ones are of
  temperature 1, `processed` ones of the distribution after top-p and top-k.
- sglang: tokens (`return_token_ids`, versions from July 2026 on) and log-probabilities of the scaled distribution.
"""

from __future__ import annotations

import asyncio
import os
import random
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx

from areal_like.engines.base import SamplingParams
from areal_like.rollout.inference.base import Capability, Generation, InferenceError, InferenceInterface, Prompt
from areal_like.rollout.inference.prompts import check_sampling, messages_of

__all__ = ["DIALECTS", "Dialect", "OpenAIInference"]

_SHOWN = 500
"""Characters of a server's own words in an error."""


@dataclass(frozen=True)
class Dialect:
    """What a kind of server takes beyond the protocol.

    Attributes:
        extra: the server's name for a field of `SamplingParams`; without one, anything but its default is refused.
        always: sent with every call, so that answers mean the same as those of our own engine: the stop string is part
            of the text, and what the model's own `generation_config.json` says of sampling counts for nothing.
        tokens: whether `return_token_ids` is understood.
    """

    extra: Mapping[str, str]
    always: Mapping[str, Any]
    tokens: bool


_BEYOND = {"top_k": "top_k", "min_new_tokens": "min_tokens", "stop_token_ids": "stop_token_ids"}
_PLAIN = {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
DIALECTS: Mapping[str, Dialect] = {
    "openai": Dialect({}, {}, tokens=False),
    "vllm": Dialect(_BEYOND, _PLAIN | {"include_stop_str_in_output": True}, tokens=True),
    "sglang": Dialect(_BEYOND, _PLAIN | {"no_stop_trim": True}, tokens=True),
}


class OpenAIInference(InferenceInterface):
    """See the module. Safe to use from several event loops; each has connections of its own.

    Args:
        url: up to and with the version: `http://127.0.0.1:8000/v1`.
        model: the name under which the server knows it.
        sampling: what a call leaves open. `min_new_tokens`, `stop_token_ids`, `top_k` need a dialect that takes them.
        dialect: one of `DIALECTS`.
        log_probs: of which distribution the server's log-probabilities are: "raw", "scaled" or "processed" (see the
            module); None: they are not asked for. Calls under which they are not those of the scaled distribution are
            refused. `sglang` gives "scaled" ones, `vllm` either of the others (`--logprobs-mode`).
        concurrency: calls under way at once, for each event loop.
        timeout: seconds that an answer may take once a connection is there. It is not asked for again then: the server
            may still be at work on it.
        retries: after refused or broken connections, status 429 and 5xx; they wait 0.5 s, 1 s, 2 s ... up to 30 s, or
            what `Retry-After` says.
        api_key_variable: the environment variable that holds the key; empty: none is sent.

    Raises:
        ValueError: an unknown dialect, log-probabilities that it does not give, or an empty key variable.
    """

    def __init__(
        self,
        url: str,
        model: str,
        sampling: SamplingParams,
        *,
        dialect: str = "openai",
        log_probs: str | None = None,
        concurrency: int = 256,
        timeout: float = 600.0,
        retries: int = 4,
        api_key_variable: str = "",
    ) -> None:
        super().__init__(sampling)
        if dialect not in DIALECTS:
            raise ValueError(f"unknown dialect {dialect!r}; there are {', '.join(DIALECTS)}")
        given = {"openai": (), "vllm": ("raw", "processed"), "sglang": ("scaled",)}[dialect]
        if log_probs is not None and log_probs not in given:
            kinds = " or ".join(map(repr, given)) or "none"
            raise ValueError(f"log_probs {log_probs!r}: a server of the dialect {dialect} gives {kinds}")
        self._key = os.environ.get(api_key_variable, "") if api_key_variable else ""
        if api_key_variable and not self._key:
            raise ValueError(f"the environment variable {api_key_variable} holds no API key")
        self._url, self._model, self._name = url.rstrip("/"), model, dialect
        self._dialect, self._log_probs = DIALECTS[dialect], log_probs
        self._concurrency, self._timeout, self._retries = concurrency, timeout, retries
        self._clients: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, httpx.AsyncClient] = (
            weakref.WeakKeyDictionary()
        )
        tokens = {Capability.TOKENS} if self._dialect.tokens else set()
        self.capabilities = frozenset({Capability.RAW} | tokens | ({Capability.LOG_PROBS} if log_probs else set()))

    async def answer(self, prompt: Prompt, sampling: SamplingParams) -> Generation:
        """See `InferenceInterface.agenerate`."""
        check_sampling(sampling)
        body = self._body(sampling)
        messages = messages_of(prompt)
        if messages is None:
            if not prompt:
                raise ValueError("the prompt is empty: there is nothing to continue")
            path = "completions"
            body |= {"prompt": list(prompt)} | ({"logprobs": 1} if self._log_probs else {})
        else:
            path = "chat/completions"
            body |= {"messages": messages} | ({"logprobs": True} if self._log_probs else {})
        return self._read(path, await self._post(path, body))

    async def aclose(self) -> None:
        client = self._clients.pop(asyncio.get_running_loop(), None)
        if client is not None:
            await client.aclose()

    # What is asked

    def _body(self, sampling: SamplingParams) -> dict[str, Any]:
        """The request without its prompt. ValueError for what the server, or its log-probabilities, cannot honour."""
        default = SamplingParams(sampling.max_new_tokens)
        greedy = sampling.greedy or sampling.temperature == 0
        body: dict[str, Any] = {
            "model": self._model,
            "max_tokens": sampling.max_new_tokens,
            "temperature": 0.0 if greedy else sampling.temperature,
            "top_p": sampling.top_p,
            **self._dialect.always,
        }
        if sampling.seed is not None:
            body["seed"] = sampling.seed
        if sampling.stop:
            body["stop"] = list(sampling.stop)
        for field in _BEYOND:
            value = getattr(sampling, field)
            if value == getattr(default, field):
                continue
            if field not in self._dialect.extra:
                takers = ", ".join(name for name, other in DIALECTS.items() if field in other.extra)
                raise ValueError(f"a server of the dialect {self._name} does not take {field}; {takers} do")
            body[self._dialect.extra[field]] = list(value) if isinstance(value, tuple) else value
        if self._dialect.tokens:
            body["return_token_ids"] = True
        if self._log_probs == "raw" and not greedy and sampling.temperature != 1:
            raise ValueError(
                f"raw log-probabilities are of temperature 1, not of {sampling.temperature:g}: start the server with "
                "--logprobs-mode processed_logprobs and say log_probs='processed'"
            )
        if self._log_probs == "processed" and not greedy and (sampling.top_p < 1 or sampling.top_k):
            raise ValueError("processed log-probabilities are of what top_p and top_k leave: do without both")
        return body

    async def _post(self, path: str, body: dict[str, Any]) -> Any:
        """The answer of the server, asked again after failures that pass."""
        url = f"{self._url}/{path}"
        reason = ""
        for attempt in range(self._retries + 1):
            wait = min(30.0, 0.5 * 2**attempt)
            try:
                response = await self._client().post(url, json=body)
            except (httpx.ReadTimeout, httpx.WriteTimeout) as error:
                raise InferenceError(f"{url} gave no answer within {self._timeout:g} s: raise the time-out?") from error
            except httpx.TransportError as error:
                reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
                raise InferenceError(f"{url} is no address of a server: {error}") from error
            else:
                if response.is_success:
                    return self._json(url, response)
                reason = f"status {response.status_code}: {self._words(response)}"
                if response.status_code != 429 and response.status_code < 500:
                    raise InferenceError(f"{url} refused the request with {reason}")
                after = response.headers.get("retry-after", "")
                wait = min(30.0, float(after)) if after.isdigit() else wait
            if attempt < self._retries:
                await asyncio.sleep(wait * random.uniform(0.8, 1.2))  # so that many callers do not come back at once
        raise InferenceError(f"{url} failed {self._retries + 1} times, the last time with {reason}")

    def _client(self) -> httpx.AsyncClient:
        loop = asyncio.get_running_loop()
        if loop not in self._clients:
            self._clients[loop] = httpx.AsyncClient(
                headers={"Authorization": f"Bearer {self._key}"} if self._key else {},
                timeout=httpx.Timeout(self._timeout, connect=10.0, pool=None),  # who waits for a connection may wait
                limits=httpx.Limits(max_connections=self._concurrency, max_keepalive_connections=self._concurrency),
            )
        return self._clients[loop]

    # What comes back

    def _json(self, url: str, response: httpx.Response) -> Any:
        try:
            return response.json()
        except ValueError as error:
            raise InferenceError(f"{url} answered something that is not JSON: {self._words(response)}") from error

    def _words(self, response: httpx.Response) -> str:
        """What the server said, without the key, should it have said that."""
        text = response.text[:_SHOWN]
        return text.replace(self._key, "***") if self._key else text

    def _read(self, path: str, answer: Any) -> Generation:
        where = f"{self._url}/{path}"
        try:
            choice = answer["choices"][0]
            text = choice["text"] if path == "completions" else choice["message"]["content"]
            reason = choice["finish_reason"]
            prompt_ids, token_ids, log_probs = [], [], []
            if self._dialect.tokens:
                token_ids = [int(i) for i in choice["token_ids"]]
                prompt_ids = [int(i) for i in choice.get("prompt_token_ids") or answer["prompt_token_ids"]]
            if self._log_probs:
                given = choice["logprobs"]
                log_probs = (
                    [float(value) for value in given["token_logprobs"]]
                    if path == "completions"
                    else [float(token["logprob"]) for token in given["content"]]
                )
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise InferenceError(
                f"{where} answered without what the dialect {self._name} promises ({type(error).__name__}: {error}): "
                "is it another server, or an older one?"
            ) from error
        if reason not in ("stop", "length"):
            raise InferenceError(f"{where} ended the answer with finish_reason {reason!r}")
        if self._log_probs and len(log_probs) != len(token_ids):
            raise InferenceError(f"{where} gave {len(token_ids)} tokens and {len(log_probs)} log-probabilities")
        return Generation(text or "", reason, prompt_ids, token_ids, log_probs)
