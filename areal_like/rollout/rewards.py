"""Calling the reward function, in processes of its own.

A reward function is the user's code: it may hang, leak, or use signals, so it runs outside the driver and with a time
limit. What it raises stops the run: a reward that fails is not a reward of 0.
"""

from __future__ import annotations

import importlib.util
import queue
import sys
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal_like.data.prompts import prompt_text
from areal_like.data.rewards import Reward, RewardError, score
from areal_like.data.rows import Row
from areal_like.rollout.groups import Answer, RolloutGroup
from areal_like.runtime.local import WorkerError, WorkerGroup


@dataclass(frozen=True)
class _Failure:
    answer: str
    message: str
    remote_traceback: str


@dataclass(frozen=True)
class _ScriptFunction:
    """A function of the script that runs as `__main__`, which another process must load from its file."""

    file: str
    name: str

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
    """In a reward process: holds the function."""

    def __init__(self, function: Any) -> None:
        self._function: Reward = function.load() if isinstance(function, _ScriptFunction) else function

    def score(self, row: Row, texts: list[str]) -> list[float] | _Failure:
        prompt = prompt_text(row)
        rewards = []
        for text in texts:
            try:
                rewards.append(score(self._function, prompt, text, row))
            except RewardError as error:
                cause = error.__cause__
                lines = traceback.format_exception(cause) if cause is not None else []
                return _Failure(text, str(error), "".join(lines))
        return rewards


class RewardPool:
    """Reward processes, each handling one group at a time.

    Args:
        function: `reward(prompt, completion, row)`.
        workers: number of processes.
        timeout: seconds for one answer.
    """

    def __init__(self, function: Reward, *, workers: int = 1, timeout: float = 60.0) -> None:
        self._name = f"{function.__module__}.{getattr(function, '__qualname__', type(function).__name__)}"
        self._timeout = timeout
        self._group = WorkerGroup.start(
            "reward", "areal_like.rollout.rewards:RewardHost", {"function": _portable(function)}, workers
        )
        self._idle: queue.SimpleQueue[int] = queue.SimpleQueue()
        for rank in range(workers):
            self._idle.put(rank)
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="reward")

    def submit(self, group: RolloutGroup, done: Callable[[RolloutGroup, BaseException | None], None]) -> None:
        """Fill in the rewards of a complete group, then call `done(group, error)` from another thread."""

        def work() -> None:
            error: BaseException | None = None
            try:
                self.score(group.prompt.row, group.finished())
            except BaseException as caught:
                error = caught
            done(group, error)

        self._threads.submit(work)

    def score(self, row: Row, answers: list[Answer]) -> None:
        """Fill in the rewards of the answers to one row.

        Raises:
            RewardError: naming the function, the row and the answer.
        """
        rank = self._idle.get()
        try:
            pending = self._group.submit_one(rank, "score", row, [answer.text for answer in answers])
            outcome = pending.result(self._timeout * len(answers))[0]
        except TimeoutError:
            raise RewardError(
                f"the reward {self._name} has not finished {len(answers)} answers to {_place(row)} "
                f"after {self._timeout * len(answers):g} s"
            ) from None
        except WorkerError as error:
            raise RewardError(f"the reward {self._name}, at {_place(row)}: {error}") from error
        finally:
            self._idle.put(rank)
        if isinstance(outcome, _Failure):
            raise RewardError(
                f"{outcome.message}\n  for the answer {outcome.answer!r}\n{outcome.remote_traceback}".rstrip()
            )
        for answer, reward in zip(answers, outcome, strict=True):
            answer.reward = reward

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._group.close(grace=0)


def _place(row: Row) -> str:
    return f"row {row.index} of {row.dataset or 'the dataset'}"
