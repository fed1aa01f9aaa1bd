"""Shared bytes by which the driver asks the workers of a group, or one of them, to stop what they generate."""

from __future__ import annotations

import mmap
import os
import tempfile


class InterruptFlag:
    """A page of shared memory: byte 0 for all ranks, byte 1 + n for rank n alone (a machine has fewer than 4095).

    Its file descriptor is handed to the workers when they start.
    """

    def __init__(self, descriptor: int | None = None) -> None:
        if descriptor is None:
            if hasattr(os, "memfd_create"):
                descriptor = os.memfd_create("areal-like-interrupt", os.MFD_CLOEXEC)
            else:
                with tempfile.TemporaryFile() as file:
                    descriptor = os.dup(file.fileno())
            os.ftruncate(descriptor, mmap.PAGESIZE)
        self.descriptor = descriptor
        self._memory = mmap.mmap(descriptor, mmap.PAGESIZE)

    def set(self, rank: int | None = None) -> None:
        """For one rank, or for all."""
        self._memory[0 if rank is None else 1 + rank] = 1

    def clear(self, rank: int | None = None) -> None:
        """Undo `set` with the same argument."""
        self._memory[0 if rank is None else 1 + rank] = 0

    def is_set(self, rank: int) -> bool:
        return self._memory[0] != 0 or self._memory[1 + rank] != 0

    def close(self) -> None:
        """Give the descriptor back. The memory goes with this object: `set` after `close` is harmless."""
        os.close(self.descriptor)


_current: tuple[InterruptFlag, int] | None = None


def install(flag: InterruptFlag, rank: int) -> None:
    """In a worker: the flag that `interrupted` reads, and who asks."""
    global _current
    _current = flag, rank


def interrupted() -> bool:
    """Whether the driver wants the current generation to return what it has. Always False outside a worker."""
    return _current is not None and _current[0].is_set(_current[1])
