"""`MegatronInference`: Megatron-Core's own model, all ranks of a worker group as one generator."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from areal_like.engines.base import Completion, GenerationRequest, SamplingParams
from areal_like.rollout.inference.engine import QueuedInference
from areal_like.runtime.local import WorkerGroup

__all__ = ["MegatronInference"]

_TOKENS = 8
"""Tokens of one call: how long a new request may wait while others are drawn."""


class MegatronInference(QueuedInference):
    """For comparing and evaluating; see `engines.megatron.generation` for what it costs. It has no pause and takes no
    weights: `close` it, load others, and make a new one.

    Args:
        group: hosts `engines.megatron.generation:MegatronGenerator`, initialised.
        tokenizer, sampling, vocabulary, context: as of `EngineInference`.
        max_requests: at once.
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
    ) -> None:
        super().__init__(tokenizer, sampling, vocabulary=vocabulary, context=context)
        self._queue = self._ranks = _WholeGroup(group, max_requests, self._finished, self._failed)

    def close(self) -> None:
        """End the thread. The worker group is its owner's to close."""
        self._ranks.close()


class _WholeGroup:
    """Hands requests to all ranks alike, from one thread."""

    def __init__(
        self,
        group: WorkerGroup,
        max_requests: int,
        on_finished: Callable[[Completion], None],
        on_error: Callable[[BaseException], None],
    ) -> None:
        self._group, self._max_requests = group, max_requests
        self._on_finished, self._on_error = on_finished, on_error
        self._changed = threading.Condition()
        self._waiting: deque[GenerationRequest] = deque()
        self._held = 0
        self._closed = False
        threading.Thread(target=self._serve, name=f"{group.name}-all", daemon=True).start()

    def submit(self, requests: Iterable[GenerationRequest]) -> None:
        with self._changed:
            self._waiting.extend(requests)
            self._changed.notify_all()

    def cancel(self, request_id: int) -> bool:
        with self._changed:
            kept = [request for request in self._waiting if request.request_id != request_id]
            found = len(kept) < len(self._waiting)
            self._waiting = deque(kept)
            return found

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _serve(self) -> None:
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._closed or self._waiting or self._held)
                    if self._closed:
                        return
                    count = min(len(self._waiting), self._max_requests - self._held)
                    new = [self._waiting.popleft() for _ in range(count)]
                    self._held += count
                for completion in self._group.call("advance", new, _TOKENS)[0]:
                    self._held -= 1
                    self._on_finished(completion)
        except BaseException as error:
            if not self._closed:
                self._on_error(error)
