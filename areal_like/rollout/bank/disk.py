"""The few things that the bank asks of a disk, each in one place, with errors that say what could not be written."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from areal_like.spec.checkpoint import sync_folder

__all__ = ["AppendFile", "make_folder", "remove_folder", "replace_file"]


class AppendFile:
    """A file that grows at its end.

    What `write` adds does not count until `keep`; `take_back` removes it. Only the writer holds one.

    Args:
        path: must exist, unless `create`.
        create: it must not exist.

    Attributes:
        size: bytes that count.
        end: bytes that are written.
    """

    def __init__(self, path: Path, *, create: bool = False) -> None:
        self.path = path
        new = os.O_CREAT | os.O_EXCL if create else 0
        self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | new, 0o644)
        self.size = self.end = os.fstat(self._descriptor).st_size
        self._unsettled = False

    def write(self, data: bytes) -> None:
        """Add to the end.

        Raises:
            OSError: there is no room; the message says for how many bytes, and in which file.
        """
        if self._unsettled and self.end == self.size:  # an earlier `take_back` did not succeed
            self.take_back()
        self._unsettled = True
        rest = memoryview(data)
        while rest:
            try:
                written = os.write(self._descriptor, rest)
            except OSError as error:
                raise _named(
                    error, f"the bank needs {len(rest)} bytes more and cannot write them", self.path
                ) from error
            self.end += written
            rest = rest[written:]

    def sync(self) -> None:
        """Return when everything written is on the disk.

        Raises:
            OSError: it is not.
        """
        try:
            os.fsync(self._descriptor)
        except OSError as error:
            needed = self.end - self.size
            raise _named(error, f"the bank cannot bring {needed} bytes to the disk", self.path) from error
        if os.fstat(self._descriptor).st_nlink == 0:
            raise OSError(errno.ENOENT, "the file was deleted under the bank that writes it", str(self.path))

    def keep(self) -> None:
        self.size = self.end
        self._unsettled = False

    def take_back(self) -> None:
        """Remove what was written since `keep`.

        Raises:
            OSError: not now; then it happens before the next write.
        """
        self.end = self.size
        try:
            os.ftruncate(self._descriptor, self.size)
        except OSError as error:
            raise _named(error, "the bank cannot remove what it could not write to its end", self.path) from error
        self._unsettled = False

    def close(self) -> None:
        os.close(self._descriptor)


def make_folder(folder: Path) -> None:
    """Create a folder and what is missing above it, all of it to stay."""
    if folder.is_dir():
        return
    make_folder(folder.parent)
    os.mkdir(folder)
    sync_folder(folder.parent)


def remove_folder(folder: Path) -> None:
    """Remove a folder of files."""
    for name in os.listdir(folder):
        os.unlink(folder / name)
    os.rmdir(folder)


def replace_file(path: Path, data: bytes) -> None:
    """Write a file, whole or not at all, and on the disk when this returns."""
    temporary = path.with_name(f"{path.name}.new")
    temporary.unlink(missing_ok=True)  # of a writer that was killed
    file = AppendFile(temporary, create=True)
    try:
        file.write(data)
        file.sync()
    finally:
        file.close()
    os.replace(temporary, path)
    sync_folder(path.parent)


def _named(error: OSError, doing: str, path: Path) -> OSError:
    return OSError(error.errno, f"{doing}: {os.strerror(error.errno or 0)}", str(path))
