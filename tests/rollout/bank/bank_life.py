"""A run that is small enough to be ended a thousand times: it makes groups, trains on them, writes checkpoints.

`life` is what the run does from start to end; it tells what it was promised. `Journal` hears that, over all lives, and
says whether a promise was broken. As a program this file is the run itself: it reads lines `{"kill": ...}`, makes a
child for each, which lives until it is killed, and prints what the child told before.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).parent))

from bank_tools import make_group

from areal_like.rollout.bank import BankError, RolloutBank

CALLS = ("open", "write", "fsync", "replace", "mkdir", "unlink", "rmdir", "ftruncate")
"""What a bank asks of the system; every one of them is a moment at which a process can die."""
BATCH, STEPS, EVERY, AHEAD = 2, 4, 2, 4

__all__ = ["BankError", "Journal", "Trap", "fail", "life"]

type Say = Callable[..., None]


def life(folder: Path, say: Say, *, steps: int = STEPS, phase: Callable[[str], None] = lambda name: None) -> None:
    """Go on from the newest checkpoint of the trainer, for some steps.

    Args:
        say: is told `from` (checkpoint and what came back), `promised` (an index), `trained` (a step is saved).
        phase: is told what comes next.
    """
    saved = folder / "trainer.json"
    state: dict[str, Any] = json.loads(saved.read_text()) if saved.exists() else {"step": 0, "trained": []}
    step, trained = state["step"], list(state["trained"])
    phase("open")
    with RolloutBank.open(folder / "bank", note=lambda text: say("note", text=text)) as bank:
        phase("recover")
        recovered = bank.recover(step)
        equal = all(group == make_group(group.index) for group in recovered.groups)
        ready = [group.index for group in recovered.groups]
        say("from", step=step, trained=trained, ready=ready, equal=equal, dropped=recovered.counts())
        fresh = max([-1, *trained, *ready]) + 1
        for _ in range(steps):
            phase("append")
            promises = [(i, bank.append(make_group(i))) for i in range(fresh, fresh + AHEAD - len(ready) + 1)]
            for index, promise in promises:
                promise.result(60)
                say("promised", index=index)
                ready.append(index)
            fresh += len(promises)
            phase("mark")
            batch, ready = ready[:BATCH], ready[BATCH:]
            step += 1
            bank.mark_consumed([("sums", index) for index in batch], step)
            trained += batch
            if step % EVERY == 0:
                phase("checkpoint")
                _save(saved, {"step": step, "trained": trained})
                say("trained", step=step)
                bank.checkpoint(step)
        phase("close")


def _save(path: Path, state: dict[str, Any]) -> None:
    """The recovery checkpoint of the trainer; its weights are the list of what they were trained on."""
    with path.with_suffix(".new").open("w") as file:
        json.dump(state, file)
    path.with_suffix(".new").rename(path)


@dataclass
class Journal:
    """What the lives of a run were promised, and which promises were broken.

    Attributes:
        promised: indices of groups.
        broken: in words.
    """

    promised: set[int] = field(default_factory=set)
    broken: list[str] = field(default_factory=list)
    lives: int = 0
    restored: int = 0

    def hear(self, told: dict[str, Any]) -> None:
        if told["what"] == "promised":
            self.promised.add(told["index"])
        if told["what"] != "from":
            return
        self.lives += 1
        trained, ready = told["trained"], told["ready"]
        self.restored += len(ready)
        if lost := self.promised - {*trained, *ready}:
            self.broken.append(f"life {self.lives}, from step {told['step']}: lost {sorted(lost)}")
        if twice := [index for index, count in Counter([*trained, *ready]).items() if count > 1]:
            self.broken.append(f"life {self.lives}, from step {told['step']}: twice {twice}")
        if not told["equal"]:
            self.broken.append(f"life {self.lives}: a group is another one")
        if set(told["dropped"]) - {"torn"}:
            self.broken.append(f"life {self.lives}: dropped {told['dropped']}")


class Trap:
    """Counts calls of the system, and does something at one of them.

    Args:
        at: number of the call, from 1; 0 for none.
        mode: before, after, or half: a write that wrote half of what it should.
        action: what happens; told the name of the call.
    """

    def __init__(self, at: int, mode: str, action: Callable[[str], None]) -> None:
        self.at, self.mode, self.action = at, mode, action
        self.count = 0
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def set(self) -> Iterator[Trap]:
        with contextlib.ExitStack() as stack:
            for name in CALLS:
                stack.enter_context(mock.patch.object(os, name, self._watched(name, getattr(os, name))))
            yield self

    def _watched(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            with self._lock:
                self.count += 1
                here = self.count == self.at
            if here and self.mode == "half" and name == "write":
                real(arguments[0], bytes(arguments[1])[: len(arguments[1]) // 2])
            if here and self.mode != "after":
                self.action(name)
            try:
                return real(*arguments, **named)
            finally:
                if here and self.mode == "after":
                    self.action(name)

        return call


def fail(name: str) -> None:
    raise OSError(errno.EIO, f"injected into {name}")


# As a program.


def main() -> None:
    folder = Path(sys.argv[1])
    for line in sys.stdin:
        order = json.loads(line)
        child = os.fork()
        if child == 0:
            _child(folder / order.get("name", "run"), order)
        if (delay := order.get("delay")) is not None:
            time.sleep(delay)
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        _print("end", killed=os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, status=status)


def _child(folder: Path, order: dict[str, Any]) -> None:
    where = ["start"]

    def die(name: str) -> None:
        _print("dying", phase=where[0], call=name)
        os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)

    status = 1
    try:
        folder.mkdir(exist_ok=True)
        trap = Trap(order.get("at", 0), order.get("mode", "before"), die)
        with trap.set():
            life(folder, _print, steps=order.get("steps", STEPS), phase=lambda name: where.__setitem__(0, name))
        _print("calls", count=trap.count)
        status = 0
    finally:
        os._exit(status)


_PRINT = os.write
"""Not the one that is trapped."""


def _print(what: str, **told: Any) -> None:
    """One write to a pipe: what was said stays said when the process is killed."""
    _PRINT(1, json.dumps({"what": what, **told}).encode() + b"\n")


if __name__ == "__main__":
    main()
