"""Calling reward functions, in processes of their own.

A reward function is the user's code: it may hang, leak, or use signals, so it runs outside the driver and with a time
limit. A process that has not answered in time is ended, and another takes its place. What still fails after some
retries is an error, never a reward of 0.
"""

from __future__ import annotations

import asyncio
import functools
import importlib.util
import queue
import sys
import traceback
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal_like.data.prompts import prompt_text
from areal_like.data.rewards import Reward, RewardError, score
from areal_like.data.rows import Row
from areal_like.runtime.local import WorkerError, WorkerGroup

__all__ = ["RewardPool"]


@dataclass(frozen=True)
class _Failure:
    message: str
    remote_traceback: str


@dataclass(frozen=True)
class _ScriptFunction:
    """A function of the script that runs as `__main__`, which another process must load from its file."""

    file: str
    name: str

    @functools.cache  # noqa: B019  a reward process holds one or two of them, for its whole life
    def load(self) -> Reward:
        spec = importlib.util.spec_from_file_location("areal_like_script", self.file)
        if spec is None or spec.loader is None:
            raise RewardError(f"{self.file} cannot be loaded as a module")
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        function: Reward = getattr(module, self.name)
        return function


def _portable(function: Reward) -> Any:
    """Something that can be sent to another process in place of the function.

    Raises:
        RewardError: the function cannot be found by name there.
    """
    name = getattr(function, "__qualname__", "")
    if "<" in name:
        raise RewardError(
            f"the reward function {name} must stand at the top level of a module: workers find it by name"
        )
    if getattr(function, "__module__", None) != "__main__":
        return function
    file = getattr(sys.modules["__main__"], "__file__", None)
    if file is None or "." in name:
        raise RewardError(
            f"the reward function {name} must stand at the top level of a file: workers load it from there"
        )
    return _ScriptFunction(str(Path(file).absolute()), name)


class RewardHost:
    """In a reward process: calls functions."""

    def score(self, function: Any, row: Row, text: str) -> float | _Failure:
        try:
            reward = function.load() if isinstance(function, _ScriptFunction) else function
            return score(reward, prompt_text(row), text, row)
        except RewardError as error:
            cause = error.__cause__
            return _Failure(str(error), "".join(traceback.format_exception(cause)) if cause is not None else "")


class _Process:
    """One reward process, started when it is first needed and again after it was lost."""

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._group: WorkerGroup | None = None

    def score(self, function: Any, name: str, row: Row, text: str) -> float:
        """RewardError: it raised, hung, or killed the process."""
        if self._group is None:
            self._group = WorkerGroup.start("reward", "areal_like.rollout.rewards:RewardHost", {}, 1)
        try:
            outcome = self._group.submit_one(0, "score", function, row, text).result(self._timeout)[0]
        except TimeoutError:
            self.close()
            raise RewardError(
                f"the reward {name} has not finished an answer to {_place(row)} after {self._timeout:g} s"
            ) from None
        except WorkerError as error:
            self.close()
            raise RewardError(f"the reward {name}, at {_place(row)}: {error}") from error
        if isinstance(outcome, _Failure):
            raise RewardError(f"{outcome.message}\n  for the answer {text!r}\n{outcome.remote_traceback}".rstrip())
        return float(outcome)

    def close(self) -> None:
        if self._group is not None:
            self._group.close(grace=0)
            self._group = None


class RewardPool:
    """Reward processes, each handling one answer at a time.

    Args:
        workers: number of processes.
        timeout: seconds for one answer.
        retries: further tries after one that raised, hung or died.
    """

    def __init__(self, *, workers: int = 1, timeout: float = 60.0, retries: int = 1) -> None:
        self._retries = retries
        self._processes = [_Process(timeout) for _ in range(workers)]
        self._idle: queue.SimpleQueue[_Process] = queue.SimpleQueue()
        for process in self._processes:
            self._idle.put(process)
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="reward")

    @staticmethod
    def check(function: Reward) -> None:
        """See before a run that reward processes will find the function.

        Raises:
            RewardError: they cannot.
        """
        _portable(function)

    def submit(self, function: Reward, row: Row, text: str) -> Future[float]:
        """The reward of one answer, a finite number; or RewardError, naming the function, the row and the answer."""
        portable = _portable(function)
        name = f"{function.__module__}.{getattr(function, '__qualname__', type(function).__name__)}"
        return self._threads.submit(self._score, portable, name, row, text)

    async def score_one(self, function: Reward, row: Row, text: str) -> float:
        """`submit`, for coroutines."""
        return await asyncio.wrap_future(self.submit(function, row, text))

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        for process in self._processes:
            process.close()

    def _score(self, function: Any, name: str, row: Row, text: str) -> float:
        process = self._idle.get()
        try:
            for left in reversed(range(self._retries + 1)):
                try:
                    return process.score(function, name, row, text)
                except RewardError:
                    if not left:
                        raise
        finally:
            self._idle.put(process)
        raise AssertionError("unreachable")


def _place(row: Row) -> str:
    return f"row {row.index} of {row.dataset or 'the dataset'}"
