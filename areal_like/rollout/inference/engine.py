"""`EngineInference`: the rollout engine of this run, through the queue before its replicas."""

from __future__ import annotations

import asyncio
import copy
import itertools
import threading
from typing import Any, Protocol

from areal_like.engines.base import Completion, GenerationRequest, SamplingParams
from areal_like.rollout.inference.base import Capability, Generation, InferenceError, InferenceInterface, Prompt
from areal_like.rollout.inference.prompts import check_sampling, encode
from areal_like.rollout.replicas import Replicas
from areal_like.runtime.local import WorkerGroup

__all__ = ["EngineInference", "QueuedInference"]


class Queue(Protocol):
    """Where requests wait, and whoever answers them."""

    def submit(self, requests: list[GenerationRequest]) -> None: ...

    def cancel(self, request_id: int) -> bool: ...


class QueuedInference(InferenceInterface):
    """A form whose calls become requests in a queue, which `_finished` and `_failed` hear from.

    Any number of calls may wait at once, in any event loops. Calls of one turn of an event loop are queued together, so
    that those with the same prompt share a prefill. A call that is cancelled leaves the queue; once it is being drawn,
    it is drawn to its end and dropped.

    Args:
        tokenizer: of the model; a copy is kept, because tokenizers are not safe to share between threads.
        sampling: what a call leaves open. `seed` None: the engine's.
        vocabulary, context: of the model, in tokens. What does not fit is refused here, for that call alone.
    """

    capabilities = frozenset(Capability)
    _queue: Queue

    def __init__(self, tokenizer: Any, sampling: SamplingParams, *, vocabulary: int, context: int) -> None:
        super().__init__(sampling)
        self._tokenizer = copy.deepcopy(tokenizer)
        self._vocabulary, self._context = vocabulary, context
        self._lock = threading.Lock()
        self._ids = itertools.count()
        self._waiting: dict[int, tuple[asyncio.AbstractEventLoop, asyncio.Future[Completion]]] = {}
        self._outbox: dict[asyncio.AbstractEventLoop, list[GenerationRequest]] = {}
        self._error: BaseException | None = None

    async def answer(self, prompt: Prompt, sampling: SamplingParams) -> Generation:
        """See `InferenceInterface.agenerate`.

        Raises:
            ValueError: arguments or tokens that this model cannot take.
            InferenceError: the engine has failed.
        """
        check_sampling(sampling)
        with self._lock:
            ids = encode(prompt, self._tokenizer)
        self._check_tokens(ids)
        completion = await self._complete(GenerationRequest(ids, sampling, next(self._ids)))
        with self._lock:
            text: str = self._tokenizer.decode(completion.token_ids, skip_special_tokens=True)
        return Generation(
            text, completion.finish_reason, ids, completion.token_ids, completion.log_probs, completion.versions
        )

    async def _complete(self, request: GenerationRequest) -> Completion:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Completion] = loop.create_future()
        with self._lock:
            if self._error is not None:
                raise _stopped(self._error)
            self._waiting[request.request_id] = loop, future
            if loop not in self._outbox:
                self._outbox[loop] = []
                loop.call_soon(self._flush, loop)
            self._outbox[loop].append(request)
        try:
            return await future
        except asyncio.CancelledError:
            with self._lock:
                self._waiting.pop(request.request_id, None)
            self._queue.cancel(request.request_id)
            raise

    def _flush(self, loop: asyncio.AbstractEventLoop) -> None:
        with self._lock:
            requests = [r for r in self._outbox.pop(loop) if r.request_id in self._waiting]
        self._queue.submit(requests)

    def _check_tokens(self, ids: list[int]) -> None:
        if len(ids) >= self._context:
            raise ValueError(f"the prompt has {len(ids)} tokens, the model's context {self._context}")
        if wrong := next((i for i in ids if not 0 <= i < self._vocabulary), None):
            raise ValueError(f"token id {wrong} is not in the model's vocabulary of {self._vocabulary}")

    # From the threads of the queue

    def _finished(self, completion: Completion) -> None:
        with self._lock:
            asked = self._waiting.pop(completion.request_id, None)
        if asked is not None:
            _tell(*asked, completion)

    def _failed(self, error: BaseException) -> None:
        with self._lock:
            self._error = error
            waiting, self._waiting = self._waiting, {}
        for loop, future in waiting.values():
            _tell(loop, future, _stopped(error))


class EngineInference(QueuedInference):
    """The queue is `replicas`, whose owner pauses it, changes weights and closes it.

    Args:
        group: the rollout workers.
        tokenizer, sampling, vocabulary, context: see `QueuedInference`.
        max_requests: of one replica at once.
        options: passed on to `Replicas`.
    """

    def __init__(
        self,
        group: WorkerGroup,
        tokenizer: Any,
        sampling: SamplingParams,
        *,
        max_requests: int,
        vocabulary: int,
        context: int,
        **options: Any,
    ) -> None:
        super().__init__(tokenizer, sampling, vocabulary=vocabulary, context=context)
        self.replicas = Replicas(
            group, max_requests=max_requests, on_finished=self._finished, on_error=self._failed, **options
        )
        self._queue = self.replicas


def _stopped(error: BaseException) -> InferenceError:
    stopped = InferenceError(f"the rollout engine has stopped: {error}")
    stopped.__cause__ = error
    return stopped


def _tell(
    loop: asyncio.AbstractEventLoop, future: asyncio.Future[Completion], outcome: Completion | InferenceError
) -> None:
    def tell() -> None:
        if future.done():  # cancelled
            return
        if isinstance(outcome, InferenceError):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)

    try:
        loop.call_soon_threadsafe(tell)
    except RuntimeError:  # the loop was closed, and whoever waited in it is gone
        if not loop.is_closed():
            raise
