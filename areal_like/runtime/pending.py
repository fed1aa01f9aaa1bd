"""Answers that have not come yet."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any


class PendingCall:
    """The results, by rank, of a call to some ranks of a group."""

    def __init__(self, group: str, method: str, ranks: list[int], fail: Callable[[BaseException], None]) -> None:
        self.method = method
        self._group = group
        self._ranks = ranks
        self._results: dict[int, Any] = {}
        self._lost: dict[int, BaseException] = {}
        self._error: BaseException | None = None
        self._done = threading.Event()
        self._fail_group = fail

    @property
    def ranks(self) -> list[int]:
        return self._ranks

    def wait(self, timeout: float) -> bool:
        """Whether it is done after at most so many seconds; unlike `result`, nothing happens when it is not."""
        return self._done.wait(timeout)

    def done(self) -> bool:
        """Whether `result` would return (or raise) at once."""
        return self._done.is_set()

    def result(self, timeout: float | None = None) -> list[Any]:
        """The results in the order of the ranks.

        Raises:
            WorkerError: a rank failed, whichever call it was in; of independent ranks, after the others have answered.
            DiagnosticError: a rank found an error of the user.
            TimeoutError: not all ranks answered within `timeout` seconds; the group is ended.
        """
        if not self._done.wait(timeout):
            missing = [rank for rank in self._ranks if rank not in self._results]
            error = TimeoutError(
                f"{self._group}: {self.method} has not finished after {timeout:g} s; waiting for ranks {missing}"
            )
            self._fail_group(error)
            raise error
        if self._error is not None:
            raise self._error
        if self._lost:
            raise next(iter(self._lost.values()))
        return [self._results[rank] for rank in self._ranks]

    # What the group's listener calls.

    def answer(self, rank: int, value: Any) -> bool:
        """Record one rank's result; True when it was the last."""
        self._results[rank] = value
        return self._complete()

    def lose(self, rank: int, error: BaseException) -> bool:
        """One of several independent ranks has died; True when the others have answered."""
        self._lost[rank] = error
        return self._complete()

    def _complete(self) -> bool:
        complete = len(self._results) + len(self._lost) == len(self._ranks)
        if complete:
            self._done.set()
        return complete

    def fail(self, error: BaseException) -> None:
        self._error = error
        self._done.set()


class PendingStream(PendingCall):
    """Items that the ranks yield, one at a time; each item taken lets its rank produce another."""

    def __init__(
        self,
        group: str,
        method: str,
        ranks: list[int],
        fail: Callable[[BaseException], None],
        notify: Callable[[str, int], None],
    ) -> None:
        super().__init__(group, method, ranks, fail)
        self._items: queue.SimpleQueue[tuple[int, Any] | None] = queue.SimpleQueue()
        self._notify = notify

    def put(self, rank: int, item: Any) -> None:
        self._items.put((rank, item))

    def _complete(self) -> bool:
        complete = super()._complete()
        if complete:
            self._items.put(None)
        return complete

    def fail(self, error: BaseException) -> None:
        super().fail(error)
        self._items.put(None)

    def __iter__(self) -> Iterator[Any]:
        try:
            while (entry := self._items.get()) is not None:
                rank, item = entry
                yield item
                del item, entry  # before asking for the next one, or two are alive
                self._notify("credit", rank)
            self.result()
        finally:
            if not self.done():
                for rank in self._ranks:
                    self._notify("drain", rank)
