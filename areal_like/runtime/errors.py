"""What goes wrong in a worker, as the driver sees it."""

from __future__ import annotations

import signal
from dataclasses import dataclass


class WorkerError(RuntimeError):
    """A rank of a worker group failed; the whole group is gone, unless its ranks are independent and this one died.

    Attributes:
        group: name of the worker group (the role: "actor", "rollout" ...).
        rank: the rank that failed first.
        method: what it was doing ("setup" before the first call).
        remote_traceback: the traceback in the worker, or the last lines that a dead worker wrote.
        exit_code: the exit status of a worker that died (negative: the number of the signal), else None.
    """

    def __init__(
        self,
        message: str,
        *,
        group: str,
        rank: int,
        method: str,
        remote_traceback: str = "",
        exit_code: int | None = None,
    ) -> None:
        super().__init__(message)
        self.group = group
        self.rank = rank
        self.method = method
        self.remote_traceback = remote_traceback
        self.exit_code = exit_code


@dataclass(frozen=True)
class Failure:
    """One rank's failure, before the driver knows which of several came first.

    `when` is `time.monotonic()` of the worker: one clock for all processes of a machine.
    """

    rank: int
    method: str
    when: float
    message: str
    remote_traceback: str = ""
    exit_code: int | None = None
    exception: BaseException | None = None


def first_cause(failures: list[Failure]) -> Failure:
    """The failure that explains the others.

    When a process dies its peers soon report a broken connection, and may do so before the death is noticed: a death
    comes before an exception. Among equals, the earliest.
    """
    return min(failures, key=lambda failure: (failure.exit_code is None, failure.when))


def describe_exit(code: int) -> str:
    """`killed by SIGKILL (...)` or `exited with status 3`."""
    if code >= 0:
        return f"exited with status {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    hint = " (the kernel does this when memory runs out)" if -code == signal.SIGKILL else ""
    return f"was killed by {name}{hint}"


def to_exception(group: str, failures: list[Failure]) -> BaseException:
    """What the driver raises: the diagnostics of a user error as they are, everything else as a WorkerError."""
    cause = first_cause(failures)
    if cause.exception is not None:
        return cause.exception
    others = sorted({failure.rank for failure in failures} - {cause.rank})
    lines = [f"{group} rank {cause.rank}, {cause.method}: {cause.message}"]
    if others:
        lines.append(f"(ranks that failed after it: {', '.join(map(str, others))})")
    if cause.remote_traceback:
        lines += ["", cause.remote_traceback.rstrip()]
    return WorkerError(
        "\n".join(lines),
        group=group,
        rank=cause.rank,
        method=cause.method,
        remote_traceback=cause.remote_traceback,
        exit_code=cause.exit_code,
    )
