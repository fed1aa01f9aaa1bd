"""What a run leaves behind and shows: figures of each step, samples, progress, seconds of each phase."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType

from areal_like.data.prompts import prompt_text
from areal_like.observe import MetricsWriter, PhaseTimers, Progress, Sample, SampleWriter, keep_steps
from areal_like.preflight.continuing import is_on
from areal_like.rollout.trajectories import RolloutGroup, TokenRollout
from areal_like.trainers.generation import BANK
from areal_like.trainers.startup import Job

__all__ = ["RunRecorder"]


class RunRecorder:
    """Collects the figures of a step and writes them when it ends.

    In the folder of the run: `metrics.jsonl`, `samples.jsonl` (with `rollout.dump_to_file`), TensorBoard events. A run
    that goes on from a checkpoint goes on with them after its step. Else what an earlier run of the same name left,
    its recovery checkpoints too, is set aside under `NAME.1`, `NAME.2` ...
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        events = job.config.stats_logger.tensorboard.path
        events_folder = Path(events).expanduser() if events else job.folder / "tensorboard"
        lines = [job.folder / "metrics.jsonl", job.folder / "samples.jsonl"]
        if job.resume is not None:
            for path in lines:
                keep_steps(path, job.steps_done)
        else:
            left = [*lines, job.folder / "tensorboard", job.folder / "recover"]
            if not is_on(job.config.recover):  # else the run goes on with what the bank has, checkpoint or not
                left.append(job.folder / BANK)
            for path in left:
                _set_aside(path)
        self._timers = PhaseTimers()
        self._progress = Progress(job.total_steps, first_step=job.steps_done)
        self._metrics = MetricsWriter(
            job.folder, tensorboard=events_folder, first_step=job.steps_done + 1 if job.resume else None
        )
        dump = job.config.rollout.dump_to_file
        self._samples = SampleWriter(job.folder, show=self._progress.note) if dump else None
        self._figures: dict[str, float] = {}

    def __enter__(self) -> RunRecorder:
        self._progress.__enter__()
        for note in self._job.notes:
            self._progress.note(note)
        placement = self._job.placement
        self._progress.note(
            f"actor {placement.actor.allocation}, rollout {placement.rollout.allocation} on {placement.device}; "
            f"{self._job.total_steps} steps; files in {self._job.folder}"
        )
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._progress.__exit__(kind, error, at)
        self._metrics.close()
        if self._samples is not None:
            self._samples.close()

    def note(self, text: str) -> None:
        """Something to read."""
        self._progress.note(text)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """A named part of a step."""
        self._progress.phase(name)
        with self._timers.phase(name):
            yield

    @contextlib.contextmanager
    def step(self, step: int) -> Iterator[None]:
        """One step; its figures are written when the block ends without an error."""
        started = time.perf_counter()
        yield
        tokens = self._figures.pop("tokens", 0.0)
        self._figures["speed/tokens_per_second"] = tokens / (time.perf_counter() - started)
        figures = {**self._figures, **self._timers.take()}
        self._progress.step(step, self._metrics.write(step, figures))
        self._figures = {}

    def figures(self, values: Mapping[str, float], prefix: str = "") -> None:
        """Add figures to the step, their names after `prefix`."""
        self._figures |= {f"{prefix}{name}": value for name, value in values.items()}

    def tokens(self, count: int) -> None:
        """The tokens that the step trains on, prompts included; for the speed."""
        self._figures["tokens"] = float(count)

    def samples(self, step: int, groups: Sequence[RolloutGroup]) -> None:
        """The attempts of the step, as text: what the model said in each turn, a line between two."""
        if self._samples is None:
            return
        self._samples.write(
            step,
            [
                Sample(
                    prompt=prompt_text(group.row),
                    completion="\n".join(turn.text for turn in member.turns),
                    reward=member.reward,
                    answer=group.row.answer,
                    version=member.versions[1] if member.versions else 0,
                    group=group.index,
                    finish_reason=member.turns[-1].finish_reason if member.turns else "",
                )
                for group in groups
                for member in group.members
                if isinstance(member, TokenRollout) and member.reward is not None
            ],
        )


def _set_aside(path: Path) -> None:
    if not path.exists():
        return
    number = 1
    while (aside := path.with_name(f"{path.name}.{number}")).exists():
        number += 1
    path.rename(aside)
