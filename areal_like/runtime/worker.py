"""The process of one rank: build the object that it hosts, then do what the driver asks until it goes away."""

from __future__ import annotations

import ctypes
import faulthandler
import importlib
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Iterator
from typing import Any, NoReturn

from areal_like.alloc import DiagnosticError
from areal_like.runtime.interrupt import InterruptFlag, install
from areal_like.runtime.wire import Channel, Packet

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15


def main(channel: int, lifeline: int, interrupt: int) -> NoReturn:
    """Run the rank; the arguments are inherited file descriptors. Never returns."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the driver decides when to stop
    faulthandler.enable()
    _die_with_driver(lifeline)
    install(InterruptFlag(interrupt), int(os.environ["RANK"]))
    worker = Worker(Channel(socket.socket(fileno=channel)))
    try:
        worker.run()
    except (EOFError, OSError):  # the driver is gone
        os._exit(1)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # no interpreter shutdown: communication libraries hang in it when a peer is gone


def _die_with_driver(lifeline: int) -> None:
    """The kernel kills this process when the driver dies; where it cannot, the closed end of a pipe says so."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

    def watch() -> None:
        while os.read(lifeline, 1):
            pass
        os.killpg(os.getpgrp(), signal.SIGKILL)

    threading.Thread(target=watch, name="lifeline", daemon=True).start()


def resolve(path: str) -> Any:
    """The object that `module:name` means.

    Raises:
        ValueError: the path has no colon or the module has no such name.
    """
    module, colon, name = path.partition(":")
    if not colon:
        raise ValueError(f"{path!r} is not of the form module:name")
    try:
        return getattr(importlib.import_module(module), name)
    except AttributeError:
        raise ValueError(f"module {module!r} has no {name!r}") from None


class Worker:
    """Hosts one object and answers messages in their order."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._waiting: deque[tuple[Any, ...]] = deque()
        self._target: Any = None

    def run(self) -> None:
        while True:
            message = self._waiting.popleft() if self._waiting else self._receive()
            kind = message[0]
            if kind == "close":
                self._close()
                return
            if kind == "setup":
                self._guard(message[1], "setup", self._setup, *message[1:])
            elif kind == "call":
                self._guard(message[1], message[2], self._call, *message[1:])
            elif kind == "stream":
                self._guard(message[1], message[2], self._stream, *message[1:])

    def _receive(self) -> tuple[Any, ...]:
        """The next message; one that cannot be read (a class that this process cannot import) is reported."""
        while True:
            try:
                message: tuple[Any, ...] = self._channel.recv()
                return message
            except (EOFError, OSError):
                raise
            except Exception as error:
                self._report(None, "receive", error)

    def _guard(self, call: int, method: str, action: Any, *args: Any) -> None:
        try:
            action(*args)
        except (BrokenPipeError, ConnectionResetError):
            raise
        except BaseException as error:
            self._report(call, method, error)

    def _report(self, call: int | None, method: str, error: BaseException) -> None:
        when = time.monotonic()
        text = "".join(traceback.format_exception(error))
        message = f"{type(error).__name__}: {error}"
        exception = error if isinstance(error, DiagnosticError) else None
        self._channel.send(("error", call, method, when, message, text, exception))

    def _setup(self, call: int, name: str, factory: str, kwargs: dict[str, Any], device: str, threads: int) -> None:
        import torch

        rank = int(os.environ["RANK"])
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(_PR_SET_NAME, f"{name}-{rank}".encode()[:15])
        torch.set_num_threads(threads)
        if device == "cuda":
            local_rank = int(os.environ["LOCAL_RANK"])
            if local_rank >= torch.cuda.device_count():
                raise RuntimeError(
                    f"{name} rank {rank} needs GPU {local_rank} of its group; there are {torch.cuda.device_count()}"
                )
            torch.cuda.set_device(local_rank)
        self._target = resolve(factory)(**kwargs)
        self._channel.send(("result", call, None))

    def _call(self, call: int, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        value = getattr(self._target, method)(*args, **kwargs)
        self._channel.send(("result", call, value))

    def _stream(self, call: int, method: str, credit: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Send what the generator yields while the driver grants credit.

        When the driver loses interest the generator still runs to its end, unsent: it may be a collective whose other
        ranks wait for this one.
        """
        items: Iterator[Any] = getattr(self._target, method)(*args, **kwargs)
        wanted = True
        for item in items:
            while wanted and credit == 0:
                message = self._receive()
                if message[:2] == ("credit", call):
                    credit += 1
                elif message[:2] == ("drain", call):
                    wanted = False
                else:
                    self._waiting.append(message)
            if wanted:
                self._channel.send(Packet(("item", call, item)))
                credit -= 1
        self._channel.send(("result", call, None))

    def _close(self) -> None:
        close = getattr(self._target, "close", None)
        if close is not None:
            close()
