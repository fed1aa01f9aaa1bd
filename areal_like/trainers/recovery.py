"""Writing the recovery checkpoints of a run, and going on from one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from areal_like.config import RecoverConfig, RLConfig
from areal_like.preflight.continuing import is_on, root_of
from areal_like.spec.checkpoint import Manifest
from areal_like.spec.recovery import Found, RunState, latest_checkpoint, prune, step_folder, whole_steps
from areal_like.trainers.roles import Actor
from areal_like.trainers.timers import Timer

__all__ = ["Recovery", "Resume", "find_resume"]


@dataclass(frozen=True)
class Resume:
    """Where a run goes on: a whole checkpoint and what is in it, see `spec.recovery`."""

    folder: Path
    state: RunState
    manifests: dict[str, Manifest]


def find_resume(config: RLConfig, folder: Path) -> tuple[Resume | None, list[str]]:
    """What the run goes on from, and what the user should know of it.

    Args:
        folder: of the run.
    """
    if not is_on(config.recover):
        return None, []
    found: Found = latest_checkpoint(root_of(folder))
    notes = [f"not used for recovery: {fault}" for fault in found.torn]
    if found.folder is None or found.state is None:
        return None, notes
    notes.append(
        f"going on after step {found.state.step} from {found.folder}"
        + f", written under {found.manifests['actor'].layout}"
    )
    return Resume(found.folder, found.state, found.manifests), notes


class Recovery:
    """Writes a checkpoint when it is due, and removes old ones when a newer one is whole.

    Args:
        folder: of the run.
        steps_per_epoch: for `freq_epochs`.
        total_steps: a checkpoint is also due after the last one: a longer run goes on from it.
        on_complete: told, when a checkpoint has become whole, the step of the oldest one that is kept: the run may go
            on from there, should newer ones turn out to be torn.
    """

    def __init__(
        self,
        config: RecoverConfig,
        actor: Actor,
        folder: Path,
        *,
        steps_per_epoch: int,
        total_steps: int,
        on_complete: Callable[[int], None] = lambda step: None,
    ) -> None:
        self._on_complete = on_complete
        self._actor, self._root, self._keep = actor, root_of(folder), config.keep
        self._timer = Timer(config)
        self._active = is_on(config) and self._timer.active
        self._steps_per_epoch, self._total_steps = steps_per_epoch, total_steps
        self._pending: RunState | None = None

    def due(self, step: int) -> bool:
        """Whether a checkpoint is to be written after `step`."""
        return self._active and (self._timer.due(step, self._steps_per_epoch) or step == self._total_steps)

    def save(self, state: RunState) -> None:
        """Write a checkpoint. It is complete when `poll` or `finish` has seen to it, after the figures of the step are
        on disk."""
        self.finish()
        folder = step_folder(self._root, state.step)
        self._actor.save_checkpoint(folder / "actor", state.step)
        self._pending = state

    def poll(self) -> None:
        """Complete a checkpoint whose files are all written."""
        if self._pending is not None and self._actor.finish_checkpoint(wait=False):
            self._complete(self._pending)

    def finish(self) -> None:
        """Wait for a checkpoint that is being written, and complete it."""
        if self._pending is not None:
            self._actor.finish_checkpoint(wait=True)
            self._complete(self._pending)

    def _complete(self, state: RunState) -> None:
        self._pending = None
        state.write(step_folder(self._root, state.step))
        prune(self._root, self._keep)
        self._on_complete(whole_steps(self._root)[0])
