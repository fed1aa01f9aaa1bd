"""Group commit: what was handed in while the disk was busy goes to the disk together."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

from areal_like.rollout.trajectories import RolloutGroup

__all__ = ["GroupCommit", "Pending"]

_LOG = logging.getLogger(__name__)


@dataclass
class Pending:
    """A group that is not on the disk yet, and the promise that it will be."""

    group: RolloutGroup
    promise: Future[str] = field(default_factory=Future)


class GroupCommit:
    """A thread that takes all that is pending, and commits it.

    Args:
        commit: brings groups to the disk and resolves their promises; called by the thread.
    """

    def __init__(self, commit: Callable[[list[Pending]], None]) -> None:
        self._commit = commit
        self._queue: queue.SimpleQueue[Pending | None] = queue.SimpleQueue()
        self._open = True
        self._order = threading.Lock()  # nothing may enter behind the end; held for the length of a put
        self._thread = threading.Thread(target=self._run, name="rollout bank", daemon=True)
        self._thread.start()

    def put(self, group: RolloutGroup) -> Future[str] | None:
        """Returns at once; None when this is closed."""
        pending = Pending(group)
        with self._order:
            if not self._open:
                return None
            self._queue.put(pending)
        return pending.promise

    def close(self) -> None:
        """Commit what is pending, and end."""
        with self._order:
            if self._open:
                self._queue.put(None)
            self._open = False
        self._thread.join()

    def _run(self) -> None:
        while (first := self._queue.get()) is not None:
            batch: list[Pending] = [first]
            last = False
            while not self._queue.empty():
                more = self._queue.get()
                if more is None:
                    last = True
                    break
                batch.append(more)
            # One whose owner has given it up meanwhile is not written. From here on nobody can give up.
            try:
                self._commit([pending for pending in batch if pending.promise.set_running_or_notify_cancel()])
            except Exception:  # of what the owner does when it is told something; the next group must not wait for ever
                _LOG.exception("the bank goes on after an error of its owner")
            if last:
                return
