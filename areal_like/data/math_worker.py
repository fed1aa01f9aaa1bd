"""A child process that compares mathematical expressions with math-verify, and dies when it takes too long.

SymPy can run for hours on a short expression (`9**9**9`), inside C code that no thread can interrupt; and
math-verify's own time limit works in the main thread only. Here each question has an alarm, which ends the process:
the parent reads the end of the pipe as "no", and starts another one for the next question. Run as `python -m
areal_like.data.math_worker`.
"""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import threading
from typing import IO


class MathWorker:
    """One such process, started when it is first needed; safe to use from several threads, one question at a time."""

    def __init__(self, timeout: float = 5.0) -> None:
        self.timeout = timeout
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None

    def equal(self, gold: str, answer: str) -> bool:
        """Whether `answer` (text or LaTeX) states the same value as `gold`; False after `timeout` seconds.

        Raises:
            RuntimeError: the process cannot work at all (math-verify is not installed); with its own words.
        """
        with self._lock:
            process = self._running()
            assert process.stdin is not None and process.stdout is not None
            try:
                process.stdin.write(json.dumps([gold, answer, self.timeout]) + "\n")
                process.stdin.flush()
                reply = process.stdout.readline()
            except (BrokenPipeError, OSError):
                reply = ""
            if not reply:
                self._stop()  # the alarm went off in it, or the expression exhausted its stack or memory
                return False
            return bool(json.loads(reply))

    def close(self) -> None:
        with self._lock:
            self._stop()

    def _running(self) -> subprocess.Popen[str]:
        if self._process is not None and self._process.poll() is None:
            return self._process
        self._stop()
        command = [sys.executable, "-m", "areal_like.data.math_worker"]
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, encoding="utf-8"
        )
        assert process.stdout is not None and process.stderr is not None
        if process.stdout.readline() != "ready\n":
            process.wait()
            raise RuntimeError(f"the process that compares answers did not start: {process.stderr.read().strip()}")
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


def serve(questions: IO[str], answers: IO[str]) -> None:
    """Answer lines `[gold, answer, seconds]` with `true` or `false` until the parent closes the pipe."""
    import logging

    from math_verify import parse, verify

    logging.disable(logging.CRITICAL)  # math-verify warns that its own time limits are off: the alarm replaces them
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's affair
    print("ready", file=answers, flush=True)
    for line in questions:
        gold, answer, seconds = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, seconds)
        try:
            parsed_gold = parse(f"${gold}$", parsing_timeout=None)
            equal = bool(parsed_gold) and verify(parsed_gold, parse(answer, parsing_timeout=None), timeout_seconds=None)
        except Exception:  # whatever SymPy raises at model output: it is no right answer
            equal = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(json.dumps(bool(equal)), file=answers, flush=True)


if __name__ == "__main__":
    serve(sys.stdin, sys.stdout)
