"""A child process that judges answers, and dies when one takes too long.

What a model writes is handed to SymPy by math-verify and by several scorers of reasoning-gym. SymPy can run for hours
on a short expression (`9**9**9`), inside C code that no thread can interrupt; and math-verify's own time limit works
in the main thread only. Here each question has an alarm, which ends the process: the parent reads the end of the pipe
as 0, and starts another one for the next question. Run as `python -m areal_like.data.judge`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import IO, Any


class Judge:
    """One such process, started when it is first needed; safe to use from several threads, one question at a time.

    Both questions are answered with a score, 0 when it took longer than `timeout` seconds or the library raised at
    what the model had written.

    Raises:
        RuntimeError: the process does not start; with its own words.
    """

    def __init__(self, timeout: float = 5.0) -> None:
        self.timeout = timeout
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None

    def equal(self, gold: str, answer: str) -> float:
        """1 when `answer` (text or LaTeX) states the same value as `gold`, says math-verify."""
        return self._ask(["equal", gold, answer])

    def task_score(self, task: str, parameters: str, index: int, answer: str) -> float:
        """What a reasoning-gym task gives for `answer` to its row `index`. `parameters` are those of the task, as
        JSON."""
        return self._ask(["task_score", task, parameters, index, answer])

    def close(self) -> None:
        with self._lock:
            self._stop()

    def _ask(self, question: list[Any]) -> float:
        with self._lock:
            process = self._running()
            assert process.stdin is not None and process.stdout is not None
            try:
                process.stdin.write(json.dumps([self.timeout, *question]) + "\n")
                process.stdin.flush()
                reply = process.stdout.readline()
            except OSError:
                reply = ""
            if not reply:
                self._stop()  # the alarm went off in it, or the expression exhausted its stack or memory
                return 0.0
            return float(json.loads(reply))

    def _running(self) -> subprocess.Popen[str]:
        if self._process is not None and self._process.poll() is None:
            return self._process
        self._stop()
        command = [sys.executable, "-m", "areal_like.data.judge"]
        pipe = subprocess.PIPE
        process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, encoding="utf-8")
        assert process.stdout is not None and process.stderr is not None
        if process.stdout.readline() != "ready\n":
            process.wait()
            raise RuntimeError(f"the process that judges answers did not start: {process.stderr.read().strip()}")
        process.stderr.close()
        self._process = process
        return process

    def _stop(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()


def serve(questions: IO[str], replies: IO[str]) -> None:
    """Answer lines `[seconds, kind, ...]` with a number each until the parent closes the pipe."""
    for line in questions:
        seconds, kind, *rest = json.loads(line)
        judge = _equal() if kind == "equal" else _task_score(*rest[:3])
        signal.setitimer(signal.ITIMER_REAL, seconds)
        try:
            score = float(judge(*rest))
        except Exception:  # whatever a library raises at the text of a model: it is no right answer
            score = 0.0
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(json.dumps(score), file=replies, flush=True)


def _equal() -> Callable[..., bool]:
    from math_verify import parse, verify

    def equal(gold: str, answer: str) -> bool:
        parsed = parse(f"${gold}$", parsing_timeout=None)
        return bool(parsed) and verify(parsed, parse(answer, parsing_timeout=None), timeout_seconds=None)

    return equal


def _task_score(task: str, parameters: str, index: int) -> Callable[..., float]:
    from areal_like.data.reasoning import generator

    source = generator(task, parameters)
    entry = source[index]
    return lambda task, parameters, index, answer: source.score_answer(answer, entry)


def main() -> None:
    replies = sys.stdout
    sys.stdout = sys.stderr  # what a library prints must not be taken for a reply
    logging.disable(logging.CRITICAL)  # math-verify warns that its own time limits are off: the alarm replaces them
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's affair: it closes the pipe
    print("ready", file=replies, flush=True)
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115  the parent reads complaints about the start only
    serve(sys.stdin, replies)


if __name__ == "__main__":
    main()
