"""A real run is killed over and over: no group that was promised is lost, none is trained twice.

For the checkpoint that the run goes on from, every group is known to its weights, or comes back: never both. The run
is `bank_life.py`, a process that makes a child for each life; a life ends with SIGKILL, at a moment that is drawn, or
at its n-th call of the system.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import bank_life
import pytest
from bank_life import Journal, Trap, life


class Run:
    """The process, and what its lives told."""

    def __init__(self, folder: Path) -> None:
        command = [sys.executable, str(Path(bank_life.__file__)), str(folder)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.journal = Journal()
        self.kills = 0
        self.deaths: Counter[tuple[str, str]] = Counter()

    def live(self, **order: Any) -> int:
        """One life; the number of calls it made, if it came to its end."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        calls = 0
        for line in self.process.stdout:
            told = json.loads(line)
            self.journal.hear(told)
            if told["what"] == "dying":
                self.deaths[told["phase"], told["call"]] += 1
            if told["what"] == "calls":
                calls = told["count"]
            if told["what"] == "end":
                assert told["killed"] or told["status"] == 0, order
                self.kills += told["killed"]
                break
        assert self.journal.broken == [], order
        return calls


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    run = Run(tmp_path)
    yield run
    run.process.kill()
    run.process.communicate()


def kill_at_moments(run: Run, count: int) -> None:
    """A life takes its time on this machine; moments are drawn from one and a half times that."""
    draw = random.Random(6)
    run.live()
    start = time.monotonic()
    run.live()
    usual = time.monotonic() - start
    for _ in range(count):
        run.live(delay=draw.uniform(0, 1.5 * usual), steps=1000)
    run.live()
    assert run.kills == count and run.journal.restored


def test_killed_at_random_moments(run: Run) -> None:
    kill_at_moments(run, 15)


@pytest.mark.slow
def test_killed_at_random_moments_often(run: Run) -> None:
    kill_at_moments(run, 150)


def kill_at_calls(run: Run, stride: int) -> int:
    """Kill before, within and after the calls 1, 1 + stride, ... of a life. Returns how many calls a life makes."""
    run.live()
    calls = run.live()
    for at in range(1, calls + 1, stride):
        for mode in ("before", "half", "after"):
            run.live(at=at, mode=mode)
            run.live(steps=1)
    assert run.journal.restored > run.kills, "groups came back"
    return calls


def test_killed_at_calls(run: Run) -> None:
    assert kill_at_calls(run, 11) > 60
    assert run.kills > 15


@pytest.mark.slow
def test_killed_at_every_call(run: Run) -> None:
    """Every call of opening, recovering, appending, marking and checkpointing is among them."""
    calls = kill_at_calls(run, 1)
    assert run.kills > 2 * calls and run.kills >= 100
    found = set(run.deaths)
    for phase in ("recover", "checkpoint"):
        assert {(phase, call) for call in ("open", "write", "fsync", "replace", "mkdir", "unlink", "rmdir")} <= found
    for phase in ("append", "mark"):
        assert {(phase, call) for call in ("write", "fsync")} <= found
    assert ("open", "open") in found


@pytest.mark.parametrize("stride", [5, pytest.param(1, marks=pytest.mark.slow)])
def test_killed_while_the_bank_is_made(run: Run, stride: int) -> None:
    """Each time in another folder: the first 24 calls make the bank and recover nothing from it."""
    moments = [(at, mode) for at in range(1, 25) for mode in ("before", "half", "after")][::stride]
    for at, mode in moments:
        run.journal = Journal()
        run.live(name=f"{at}-{mode}", at=at, mode=mode)
        run.live(name=f"{at}-{mode}", steps=2)
        run.live(name=f"{at}-{mode}", steps=1)
    assert run.kills == len(moments)
    if stride == 1:
        assert {("open", call) for call in ("open", "mkdir", "write", "fsync", "replace")} <= set(run.deaths)


@pytest.mark.parametrize("stride", [23, pytest.param(1, marks=pytest.mark.slow)])
def test_a_call_of_the_system_that_fails(tmp_path: Path, stride: int) -> None:
    """The disk answers any one call with an error (a stand-in for a broken disk): the run ends or goes on, and the
    next life has everything."""
    journal = Journal()

    def say(what: str, **told: Any) -> None:
        journal.hear({"what": what, **told})

    with Trap(0, "before", bank_life.fail).set() as trap:
        life(tmp_path, say)
        first = trap.count
    ended = 0
    for at in range(1, 2 * first, stride):
        for mode in ("before", "half", "after"):
            with Trap(at, mode, bank_life.fail).set():
                try:
                    life(tmp_path, say)
                except (OSError, bank_life.BankError):
                    ended += 1
            life(tmp_path, say, steps=1)
            assert journal.broken == [], (at, mode)
    assert ended > first // stride
