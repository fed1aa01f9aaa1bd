"""Slots: the bound on what is under way, with the time that was spent waiting for one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Slots:
    """A first-come, first-served semaphore that knows how long it was waited for.

    Args:
        count: how many there are.
        clock: seconds.
    """

    def __init__(self, count: int, clock: Callable[[], float]) -> None:
        self.count, self.held = count, 0
        self._free = asyncio.Semaphore(count)
        self._clock = clock
        self._blocked = 0.0
        self._waiting_since: dict[int, float] = {}
        self._next = 0

    async def acquire(self) -> None:
        """Take one; those who came before are served first."""
        number, self._next = self._next, self._next + 1
        self._waiting_since[number] = self._clock()
        try:
            await self._free.acquire()
        finally:
            self._blocked += self._clock() - self._waiting_since.pop(number)
        self.held += 1

    def release(self) -> None:
        self.held -= 1
        self._free.release()

    def take_blocked(self) -> float:
        """Seconds that takers have waited since the last call, summed over them, unfinished waits included."""
        now = self._clock()
        blocked, self._blocked = self._blocked, 0.0
        for number, since in self._waiting_since.items():
            blocked += now - since
            self._waiting_since[number] = now
        return blocked
