"""The data-parallel replicas of a rollout engine, kept full from one queue of requests.

One driver thread a replica: it hands over as many waiting requests as the replica has free slots, lets all that the
replica holds go on until one ends, and comes back with what has ended. A request that arrives while slots are free
wakes the least loaded replica. Pausing takes the unfinished back to the head of the queue with the tokens they have.

When the worker group is independent, a replica that dies or hangs is started again: its requests go back to the head of
the queue as they were when it took them up, others go on with them, and it serves again once it has the weights.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence

from areal_like.engines.base import Completion, GenerationRequest, WeightBucket
from areal_like.rollout.requests import Queued, Replica, RequestQueue
from areal_like.rollout.survivors import answer_unless_dead, install, submit_unless_dead
from areal_like.runtime.local import WorkerGroup, interrupted

Finish = Callable[[Completion], None]

_warn = logging.getLogger(__name__).warning


class Replicas:
    """A rollout WorkerGroup (every rank holds a whole InferenceEngine) behind a queue.

    Args:
        group: the workers.
        max_requests: requests of one replica at once.
        on_finished: called with every completion that has ended, one at a time, from a thread of this object that
            nothing else waits for.
        on_error: called once with what stopped it.
        restarts: how often each replica of an independent group may be started again.
        restore: called with the rank of a replica that was started again after weights had been installed; it has to
            call `install` with those of the last `update_weights`. It runs in a thread of this object, and a pause
            waits for it, so it must not wait for whoever pauses. Without it such a replica rests until the next
            `update_weights`, and when no other is left the run ends.
        check_every: seconds after which a replica that says nothing is asked to return.
        stall_timeout: seconds that it then has until it counts as dead; more than any one forward takes.
    """

    def __init__(
        self,
        group: WorkerGroup,
        *,
        max_requests: int,
        on_finished: Finish,
        on_error: Callable[[BaseException], None],
        restarts: int = 3,
        restore: Callable[[int], None] | None = None,
        check_every: float = 60.0,
        stall_timeout: float = 300.0,
    ) -> None:
        self._group = group
        self._on_finished = on_finished
        self._on_error = on_error
        self._restarts, self._restore = restarts, restore
        self._check_every, self._stall_timeout = check_every, stall_timeout
        self._updated = False  # whether weights other than those of the model's folder were installed
        self._changed = threading.Condition()
        self._replicas = [Replica(rank) for rank in range(group.world_size)]
        self._queue = RequestQueue(self._replicas, max_requests)
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
            self._queue.add(new)
            self._wake()

    def cancel(self, request_id: int) -> bool:
        """Take a request out of the queue; False when a replica has it already (it comes to its end), or nobody."""
        with self._changed:
            return self._queue.remove(request_id)

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
        """RuntimeError: every replica was started again and waits for weights."""
        with self._changed:
            if not any(replica.serving or replica.calling for replica in self._replicas):
                raise RuntimeError("no rollout replica has weights: update_weights comes before resume")
            self._starting = self._going_on = True
            self._changed.notify_all()

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        """Answer these requests apart from the queue, while paused (for evaluation); in their order.

        What a replica that dies had is asked of the others.
        """
        self._check_paused("generate")
        group, answers = self._group, dict[int, Completion]()
        while left := [request for request in requests if request.request_id not in answers]:
            ranks = [replica.rank for replica in self._replicas if replica.serving and not group.is_dead(replica.rank)]
            if not ranks:
                raise RuntimeError("no rollout replica is alive and has weights")
            shares = {rank: left[i :: len(ranks)] for i, rank in enumerate(ranks)}
            calls = {rank: submit_unless_dead(group, rank, "generate", share) for rank, share in shares.items()}
            for rank, call in calls.items():
                for completion in answer_unless_dead(group, rank, call) or ():
                    answers[completion.request_id] = completion
        return [answers[request.request_id] for request in requests]

    def update_weights(self, buckets: Iterable[WeightBucket], version: int) -> None:
        """Install weights in every replica while paused. See `install` of `survivors` for what death does to it."""
        self._check_paused("update_weights")
        living = [replica.rank for replica in self._replicas if not self._group.is_dead(replica.rank)]
        updated = install(self._group, living, buckets, version)
        with self._changed:
            self._updated = True
            for rank in updated:
                self._replicas[rank].serving = True

    def install(self, rank: int, buckets: Iterable[WeightBucket], version: int) -> None:
        """Install weights in one replica: for `restore` to call, and for nobody else."""
        install(self._group, [rank], buckets, version)

    @property
    def restarted(self) -> int:
        """How often a replica was started again."""
        return sum(replica.restarts for replica in self._replicas)

    def close(self) -> None:
        """Stop the threads. The worker group is its owner's to close."""
        with self._changed:
            self._close()

    # The thread of a replica

    def _serve(self, replica: Replica) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._has_work(replica))
                if self._closed:
                    return
                new = self._queue.take(replica) if self._starting else []
                replica.calling = True
                self._group.clear_interrupt(replica.rank)  # under the lock: who comes later, wakes it again
            try:
                completions = self._advance(replica, new)
            except BaseException as error:
                if not self._revive(replica, error):
                    return
                continue
            with self._changed:
                replica.calling = False
                for completion in completions:
                    self._queue.finish(replica, completion.request_id)
                    self._undelivered += 1
                    self._ended.put(completion)
                self._changed.notify_all()

    def _advance(self, replica: Replica, new: list[GenerationRequest]) -> list[Completion]:
        """One call, however long it takes as long as the replica comes back when it is asked to."""
        call = self._group.submit_one(replica.rank, "advance", new, interrupted)
        if not call.wait(self._check_every):
            with self._changed:
                self._group.interrupt(replica.rank)
            if not call.wait(self._stall_timeout):
                self._end(replica.rank)
        completions: list[Completion] = call.result()[0]
        return completions

    def _end(self, rank: int) -> None:
        """Kill a replica that hangs. Raises TimeoutError, when its death is known."""
        self._group.kill(rank)
        deadline = time.monotonic() + 10.0  # unless the whole group is being closed
        while self._group.independent and not self._group.is_dead(rank) and time.monotonic() < deadline:
            time.sleep(0.01)
        waited = self._check_every + self._stall_timeout
        raise TimeoutError(
            f"{self._group.name} rank {rank} said nothing for {waited:g} s, though asked to return, and was ended"
        )

    def _has_work(self, replica: Replica) -> bool:
        wanted = self._starting and self._queue.wanted(replica)
        return self._going_on and replica.serving and (bool(replica.held) or wanted)

    def _wake(self) -> None:
        """Idle replicas hear of waiting requests by the condition, busy ones with room by their interrupt flag."""
        for replica in self._replicas:
            if replica.calling and self._starting and self._queue.wanted(replica):
                self._group.interrupt(replica.rank)
        self._changed.notify_all()

    # Dying and coming back, in the thread of the replica

    def _revive(self, replica: Replica, error: BaseException) -> bool:
        """Start a dead replica again; False when that is over, or what happened is another kind of failure."""
        with self._changed:
            replica.serving = False
            self._queue.put_back(replica.held.values())
            replica.held.clear()
            self._wake()  # the others take over
        while not self._closed and self._group.is_dead(replica.rank) and replica.restarts < self._restarts:
            replica.restarts += 1
            _warn("%s\nThis replica is started again: %d of %d times", error, replica.restarts, self._restarts)
            try:
                return self._start_again(replica)
            except BaseException as again:
                error = again
        if self._group.is_dead(replica.rank) and self._restarts > 0:
            times = f"after {self._restarts} restarts of rollout replica {replica.rank}"
            error, cause = RuntimeError(f"{times}: {error}"), error
            error.__cause__ = cause
        self._fail(error)
        return False

    def _start_again(self, replica: Replica) -> bool:
        """True; or RuntimeError, when nobody is left to answer."""
        self._group.restart(replica.rank).result()
        self._group.submit_one(replica.rank, "initialize").result()
        if self._updated and self._restore is not None:
            self._restore(replica.rank)
        with self._changed:
            replica.serving = not self._updated or self._restore is not None
            replica.calling = False
            self._changed.notify_all()
            if self._going_on and not any(other.serving or other.calling for other in self._replicas):
                raise RuntimeError(
                    "no rollout replica has weights: the last one died and was started again without them; "
                    "with `restore` it would get them back in the middle of a step"
                )
        return True

    def _check_paused(self, method: str) -> None:
        with self._changed:
            if self._going_on:
                raise RuntimeError(f"{method} needs paused replicas")

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
        back: list[Queued] = []
        for replica in self._replicas:
            if replica.held:
                call = submit_unless_dead(self._group, replica.rank, "withdraw")
                for completion in answer_unless_dead(self._group, replica.rank, call) or ():
                    replica.held[completion.request_id].keep(completion)
            back += replica.held.values()
            replica.held.clear()
        self._queue.put_back(back)

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
