"""The recovery checkpoints of a run: which there are, which is the newest whole one, which can go.

    ROOT/step-000004/
      actor/          the engine's checkpoint, see `spec.checkpoint`
      run.json        written last, when every engine's part is whole: where the trainer stands

A folder without `run.json` was never finished. Pure Python: the check looks at them too.
"""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from areal_like.spec.checkpoint import CheckpointFault, Manifest, read_manifest, write_json

__all__ = ["Found", "RunState", "latest_checkpoint", "prune", "read_checkpoint", "step_folder", "whole_steps"]

RUN = "run.json"
FORMAT_VERSION = 1
_STEP = re.compile(r"^step-(\d+)$")


@dataclass(frozen=True)
class RunState:
    """Where a run stands after a step.

    Attributes:
        step: steps that are done.
        version: of the policy: updates whose weights are installed.
        prompts: prompts that are consumed; the next one has this number.
        data: `RowLoader.state()`: the place of the next batch.
        environments: of each environment, `position`, the number of the first problem that is not settled (trained on,
            or dropped for good), and `settled`, those beyond it that are. Empty in checkpoints of before there were
            environments: then `prompts` is the position of the data set.
        roles: engines whose checkpoints belong to it, each in the folder of its name.
    """

    step: int
    version: int
    prompts: int
    data: dict[str, int]
    environments: dict[str, dict[str, Any]] = field(default_factory=dict)
    roles: tuple[str, ...] = ("actor",)
    format: int = FORMAT_VERSION

    def write(self, folder: Path) -> None:
        """Complete the checkpoint in `folder`.

        Raises:
            OSError: it could not be written.
        """
        write_json(folder / RUN, asdict(self))


@dataclass(frozen=True)
class Found:
    """What there is to go on from.

    Attributes:
        folder: the newest whole checkpoint; None when there is none.
        state: of that checkpoint.
        manifests: of its engines, by role.
        torn: newer checkpoints that cannot be used, and why, in words.
    """

    folder: Path | None = None
    state: RunState | None = None
    manifests: dict[str, Manifest] = field(default_factory=dict)
    torn: tuple[str, ...] = ()


def step_folder(root: Path, step: int) -> Path:
    """Where the checkpoint of a step is."""
    return root / f"step-{step:06d}"


def latest_checkpoint(root: Path) -> Found:
    """The newest whole checkpoint below `root`, which need not exist."""
    torn = []
    for folder in reversed(_folders(root)):
        try:
            state, manifests = read_checkpoint(folder)
        except CheckpointFault as fault:
            torn.append(str(fault))
            continue
        return Found(folder, state, manifests, tuple(torn))
    return Found(torn=tuple(torn))


def read_checkpoint(folder: Path) -> tuple[RunState, dict[str, Manifest]]:
    """Where the run stood, and the manifests of its engines.

    Raises:
        CheckpointFault: something is missing or torn.
    """
    path = folder / RUN
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if found["format"] != FORMAT_VERSION:
            raise CheckpointFault(f"{path} has format {found['format']}; this program reads {FORMAT_VERSION}")
        state = RunState(**{**found, "roles": tuple(found["roles"])})
    except FileNotFoundError:
        raise CheckpointFault(f"{folder} has no {RUN}: it was never finished") from None
    except (OSError, ValueError, TypeError, KeyError) as error:
        if isinstance(error, CheckpointFault):
            raise
        raise CheckpointFault(f"{path} cannot be read: {error}") from error
    manifests = {role: read_manifest(folder / role) for role in state.roles}
    for role, manifest in manifests.items():
        if manifest.step != state.step:
            raise CheckpointFault(f"{folder}: {role} is of step {manifest.step}, the run of step {state.step}")
    return state, manifests


def prune(root: Path, keep: int) -> None:
    """Remove all but the newest `keep` whole checkpoints, and what is older than these and was never finished.

    A folder is renamed before it is emptied, so that one that is half gone is not taken for a checkpoint.
    """
    for left in root.glob(".*.removed"):
        shutil.rmtree(left)
    whole = [folder for folder in _folders(root) if (folder / RUN).exists()]
    if not whole:
        return
    oldest = whole[-keep:][0]
    for folder in _folders(root):
        if folder == oldest:
            break
        removed = folder.rename(folder.with_name(f".{folder.name}.removed"))
        shutil.rmtree(removed)


def whole_steps(root: Path) -> list[int]:
    """Steps of the whole checkpoints below `root`, the oldest first."""
    return [int(folder.name.rpartition("-")[2]) for folder in _folders(root) if (folder / RUN).exists()]


def _folders(root: Path) -> list[Path]:
    """Folders of checkpoints, the oldest first."""
    if not root.is_dir():
        return []
    found = [(int(match[1]), path) for path in root.iterdir() if (match := _STEP.match(path.name)) and path.is_dir()]
    return [path for _, path in sorted(found)]
