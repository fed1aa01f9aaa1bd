"""A recovery checkpoint as files: its manifest, and whether it is whole.

    FOLDER/                 appears under its name when everything in it is written
      manifest.json         written last: version of the format, step, layout, model, counters, size of each file
      ...                   the tensors, in the engine's format

Pure Python: the check reads what the engine wrote.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from areal_like.spec.model import ModelSpec

__all__ = [
    "MANIFEST",
    "CheckpointFault",
    "Manifest",
    "checkpoint_identity",
    "differences",
    "read_manifest",
    "sync_folder",
    "write_json",
]

MANIFEST = "manifest.json"
FORMAT_VERSION = 1

_NOT_IDENTITY = {"published_name", "unsupported", "max_position_embeddings", "mtp_layers", "attention_dropout"}
"""Numbers that may change between two runs of one model."""


class CheckpointFault(ValueError):
    """A recovery checkpoint that cannot be used; the message names the folder and what is wrong."""


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint says about itself.

    Attributes:
        step: optimizer steps of the trainer that are in it; the caller's number.
        layout: allocation string that wrote it. Any other layout can read it.
        model: see `checkpoint_identity`.
        counters: what is neither a tensor nor a random state: steps of Adam and of the schedule, the loss scale.
        files: size in bytes of every other file of the folder.
    """

    step: int
    layout: str
    model: dict[str, Any]
    counters: dict[str, Any]
    files: dict[str, int]
    version: int = FORMAT_VERSION
    extra: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def describe(
        cls, folder: Path, *, step: int, layout: str, model: Mapping[str, Any], counters: Mapping[str, Any]
    ) -> Manifest:
        """The manifest of a folder whose other files are all written."""
        files = {
            str(file.relative_to(folder)): file.stat().st_size
            for file in sorted(folder.rglob("*"))
            if file.is_file() and file.name != MANIFEST
        }
        return cls(step, layout, dict(model), dict(counters), files)

    @property
    def size(self) -> int:
        """Bytes of all files but the manifest."""
        return sum(self.files.values())

    def write(self, folder: Path) -> None:
        """Write `folder/manifest.json`, whole or not at all."""
        write_json(folder / MANIFEST, asdict(self))


def checkpoint_identity(spec: ModelSpec, section: Any) -> dict[str, Any]:
    """What must be equal between the run that wrote a checkpoint and the one that reads it: the shape of the model, the
    type of its parameters, the kind of optimizer, and the adapters.

    Args:
        section: the role's section of the configuration.
    """
    shape = {name: value for name, value in asdict(spec).items() if name not in _NOT_IDENTITY}
    adapters = None
    if section.use_lora:
        adapters = {"rank": section.lora_rank, "modules": sorted(section.target_modules)}
    kind = section.optimizer.type if section.optimizer else None
    identity = {**shape, "dtype": section.dtype, "optimizer": kind, "adapters": adapters}
    read_back: dict[str, Any] = json.loads(json.dumps(identity))  # tuples become lists
    return read_back


def differences(saved: Mapping[str, Any], own: Mapping[str, Any]) -> list[str]:
    """What differs between two identities, in words: `num_layers is 3 in the checkpoint and 4 here`."""
    return [
        f"{name} is {saved.get(name)} in the checkpoint and {own.get(name)} here"
        for name in sorted({*saved, *own})
        if saved.get(name) != own.get(name)
    ]


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a whole checkpoint.

    Raises:
        CheckpointFault: there is no manifest, it is not one, or a file that it names is missing or has another size.
    """
    path = folder / MANIFEST
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointFault(f"{folder} has no {MANIFEST}: it was never finished") from None
    except (OSError, ValueError) as error:
        raise CheckpointFault(f"{path} cannot be read: {error}") from error
    if not isinstance(found, dict) or not isinstance(found.get("files"), dict):
        raise CheckpointFault(f"{path} is not the manifest of a checkpoint")
    if found.get("version") != FORMAT_VERSION:
        raise CheckpointFault(f"{path} has format version {found.get('version')}; this program reads {FORMAT_VERSION}")
    known = {f.name for f in fields(Manifest)}
    try:
        manifest = Manifest(**{name: value for name, value in found.items() if name in known})
    except TypeError as error:
        raise CheckpointFault(f"{path} is not the manifest of a checkpoint: {error}") from error
    for name, size in manifest.files.items():
        try:
            actual = (folder / name).stat().st_size
        except OSError:
            raise CheckpointFault(f"{folder} lacks the file {name} that its manifest names") from None
        if actual != size:
            raise CheckpointFault(f"{folder / name} has {actual} bytes; its manifest says {size}")
    return manifest


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file, whole or not at all, and on the disk when this returns."""
    temporary = path.with_name(f".{path.name}.partial")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            json.dump(value, file, indent=1, sort_keys=True, allow_nan=False)
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Let what was created or renamed in a folder survive a loss of power."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
