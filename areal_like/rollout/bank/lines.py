"""Lines that know whether they are whole: `<blake2b of the rest> <JSON>`, with an empty line between two.

The empty line is for the case that the byte which changes is a newline: it then spoils one line, not two.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal_like.rollout.bank.values import dumps, loads

__all__ = ["Damage", "check", "frame", "scan"]


@dataclass(frozen=True)
class Damage:
    """Something on the disk that is not what was written.

    Attributes:
        file, offset: where; the offset is in bytes.
        problem: in words.
        torn: an unfinished end of a file, which nothing was promised of: what a kill leaves.
        key: of the group that it belongs to, if that can be told.
    """

    file: Path
    offset: int
    problem: str
    torn: bool = False
    key: tuple[str, int] | None = None

    def __str__(self) -> str:
        return f"{self.file}, byte {self.offset}: {self.problem}"


def check(data: bytes) -> str:
    """BLAKE2b with 128 bits, in hexadecimal."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def frame(record: dict[str, Any]) -> bytes:
    """One record as a line, with its check."""
    body = dumps(record)
    return b"\n" + check(body).encode() + b" " + body + b"\n"


def scan(path: Path) -> Iterator[tuple[int, dict[str, Any]] | Damage]:
    """The records of a file with their offsets, in order, and what is damaged among them.

    A file that grows meanwhile is read up to some whole line.
    """
    offset = 0
    with path.open("rb") as file:
        for line in file:
            if not line.endswith(b"\n"):
                problem = f"the last {len(line)} bytes are no whole line: a write that was not finished"
                yield Damage(path, offset, problem, torn=True)
            elif line != b"\n":
                body = line[33:-1]
                if line[:33] == check(body).encode() + b" ":
                    yield offset, loads(body)
                else:
                    yield Damage(path, offset, f"a line of {len(line)} bytes does not agree with its check")
            offset += len(line)
