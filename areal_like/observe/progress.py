"""Progress on the terminal: a bar, and one line of figures a step; plain lines where there is no terminal."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

COLUMNS: tuple[tuple[str, str, str], ...] = (
    ("reward/mean", "reward", "{:.3f}"),
    ("actor/loss", "loss", "{:+.4f}"),
    ("actor/grad_norm", "grad norm", "{:.3g}"),
    ("actor/approx_kl", "KL", "{:.2g}"),
    ("actor/ref_kl", "ref KL", "{:.2g}"),
    ("actor/entropy", "entropy", "{:.3f}"),
    ("speed/tokens_per_second", "tokens/s", "{:.0f}"),
)
"""(figure, what the line calls it, how it is written), in the order of the line; figures that a step lacks are left
out."""

_PHASE = "seconds/"


def figures_line(step: int, total: int | None, figures: Mapping[str, Any]) -> str:
    """One line: `step 3/13  reward 0.250  loss -0.0121  ...  generation 9.1 s  update 18.2 s`."""
    parts = [f"step {step}/{total}" if total is not None else f"step {step}"]
    parts += [f"{label} {_written(figures[name], form)}" for name, label, form in COLUMNS if name in figures]
    parts += [
        f"{name.removeprefix(_PHASE).replace('_', ' ')} {_written(value, '{:.1f}')} s"
        for name, value in figures.items()
        if name.startswith(_PHASE)
    ]
    return "  ".join(parts)


def _written(value: Any, form: str) -> str:
    return "n/a" if value is None else form.format(float(value))


class Progress:
    """Use as a context manager; `step()` after each step, `note()` for anything else that is to be read.

    Args:
        total_steps: of the whole run, when known.
        first_step: how many are already done when a run is taken up again.
        console: where to write; standard output.
    """

    def __init__(self, total_steps: int | None, *, first_step: int = 0, console: Console | None = None) -> None:
        self.console = console or Console(soft_wrap=True)
        self.total_steps, self._done = total_steps, first_step
        self._bar: RichProgress | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> Progress:
        if self.console.is_terminal:
            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
            )
            self._bar = RichProgress(*columns, console=self.console, transient=True)
            self._bar.start()
            self._task = self._bar.add_task("training", total=self.total_steps, completed=self._done)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def phase(self, name: str) -> None:
        """Say what is being done now, beside the bar; nothing without a terminal."""
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, description=name.replace("_", " "))

    def step(self, step: int, figures: Mapping[str, Any]) -> None:
        """A step is done: write its line and move the bar. `step` counts from 1."""
        self._done = step
        self.note(figures_line(step, self.total_steps, figures))
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=step)

    def note(self, text: str) -> None:
        """Write a line above the bar, as it is: no markup, no colours, not wrapped."""
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
