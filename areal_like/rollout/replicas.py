"""The data-parallel replicas of a rollout engine, kept busy from one queue of requests.

One driver thread a replica: it takes an even share of the waiting requests, lets the replica continue them, hands back
what has ended, and puts what was interrupted at the head of the queue with the tokens it has. Pausing interrupts all.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from areal_like.engines.base import Completion, GenerationRequest, WeightBucket
from areal_like.runtime.local import WorkerGroup, interrupted

Finish = Callable[[Completion], None]


class Replicas:
    """A rollout WorkerGroup (every rank holds a whole InferenceEngine) behind a queue.

    Args:
        group: the workers.
        max_requests: requests of one replica at once.
        on_finished: called with every completion that has ended, from a thread of this object.
        on_error: called once with what stopped it.
    """

    def __init__(
        self,
        group: WorkerGroup,
        *,
        max_requests: int,
        on_finished: Finish,
        on_error: Callable[[BaseException], None],
    ) -> None:
        self._group = group
        self._max_requests = max_requests
        self._on_finished = on_finished
        self._on_error = on_error
        self._changed = threading.Condition()
        self._waiting: deque[GenerationRequest] = deque()
        self._busy = 0
        self._paused = False
        self._closed = False
        self._error: BaseException | None = None
        self._threads = [
            threading.Thread(target=self._serve, args=(rank,), name=f"{group.name}-{rank}", daemon=True)
            for rank in range(group.world_size)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, requests: Iterable[GenerationRequest]) -> None:
        """Queue requests; their completions come to `on_finished`."""
        with self._changed:
            self._waiting.extend(requests)
            self._changed.notify_all()

    def pause(self) -> None:
        """Interrupt generation; when this returns no replica works and unfinished requests wait with their tokens."""
        with self._changed:
            self._paused = True
            self._group.interrupt()
            self._changed.wait_for(lambda: self._busy == 0 or self._error is not None)
            self._group.clear_interrupt()
            self._raise_error()

    def resume(self) -> None:
        with self._changed:
            self._paused = False
            self._changed.notify_all()

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        """Answer these requests apart from the queue, while paused (for evaluation); in their order."""
        with self._changed:
            if not self._paused or self._busy:
                raise RuntimeError("generate needs paused replicas")
        count = self._group.world_size
        shares = [list(requests[rank::count]) for rank in range(count)]
        results = self._group.call_each("generate", [(share,) for share in shares])
        answers = {completion.request_id: completion for share in results for completion in share}
        return [answers[request.request_id] for request in requests]

    def update_weights(self, buckets: Iterable[WeightBucket], version: int) -> None:
        """Install weights in every replica, bucket by bucket, while paused: one bucket loads as the next one comes."""
        loading: Any = None
        for bucket in buckets:
            if loading is not None:
                loading.result()
            loading = self._group.submit("update_weights", bucket)
        if loading is not None:
            loading.result()
        self._group.call("finish_update", version)

    def close(self) -> None:
        """Stop the threads. The worker group is its owner's to close."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _serve(self, rank: int) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or (self._waiting and not self._paused))
                if self._closed:
                    return
                requests = self._take_share()
                self._busy += 1
            try:
                completions = self._group.submit_one(rank, "generate", requests, interrupted).result()[0]
                ended = self._sort(requests, completions)
                for completion in ended:
                    self._on_finished(completion)
            except BaseException as error:
                self._fail(error)
                return
            with self._changed:
                self._busy -= 1
                self._changed.notify_all()

    def _take_share(self) -> list[GenerationRequest]:
        """The requests that an idle replica takes: as many as leave the same for every other idle one."""
        idle = self._group.world_size - self._busy
        count = min(-(-len(self._waiting) // idle), self._max_requests)
        return [self._waiting.popleft() for _ in range(count)]

    def _sort(self, requests: list[GenerationRequest], completions: list[Completion]) -> list[Completion]:
        """What has ended; the rest goes back to the head of the queue, in its order, to be continued."""
        ended, unfinished = [], []
        for request, completion in zip(requests, completions, strict=True):
            if completion.finish_reason == "interrupted":
                request.generated = list(completion.token_ids)
                request.log_probs = list(completion.log_probs)
                request.versions = list(completion.versions)
                unfinished.append(request)
            else:
                ended.append(completion)
        with self._changed:
            self._waiting.extendleft(reversed(unfinished))
        return ended

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            first = self._error is None and not self._closed
            self._error = self._error or error
            self._closed = True
            self._busy -= 1
            self._changed.notify_all()
        if first:
            self._on_error(error)

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error
