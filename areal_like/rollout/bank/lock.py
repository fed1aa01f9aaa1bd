"""One writer at a time: a lock that the system lets go of when the process is gone, however it went."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import weakref
from pathlib import Path

from areal_like.rollout.bank.manifest import BankError

__all__ = ["LOCK", "WriterLock"]

LOCK = "lock"


class WriterLock:
    """Held until `close`.

    Args:
        folder: of the bank.

    Raises:
        BankError: somebody else holds it; the message says who.
    """

    def __init__(self, folder: Path) -> None:
        path = folder / LOCK
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.pread(self._descriptor, 1000, 0)
            os.close(self._descriptor)
            if not isinstance(error, BlockingIOError):
                raise BankError(f"{path} cannot be locked ({error.strerror}): use a file system with locks") from error
            raise BankError(
                f"the bank {folder} is being written by {_who(holder)}: end that run, or give this one another folder"
            ) from None
        _held.add(self)
        try:
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode(), 0)
        except OSError:  # a full disk: the lock holds all the same, only the message to a second writer is poorer
            pass

    def close(self) -> None:
        _held.discard(self)
        os.close(self._descriptor)

    def forget(self) -> None:
        """In a forked child: the lock is the parent's, and has to end with the parent."""
        os.close(self._descriptor)


def _who(written: bytes) -> str:
    try:
        found = json.loads(written)
        return f"process {found['pid']} on {found['host']}"
    except (ValueError, LookupError, TypeError):
        return "another process"


_held: weakref.WeakSet[WriterLock] = weakref.WeakSet()


def _in_child() -> None:
    for lock in list(_held):
        lock.forget()
    _held.clear()


os.register_at_fork(after_in_child=_in_child)
