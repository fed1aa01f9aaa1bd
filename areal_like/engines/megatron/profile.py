"""A trace of some optimizer steps of some ranks, by torch.profiler, readable because its ranges have names.

Recording begins with the first pass after step `step_start` - 1, so that log-probabilities before the update are in it,
and ends when the weights of step `step_end` have been streamed, or where the next pass begins. A step is an optimizer
step; of a model that is not trained, a forward pass.

Ranges: the calls of the engine ("train_batch, step 3"), "forward 1" and "backward 1" of each micro-batch, "optimizer
step" and what is in it, the exchanges between stages, the stream of weights. Those inside Megatron-Core come from the
timers it asks for by name.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from areal_like.alloc import Mesh
from areal_like.config import ProfilerConfig

__all__ = ["StepProfiler", "create_profiler", "named", "traced", "traced_stream"]

NUMBERED = {"forward-compute": "forward", "backward-compute": "backward"}
"""Timers of Megatron-Core that run once a micro-batch, and the names that their ranges get."""
HISTORY = 1_000_000
"""Most allocations that a snapshot of the memory goes back."""


def create_profiler(config: ProfilerConfig | None, *, rank: int, mesh: Mesh, device: str) -> StepProfiler | None:
    """None where nothing is to be recorded on this rank.

    Raises:
        ValueError: the section asks for what cannot be; the message names the key. (The check says it before.)
    """
    if config is None:
        return None
    if outside := [r for r in config.ranks if not 0 <= r < mesh.world_size]:
        raise ValueError(f"profiler.ranks: there is no rank {outside[0]} among {mesh.world_size}")
    if config.step_end < config.step_start:
        raise ValueError(f"profiler.step_end {config.step_end} is before step_start {config.step_start}")
    if config.memory and device == "cpu":
        raise ValueError("profiler.memory records CUDA's memory, and the device is cpu")
    if config.save_path is None:
        raise ValueError("profiler.save_path: an engine without a run needs a folder")
    return StepProfiler(config, rank, device) if rank in config.ranks else None


class StepProfiler:
    """What records one rank of one engine."""

    def __init__(self, config: ProfilerConfig, rank: int, device: str) -> None:
        assert config.save_path is not None
        self.config, self.rank, self.device = config, rank, device
        self.folder = Path(config.save_path).expanduser()
        self.steps_done = 0
        self._recording: profile | None = None
        self._timers = _Timers()
        self._listeners: list[Any] = []

    def watch(self, model_config: Any, optimizer: Any) -> None:
        """The configurations through which Megatron-Core asks for timers."""
        ours = getattr(optimizer, "chained_optimizers", [optimizer]) if optimizer is not None else []
        self._listeners = [model_config, *(one.config for one in ours)]
        self._step_name = "train_batch" if optimizer is not None else "forward"

    @property
    def path(self) -> Path:
        """The trace; a snapshot of the memory stands beside it."""
        config = self.config
        return self.folder / f"rank{self.rank}-steps{config.step_start}-{config.step_end}.json.gz"

    @contextlib.contextmanager
    def call(self, name: str) -> Iterator[None]:
        """A call of the engine; it may be a step."""
        if name in ("train_batch", "forward"):
            if self.steps_done >= self.config.step_end:
                self.finish()
            elif self.steps_done == self.config.step_start - 1 and self._recording is None:
                self._begin()
        self._timers.counts.clear()
        is_step = name == self._step_name
        with self.range(f"{name}, step {self.steps_done + 1}" if is_step else name):
            yield
        self.steps_done += is_step
        if is_step and name == "forward" and self.steps_done >= self.config.step_end:
            self.finish()  # no weights will follow

    def stream(self, name: str, items: Iterator[Any]) -> Iterator[Any]:
        """A stream of the engine, recorded while it is read."""
        with self.range(name):
            yield from items
        if self.steps_done >= self.config.step_end:
            self.finish()

    def range(self, name: str) -> contextlib.AbstractContextManager[Any]:
        return record_function(name) if self._recording is not None else contextlib.nullcontext()

    def finish(self) -> None:
        """Write what was recorded; nothing when nothing is being recorded."""
        if self._recording is None:
            return
        recording, self._recording = self._recording, None
        for listener in self._listeners:
            listener.timers = None
        if self.device == "cuda":
            torch.cuda.synchronize()
        recording.stop()
        self.folder.mkdir(parents=True, exist_ok=True)
        _whole(self.path, recording.export_chrome_trace)
        if self.config.memory:
            _whole(self.path.with_name(self.path.name.replace(".json.gz", ".memory.pickle")), _dump_memory)

    def _begin(self) -> None:
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self.device == "cuda" else [])]
        if self.config.memory:
            torch.cuda.memory._record_memory_history(max_entries=HISTORY)
        self._recording = profile(
            activities=activities, with_stack=self.config.with_stack, profile_memory=self.config.memory
        )
        self._recording.start()
        for listener in self._listeners:
            listener.timers = self._timers


class _Timers:
    """Looks to Megatron-Core like its timers; each makes a range of the trace."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self._open: dict[str, list[record_function]] = {}

    def __call__(self, name: str, log_level: int | None = None) -> _Timer:
        return _Timer(self, name)

    def start(self, name: str) -> None:
        label = name
        if name in NUMBERED:
            self.counts[name] = self.counts.get(name, 0) + 1
            label = f"{NUMBERED[name]} {self.counts[name]}"
        opened = record_function(label)
        opened.__enter__()
        self._open.setdefault(name, []).append(opened)

    def stop(self, name: str) -> None:
        if self._open.get(name):
            self._open[name].pop().__exit__(None, None, None)


class _Timer:
    def __init__(self, owner: _Timers, name: str) -> None:
        self._owner, self._name = owner, name

    def start(self, barrier: bool = False) -> None:
        self._owner.start(self._name)

    def stop(self, barrier: bool = False) -> None:
        self._owner.stop(self._name)


def named(profiler: StepProfiler | None, name: str) -> contextlib.AbstractContextManager[Any]:
    """A range of the trace, if there is one."""
    return contextlib.nullcontext() if profiler is None else profiler.range(name)


def traced[**P, R](method: Callable[P, R]) -> Callable[P, R]:
    """A method of an engine whose calls the engine's `profiler` records; without one it is the method alone."""

    @functools.wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        profiler: StepProfiler | None = args[0].profiler  # type: ignore[attr-defined]
        if profiler is None:
            return method(*args, **kwargs)
        with profiler.call(method.__name__):
            return method(*args, **kwargs)

    return call


def traced_stream[**P](method: Callable[P, Iterator[Any]]) -> Callable[P, Iterator[Any]]:
    """The same for a method that returns a stream."""

    @functools.wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> Iterator[Any]:
        items = method(*args, **kwargs)
        profiler: StepProfiler | None = args[0].profiler  # type: ignore[attr-defined]
        return items if profiler is None else profiler.stream(method.__name__, items)

    return call


def _whole(path: Path, write: Callable[[str], Any]) -> None:
    """The file appears under its name when all of it is written."""
    temporary = path.with_name(f".{path.name}")  # the ending stays: it chooses compression
    try:
        write(str(temporary))
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _dump_memory(path: str) -> None:
    torch.cuda.memory._dump_snapshot(path)
    torch.cuda.memory._record_memory_history(enabled=None)
