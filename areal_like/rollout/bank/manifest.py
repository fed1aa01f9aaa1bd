"""`manifest.json`: which generation of files counts. It is replaced at once; whoever reads it sees the old or the new.

{"check": "...", "manifest": {"format": 1, "generation": "generation-6d1c...", "timeline": "...", "checkpoint": 50}}
"""

from __future__ import annotations

import json
import re
import uuid
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from areal_like.rollout.bank.disk import replace_file
from areal_like.rollout.bank.lines import check
from areal_like.rollout.bank.values import dumps

__all__ = ["MANIFEST", "BankError", "Manifest", "is_generation", "new_name"]

MANIFEST = "manifest.json"
FORMAT = 1
_GENERATION = re.compile(r"generation-[0-9a-f]{12}")
_AWAY = "move the folder away to begin without its groups"


class BankError(RuntimeError):
    """A folder that cannot be used as a bank, or a call that would break its promise. The message says what to do."""


@dataclass(frozen=True)
class Manifest:
    """What counts in the folder of a bank.

    Attributes:
        generation: the folder of the files that count.
        timeline: new after each recovery.
        checkpoint: the step of the newest recovery checkpoint that is known of: what is marked as consumed up to it
            is gone, whether it has been removed from the files or not.
        format: of the whole folder.
    """

    generation: str
    timeline: str
    checkpoint: int
    format: int = FORMAT

    def write(self, folder: Path) -> None:
        """Let this count from now on; on the disk when this returns."""
        own = asdict(self)
        replace_file(folder / MANIFEST, json.dumps({"check": check(dumps(own)), "manifest": own}, indent=1).encode())

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """What counts.

        Raises:
            BankError: there is none, it is damaged, or another program wrote it.
        """
        path = folder / MANIFEST
        try:
            found: Any = json.loads(path.read_bytes())
            own = found["manifest"]
            version = own["format"]
        except (FileNotFoundError, NotADirectoryError):
            raise BankError(f"{folder} has no {MANIFEST}: it is no rollout bank; name the folder of one") from None
        except OSError as error:
            raise BankError(f"{path} cannot be read: {error.strerror}") from error
        except (ValueError, LookupError, TypeError, RecursionError):
            raise BankError(f"{path} is damaged: put it back from a copy, or {_AWAY}") from None
        if version != FORMAT:
            raise BankError(
                f"{path} has format {version!r}; this program reads {FORMAT}: go on with the program that wrote it,"
                f" or {_AWAY}"
            )
        if found.get("check") != check(dumps(own)) or own.keys() != {field.name for field in fields(cls)}:
            raise BankError(f"{path} is damaged: put it back from a copy, or {_AWAY}")
        return cls(**own)


def new_name() -> str:
    """For a generation that is to be."""
    return f"generation-{uuid.uuid4().hex[:12]}"


def is_generation(name: str) -> bool:
    return _GENERATION.fullmatch(name) is not None
