"""What a run goes on from, as far as it is known before the start."""

from __future__ import annotations

from pathlib import Path

from areal_like.config import RecoverConfig, RLConfig
from areal_like.spec.recovery import Found, latest_checkpoint

__all__ = ["OTHER", "found_for", "is_on", "root_of"]

OTHER = "give the run another trial_name, or set recover.mode: off to begin anew (its files are set aside)"


def is_on(config: RecoverConfig) -> bool:
    """`on` and `auto` mean the same, as in AReaL: checkpoints are written, and the newest one is taken up."""
    return config.mode in ("on", "auto")


def root_of(folder: Path) -> Path:
    """Where the recovery checkpoints of the run in `folder` are."""
    return folder / "recover"


def found_for(config: RLConfig) -> Found:
    """The newest whole checkpoint that the run would go on from, if it would."""
    if not is_on(config.recover):
        return Found()
    folder = Path(config.cluster.fileroot).expanduser() / config.experiment_name / config.trial_name
    return latest_checkpoint(root_of(folder))
