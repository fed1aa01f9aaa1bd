"""What the tests of the worker group put into its processes."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from areal_like.runtime.local import interrupted


class Host:
    def __init__(self, greeting: str = "hello", fail_on: int | None = None, hang_on: int | None = None) -> None:
        self.rank = int(os.environ["RANK"])
        self.greeting = greeting
        self.seen: list[int] = []
        if fail_on == self.rank:
            raise KeyError("no such part")
        if hang_on == self.rank:
            time.sleep(3600)

    def hello(self, *args, **kwargs):
        return (self.greeting, self.rank, args, kwargs)

    def environment(self, *names):
        return [os.environ.get(name) for name in names] + [torch.get_num_threads()]

    def join(self):
        dist.init_process_group(
            "gloo",
            init_method=os.environ["AREAL_LIKE_INIT_METHOD"],
            rank=self.rank,
            world_size=int(os.environ["WORLD_SIZE"]),
        )

    def total(self, value):
        tensor = torch.tensor(float(value))
        dist.all_reduce(tensor)
        return float(tensor)

    def total_or_fail(self, fail_on):
        if self.rank == fail_on:
            raise ArithmeticError("the sum is wrong")
        return self.total(1)

    def total_or_die(self, die_on, signal_number):
        if self.rank == die_on:
            print("about to go away", file=sys.stderr, flush=True)
            os.kill(os.getpid(), signal_number)
        return self.total(1)

    def leave(self, status):
        print("leaving early", file=sys.stderr, flush=True)
        os._exit(status)

    def listening(self):
        """Local addresses of this process's listening TCP sockets, as /proc/net/tcp prints them."""
        mine = set()
        for entry in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                mine.add(os.readlink(f"/proc/self/fd/{entry}"))
        rows = [
            line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]
        ]
        return [row[1] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in mine]

    def echo(self, value):
        return value

    def double(self, tensors):
        return {name: tensor.mul_(2) for name, tensor in tensors.items()}

    def count(self, n, only=None):
        for i in range(n):
            self.seen.append(i)
            if only is None or only == self.rank:
                yield (self.rank, i)

    def count_and_fail(self, n):
        yield from self.count(n)
        raise OSError("the source ran dry")

    def seen_so_far(self):
        return list(self.seen)

    def sleep(self, seconds):
        time.sleep(seconds)

    def until_interrupted(self):
        started = time.monotonic()
        while not interrupted():
            if time.monotonic() - started > 20:
                return "never"
            time.sleep(0.01)
        return "interrupted"

    def child(self):
        return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"]).pid

    def refuse(self):
        from areal_like.alloc import Diagnostic, DiagnosticError

        raise DiagnosticError([Diagnostic(code="AL301", severity="error", message="9 heads do not divide by 2")])

    def unsendable(self):
        return lambda: None

    def close(self):
        if dist.is_initialized():
            dist.destroy_process_group()
