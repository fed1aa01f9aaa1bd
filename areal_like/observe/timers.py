"""How long each phase of a step took, by the clock on the wall."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class PhaseTimers:
    """Seconds by phase since the last `take()`.

    The phases of a reinforcement-learning step are `generation`, `reward`, `log_probs`, `update` and `weights`; any
    other name is as good. Phases may run in several threads at once: each adds its own time, so that the sum can
    exceed the step.

    Args:
        clock: gives seconds; `time.perf_counter`.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._seconds: dict[str, float] = {}
        self._lock = threading.Lock()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time the block, also when it raises."""
        begin = self._clock()
        try:
            yield
        finally:
            elapsed = self._clock() - begin
            with self._lock:
                self._seconds[name] = self._seconds.get(name, 0.0) + elapsed

    def take(self) -> dict[str, float]:
        """`{"seconds/PHASE": seconds}` in the order in which phases first ended, and begin anew."""
        with self._lock:
            taken, self._seconds = self._seconds, {}
        return {f"seconds/{name}": seconds for name, seconds in taken.items()}
