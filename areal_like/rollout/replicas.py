"""The data-parallel replicas of a rollout engine, kept full from one queue of requests.

One driver thread a replica: it hands over as many waiting requests as the replica has free slots, lets all that the
replica holds go on until one ends, and comes back with what has ended. A request that arrives while slots are free
wakes the least loaded replica. Pausing takes the unfinished back to the head of the queue with the tokens they have.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from areal_like.engines.base import Completion, GenerationRequest, WeightBucket
from areal_like.runtime.local import WorkerGroup, interrupted

Finish = Callable[[Completion], None]


@dataclass(frozen=True)
class _Queued:
    """A request, its place in the order of all, and the number of its group: neighbours with the same prompt."""

    order: int
    group: int
    request: GenerationRequest


@dataclass
class _Replica:
    """What the driver knows of one replica.

    Attributes:
        held: unfinished requests that are with it, by id.
        calling: whether a call to it is under way.
    """

    rank: int
    held: dict[int, _Queued] = field(default_factory=dict)
    calling: bool = False


class Replicas:
    """A rollout WorkerGroup (every rank holds a whole InferenceEngine) behind a queue.

    Args:
        group: the workers.
        max_requests: requests of one replica at once.
        on_finished: called with every completion that has ended, one at a time, from a thread of this object that
            nothing else waits for.
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
        self._waiting: deque[_Queued] = deque()
        self._ids: set[int] = set()  # of everything that waits or is held
        self._submitted = self._groups = 0
        self._replicas = [_Replica(rank) for rank in range(group.world_size)]
        self._ended: queue.SimpleQueue[Completion | None] = queue.SimpleQueue()
        self._undelivered = 0
        self._starting = True  # whether waiting requests may start
        self._going_on = True  # whether those that have started may go on
        self._closed = False
        self._error: BaseException | None = None
        self._threads = [threading.Thread(target=self._deliver, name=f"{group.name}-finished", daemon=True)]
        self._threads += [
            threading.Thread(target=self._serve, args=(replica,), name=f"{group.name}-{replica.rank}", daemon=True)
            for replica in self._replicas
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, requests: Iterable[GenerationRequest]) -> None:
        """Queue requests; their completions come to `on_finished`.

        Neighbours with the same prompt go to one replica as far as it has room, so that they share a prefill.

        Raises:
            ValueError: a request has the id of one that is not finished; none was queued.
        """
        new = list(requests)
        with self._changed:
            ids = [request.request_id for request in new]
            if len(set(ids)) < len(ids) or not self._ids.isdisjoint(ids):
                twice = next(i for n, i in enumerate(ids) if i in self._ids or i in ids[:n])
                raise ValueError(f"request {twice} was submitted twice: ids of unfinished requests are unique")
            self._ids.update(ids)
            before: list[int] | None = None
            for request in new:
                self._groups += request.prompt_ids != before
                self._waiting.append(_Queued(self._submitted, self._groups, request))
                self._submitted += 1
                before = request.prompt_ids
            self._wake()

    def cancel(self, request_id: int) -> bool:
        """Take a request out of the queue; False when a replica has it already (it comes to its end), or nobody."""
        with self._changed:
            queued = next((q for q in self._waiting if q.request.request_id == request_id), None)
            if queued is None:
                return False
            self._waiting.remove(queued)
            self._ids.remove(request_id)
            return True

    def pause(self, *, finish: bool = False) -> None:
        """Stop generating; when this returns no replica holds a request and every completion has been delivered.

        Args:
            finish: let the requests that have started come to their end under the present weights; those that wait stay
                in the queue. Without it the unfinished go back to the head of the queue, with the tokens they have.
        """
        with self._changed:
            self._starting = False
            if not finish:
                self._going_on = False
                self._group.interrupt()
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._error is not None or self._at_rest(finish))
            if not finish:
                self._group.clear_interrupt()
            self._raise_error()
            self._going_on = False
            self._take_back()

    def resume(self) -> None:
        with self._changed:
            self._starting = self._going_on = True
            self._changed.notify_all()

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        """Answer these requests apart from the queue, while paused (for evaluation); in their order."""
        with self._changed:
            if self._going_on:
                raise RuntimeError("generate needs paused replicas")
        count = self._group.world_size
        shares = [list(requests[rank::count]) for rank in range(count)]
        results = self._group.call_each("generate", [(share,) for share in shares])
        answers = {completion.request_id: completion for share in results for completion in share}
        return [answers[request.request_id] for request in requests]

    def update_weights(self, buckets: Iterable[WeightBucket], version: int) -> None:
        """Install weights in every replica, bucket by bucket, while paused: one bucket loads as the next one comes."""
        with self._changed:
            if self._going_on:
                raise RuntimeError("update_weights needs paused replicas")
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
            self._close()

    # The thread of a replica

    def _serve(self, replica: _Replica) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._has_work(replica))
                if self._closed:
                    return
                new = self._take(replica)
                replica.calling = True
                self._group.clear_interrupt(replica.rank)  # under the lock: who comes later, wakes it again
            try:
                call = self._group.submit_one(replica.rank, "advance", [q.request for q in new], interrupted)
                completions: list[Completion] = call.result()[0]
            except BaseException as error:
                self._fail(error)
                return
            with self._changed:
                replica.calling = False
                for completion in completions:
                    del replica.held[completion.request_id]
                    self._ids.remove(completion.request_id)
                    self._undelivered += 1
                    self._ended.put(completion)
                self._changed.notify_all()

    def _has_work(self, replica: _Replica) -> bool:
        return self._going_on and (bool(replica.held) or self._wants(replica))

    def _wants(self, replica: _Replica) -> bool:
        """Whether it should take up a waiting request: it has room, and less than its share of all."""
        return self._starting and bool(self._waiting) and len(replica.held) < min(self._max_requests, self._share())

    def _share(self) -> int:
        """Requests of each replica if all that wait and all that are held were dealt out evenly."""
        total = len(self._waiting) + sum(len(replica.held) for replica in self._replicas)
        return -(-total // len(self._replicas))

    def _take(self, replica: _Replica) -> list[_Queued]:
        """Waiting requests up to its share, and the rest of the last one's group as far as there is room."""
        new: list[_Queued] = []
        share = self._share()
        while self._starting and self._waiting and len(replica.held) < self._max_requests:
            if len(replica.held) >= share and not (new and self._waiting[0].group == new[-1].group):
                break
            new.append(self._waiting.popleft())
            replica.held[new[-1].request.request_id] = new[-1]
        return new

    def _wake(self) -> None:
        """Idle replicas hear of waiting requests by the condition, busy ones with room by their interrupt flag."""
        for replica in self._replicas:
            if replica.calling and self._wants(replica):
                self._group.interrupt(replica.rank)
        self._changed.notify_all()

    # The thread that delivers, so that no replica waits for what is done with its answers

    def _deliver(self) -> None:
        while (completion := self._ended.get()) is not None and not self._closed:
            try:
                self._on_finished(completion)
            except BaseException as error:
                self._fail(error)
                return
            with self._changed:
                self._undelivered -= 1
                self._changed.notify_all()

    # Pausing and ending; all under the lock

    def _at_rest(self, finished: bool) -> bool:
        busy = any(replica.calling or (finished and replica.held) for replica in self._replicas)
        return not busy and self._undelivered == 0

    def _take_back(self) -> None:
        """The unfinished requests, with their tokens, to the head of the queue in the order of their submission."""
        back: list[_Queued] = []
        for replica in self._replicas:
            if not replica.held:
                continue
            for completion in self._group.submit_one(replica.rank, "withdraw").result()[0]:
                queued = replica.held.pop(completion.request_id)
                queued.request.generated = list(completion.token_ids)
                queued.request.log_probs = list(completion.log_probs)
                queued.request.versions = list(completion.versions)
                back.append(queued)
        self._waiting.extendleft(sorted(back, key=lambda queued: queued.order, reverse=True))

    def _close(self) -> None:
        self._closed = True
        self._ended.put(None)
        self._changed.notify_all()

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            first = self._error is None and not self._closed
            self._error = self._error or error
            self._close()
        if first:
            self._on_error(error)

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error
