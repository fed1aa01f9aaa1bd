"""The figures of every step: one JSON line each, on disk before the next step begins, and TensorBoard events."""

from __future__ import annotations

import json
import math
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

FILE_NAME = "metrics.jsonl"


class MetricsWriter:
    """Appends to `folder/metrics.jsonl`, and to TensorBoard event files in `tensorboard` when that is given.

    A line is `{"step": 3, "time": 1764000000.0, "reward/mean": 0.25, ...}`; `time` is in seconds since 1970. A figure
    that is not finite is written as null (JSON has no NaN) and warned of. A run that is taken up again appends; a line
    that a killed process left half-written is ended first.

    Args:
        first_step: TensorBoard forgets this step and later ones, which a run that is taken up again makes anew.
    """

    def __init__(
        self, folder: str | Path, *, tensorboard: str | Path | None = None, first_step: int | None = None
    ) -> None:
        self.path = Path(folder) / FILE_NAME
        self.path.parent.mkdir(parents=True, exist_ok=True)
        torn = _ends_within_a_line(self.path)
        self._file = self.path.open("a", encoding="utf-8")
        if torn:
            self._file.write("\n")
        self._events: Any = None
        if tensorboard is not None:
            from torch.utils.tensorboard import SummaryWriter

            self._events = SummaryWriter(log_dir=str(tensorboard), purge_step=first_step)

    def write(self, step: int, figures: Mapping[str, Any]) -> dict[str, float | None]:
        """Write the figures of a step and flush; returns what was written.

        Raises:
            TypeError: a figure is not a number; it is named.
            OSError: the disk is full.
        """
        values = {name: _number(name, value) for name, value in figures.items()}
        lost = [name for name, value in values.items() if value is None]
        if lost:
            warnings.warn(f"step {step}: not finite, written as null: {', '.join(lost)}", RuntimeWarning, stacklevel=2)
        line = json.dumps({"step": int(step), "time": round(time.time(), 3), **values}, allow_nan=False)
        self._file.write(line + "\n")
        self._file.flush()
        if self._events is not None:
            for name, value in values.items():
                if value is not None:
                    self._events.add_scalar(name, value, step)
            self._events.flush()
        return values

    def close(self) -> None:
        self._file.close()
        if self._events is not None:
            self._events.close()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """The steps of a `metrics.jsonl` (or of the folder that holds it), in the order of the file; torn lines are left
    out."""
    path = Path(path)
    path = path / FILE_NAME if path.is_dir() else path
    steps = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            step = json.loads(line)
        except json.JSONDecodeError:
            continue  # of a process that was killed while it wrote
        if isinstance(step, dict) and "step" in step:
            steps.append(step)
    return steps


def keep_steps(path: str | Path, last: int) -> None:
    """Remove the lines of steps after `last` from a JSONL file of steps, and torn ones: they are written anew."""
    path = Path(path)
    if not path.is_file():
        return
    temporary = path.with_name(f".{path.name}.partial")
    with path.open(encoding="utf-8") as old, temporary.open("w", encoding="utf-8") as new:
        for line in old:
            try:
                step = json.loads(line)["step"]
            except (json.JSONDecodeError, TypeError, KeyError):
                continue
            if step <= last:
                new.write(line)
    temporary.rename(path)


def _number(name: str, value: Any) -> float | None:
    if isinstance(value, str | bytes):
        raise TypeError(f"the figure {name!r} is {value!r}, which is not a number")
    try:
        number = float(value)
    except OverflowError:  # a whole number beyond 1.8e308
        return None
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"the figure {name!r} is {value!r}, which is not a number") from error
    if not math.isfinite(number):
        return None
    return int(value) if isinstance(value, int) and not isinstance(value, bool) else number


def _ends_within_a_line(path: Path) -> bool:
    if not path.is_file() or path.stat().st_size == 0:
        return False
    with path.open("rb") as file:
        file.seek(-1, 2)
        return file.read(1) != b"\n"
