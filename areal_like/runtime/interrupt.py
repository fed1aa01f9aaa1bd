"""One shared byte by which the driver asks the workers of a group to stop what they generate."""

from __future__ import annotations

import mmap
import os
import tempfile


class InterruptFlag:
    """A byte of shared memory; its file descriptor is handed to the workers when they start."""

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

    def set(self) -> None:
        self._memory[0] = 1

    def clear(self) -> None:
        self._memory[0] = 0

    def is_set(self) -> bool:
        return self._memory[0] != 0

    def close(self) -> None:
        """Give the descriptor back. The memory goes with this object: `set` after `close` is harmless."""
        os.close(self.descriptor)


_current: InterruptFlag | None = None


def install(flag: InterruptFlag) -> None:
    """In a worker: the flag that `interrupted` reads."""
    global _current
    _current = flag


def interrupted() -> bool:
    """Whether the driver wants the current generation to return what it has. Always False outside a worker."""
    return _current is not None and _current.is_set()
