"""`WorkerGroup`: an object in each of several processes of this machine, and calls to all of them at once.

A group is all or nothing. The first rank that fails ends it: its peers may be waiting for it in a collective operation
for ever, so they are killed and the driver raises what happened first. Only ranks that know nothing of each other (the
replicas of a rollout engine) may be declared independent: one that dies takes its own calls with it, and can be started
again.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import queue
import selectors
import shutil
import tempfile
import threading
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from areal_like.runtime.errors import Failure, WorkerError, describe_exit, to_exception
from areal_like.runtime.interrupt import InterruptFlag, interrupted
from areal_like.runtime.launch import RankProcess, RankSpec
from areal_like.runtime.pending import PendingCall, PendingStream
from areal_like.runtime.wire import Packet

__all__ = ["PendingCall", "WorkerError", "WorkerGroup", "interrupted"]

_GRACE = 0.5
"""Seconds in which failures of other ranks may still arrive, so that the first cause is known."""
_STREAM_CREDIT = 2
"""Items of a stream that a rank may have sent and the driver not yet taken."""

_open_groups: weakref.WeakSet[WorkerGroup] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for group in list(_open_groups):
        group.close(grace=0)


class WorkerGroup:
    """One process a rank, each holding an object; made by `start`."""

    def __init__(self, name: str, world_size: int, independent: bool = False) -> None:
        self.name = name
        self.world_size = world_size
        self.independent = independent
        self._folder = Path(tempfile.mkdtemp(prefix="areal-like-"))
        self._flag = InterruptFlag()
        self._ranks: list[RankProcess] = []
        self._pending: dict[int, PendingCall] = {}
        self._ids = itertools.count()
        self._lock = threading.RLock()
        self._failures: list[Failure] = []
        self._dead: dict[int, BaseException] = {}  # of independent ranks: why
        self._restarts: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
        self._error: BaseException | None = None
        self._closing = False
        self._launched: threading.Event = threading.Event()
        self._wake_up = threading.Event()

    @classmethod
    def start(
        cls,
        name: str,
        factory: str,
        kwargs: dict[str, Any],
        world_size: int,
        device: str = "cpu",
        threads: int = 1,
        gpu_offset: int = 0,
        *,
        log_dir: Path | None = None,
        environment: Mapping[str, str] | None = None,
        setup_timeout: float = 600.0,
        wait: bool = True,
        independent: bool = False,
    ) -> WorkerGroup:
        """Start the processes and build the object in each.

        Args:
            name: the role, for messages and log files.
            factory: `module:Class`, called as `Class(**kwargs)` in every rank.
            world_size: number of ranks.
            device: "cpu" or "cuda" (one GPU a rank, from `gpu_offset` on).
            threads: computing threads of each rank.
            environment: variables that libraries read when a process starts, beside those of the group's own.
            log_dir: where the output of each rank is kept as `NAME-RANK.log`; by default it goes with the group.
            setup_timeout: seconds until every rank must have built its object.
            wait: return when all objects are built; else at once, and calls wait in line behind the building, so that
                several groups can start beside each other.
            independent: the ranks do not need each other: when the process of one dies, calls to that rank raise a
                WorkerError and the others go on, until `restart`. An exception of the object still ends the group.

        Raises:
            WorkerError: a rank failed or died.
            DiagnosticError: a rank found an error of the user.
            TimeoutError: `setup_timeout` passed.
        """
        group = cls(name, world_size, independent)
        init_method = (group._folder / "rendezvous").as_uri()
        if log_dir is not None:
            log_dir.mkdir(parents=True, exist_ok=True)
        specs = [
            RankSpec(
                name,
                rank,
                world_size,
                device,
                threads,
                gpu_offset,
                init_method,
                (log_dir or group._folder) / f"{name}-{rank}.log",
                environment or {},
            )
            for rank in range(world_size)
        ]
        _open_groups.add(group)
        try:
            ready = PendingCall(name, "setup", list(range(world_size)), group._fail)
            group._pending[next(group._ids)] = ready  # number 0: the answer to "setup"
            setup = (name, factory, kwargs, device, threads)
            threading.Thread(target=group._listen, args=(specs, setup), name=f"{name}-listener", daemon=True).start()
            group._launched.wait()
            if wait:
                ready.result(setup_timeout)
        except BaseException:
            group.close(grace=0)
            raise
        return group

    # Calls

    def call(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call the method on every rank with the same arguments; the results by rank, or `result`'s errors."""
        return self.submit(method, *args, **kwargs).result()

    def call_each(self, method: str, per_rank: Sequence[tuple[Any, ...]], **kwargs: Any) -> list[Any]:
        """Call the method on every rank, rank `i` with the positional arguments `per_rank[i]`."""
        return self.submit_each(method, per_rank, **kwargs).result()

    def submit(self, method: str, *args: Any, **kwargs: Any) -> PendingCall:
        """`call`, without waiting for it."""
        return self.submit_to(range(self.world_size), method, *args, **kwargs)

    def submit_to(self, ranks: Iterable[int], method: str, *args: Any, **kwargs: Any) -> PendingCall:
        """Call the method on some ranks with the same arguments, which are packed once, without waiting."""
        pending = PendingCall(self.name, method, list(ranks), self._fail)
        with contextlib.closing(Packet(("call", self._register(pending), method, args, kwargs))) as packet:
            for rank in pending.ranks:
                self._send(rank, packet)
        return pending

    def submit_each(self, method: str, per_rank: Sequence[tuple[Any, ...]], **kwargs: Any) -> PendingCall:
        """`call_each`, without waiting for it."""
        if len(per_rank) != self.world_size:
            raise ValueError(f"{self.name} has {self.world_size} ranks; got arguments for {len(per_rank)}")
        pending = PendingCall(self.name, method, list(range(self.world_size)), self._fail)
        call = self._register(pending)
        for rank, args in enumerate(per_rank):
            self._send(rank, ("call", call, method, tuple(args), kwargs))
        return pending

    def submit_one(self, rank: int, method: str, *args: Any, **kwargs: Any) -> PendingCall:
        """Call the method on one rank alone, without waiting; `result()` is a list of one."""
        pending = PendingCall(self.name, method, [rank], self._fail)
        self._send(rank, ("call", self._register(pending), method, args, kwargs))
        return pending

    def stream(self, method: str, *args: Any, **kwargs: Any) -> Iterator[Any]:
        """Run a generator method on every rank; what any rank yields arrives here, with at most two items under way a
        rank. Leaving early lets the generators run to their end."""
        call = next(self._ids)
        pending = PendingStream(
            self.name,
            method,
            list(range(self.world_size)),
            self._fail,
            lambda kind, rank: self._send(rank, (kind, call)),
        )
        self._register(pending, call)
        with contextlib.closing(Packet(("stream", call, method, _STREAM_CREDIT, args, kwargs))) as packet:
            self._send_all(packet)
        return iter(pending)

    def interrupt(self, rank: int | None = None) -> None:
        """Make `interrupted()` True in every rank, or in one, until `clear_interrupt` with the same argument."""
        self._flag.set(rank)

    def clear_interrupt(self, rank: int | None = None) -> None:
        self._flag.clear(rank)

    def is_dead(self, rank: int) -> bool:
        """Whether the process of an independent rank has died and has not been started again."""
        return rank in self._dead

    def kill(self, rank: int) -> None:
        """End the process of a rank at once, as if it had died by itself."""
        self._ranks[rank].kill()

    def restart(self, rank: int) -> PendingCall:
        """Start the process of a dead independent rank again and build its object anew, as `start` did; done when it is
        built. Its output goes to a log of its own, `NAME-RANK.N.log`."""
        pending = PendingCall(self.name, "setup", [rank], self._fail)
        with self._lock:
            if self._error is not None:
                raise self._error
            if rank not in self._dead:
                raise RuntimeError(
                    f"{self.name} rank {rank} is not dead: only a dead independent rank can be restarted"
                )
            call = next(self._ids)
            self._pending[call] = pending
        self._restarts.put((rank, call))
        return pending

    @property
    def process_ids(self) -> list[int]:
        return [rank.process.pid for rank in self._ranks]

    def close(self, grace: float = 5.0) -> None:
        """Ask the ranks to end; kill those that still run after `grace` seconds. Safe to call twice."""
        with self._lock:
            if self._closing:
                return
            self._closing = True
        self._launched.wait(timeout=60.0)
        if grace > 0 and self._error is None:
            for rank in self._ranks:
                with contextlib.suppress(OSError):
                    rank.channel.send(("close",))
            deadline = time.monotonic() + grace
            for rank in self._ranks:
                rank.wait(max(0.0, deadline - time.monotonic()))
        for rank in self._ranks:
            rank.kill()
        self._fail(WorkerError(f"{self.name} is closed", group=self.name, rank=0, method="close"))
        self._wake_up.set()
        _open_groups.discard(self)
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> WorkerGroup:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(grace=5.0 if kind is None else 0.0)

    # Sending

    def _register(self, pending: PendingCall, call: int | None = None) -> int:
        with self._lock:
            if self._error is not None:
                raise self._error
            for rank in pending.ranks:
                if rank in self._dead:
                    raise self._dead[rank]
            call = next(self._ids) if call is None else call
            self._pending[call] = pending
            return call

    def _send_all(self, message: Any) -> None:
        for rank in range(self.world_size):
            self._send(rank, message)

    def _send(self, rank: int, message: Any) -> None:
        # A rank that is gone is the listener's to report; the pending call fails with its report.
        with contextlib.suppress(OSError):
            self._ranks[rank].channel.send(message)

    # The listener thread

    def _listen(self, specs: list[RankSpec], setup: tuple[Any, ...]) -> None:
        """Start the ranks and read what they say.

        The ranks are children of this thread, which lives as long as the group: on Linux a child asks to be killed when
        the *thread* that started it ends.
        """
        try:
            with contextlib.closing(Packet(("setup", 0, *setup))) as packet:
                for spec in specs:
                    self._ranks.append(RankProcess(spec, self._flag.descriptor))
                self._send_all(packet)
        except BaseException as error:
            self._fail(error)
        finally:
            self._launched.set()
        with selectors.DefaultSelector() as selector:
            for rank, process in enumerate(self._ranks):
                selector.register(process.channel, selectors.EVENT_READ, rank)
            self._read_until_closed(selector, setup)
        for process in self._ranks:
            process.release()
        self._flag.close()

    def _read_until_closed(self, selector: selectors.BaseSelector, setup: tuple[Any, ...]) -> None:
        deadline: float | None = None
        while not self._wake_up.is_set():
            while not self._restarts.empty():
                self._start_again(*self._restarts.get(), setup, selector)
            for key, _ in selector.select(timeout=0.2):
                if not self._read(key.data):
                    selector.unregister(key.fileobj)
            if self._failures and not self._closing and self._error is None:
                deadline = deadline or time.monotonic() + _GRACE
                if time.monotonic() >= deadline or len(self._failures) == self.world_size:
                    self._fail(to_exception(self.name, self._failures))

    def _start_again(self, rank: int, call: int, setup: tuple[Any, ...], selector: selectors.BaseSelector) -> None:
        old = self._ranks[rank]
        number = next(n for n in itertools.count(1) if not _restart_log(old.spec, n).exists())
        try:
            process = RankProcess(replace(old.spec, log=_restart_log(old.spec, number)), self._flag.descriptor)
        except BaseException as error:
            self._fail(error)
            return
        old.release()
        self._ranks[rank] = process
        selector.register(process.channel, selectors.EVENT_READ, rank)
        self._send(rank, ("setup", call, *setup))
        with self._lock:
            del self._dead[rank]  # from now on calls wait in line behind the setup

    def _read(self, rank: int) -> bool:
        """One message of a rank; False when there will be no more."""
        try:
            message = self._ranks[rank].channel.recv()
        except (EOFError, OSError):
            self._note_death(rank)
            return False
        except Exception as error:
            self._failures.append(Failure(rank, "answer", time.monotonic(), f"the answer cannot be read: {error!r}"))
            return True
        if message[0] == "error":
            _, _, method, when, text, remote, exception = message
            self._failures.append(Failure(rank, method, when, text, remote, exception=exception))
            return True
        kind, call, value = message
        with self._lock:
            pending = self._pending.get(call)
        if pending is None:
            return True
        if kind == "item":
            assert isinstance(pending, PendingStream)
            pending.put(rank, value)
        elif pending.answer(rank, value):
            with self._lock:
                self._pending.pop(call, None)
        return True

    def _note_death(self, rank: int) -> None:
        if self._closing or self._error is not None:
            return
        process = self._ranks[rank]
        code = process.wait(timeout=5.0)
        code = code if code is not None else 0
        with self._lock:
            busy = [pending.method for pending in self._pending.values() if rank in pending.ranks]
        tail = process.tail()
        failure = Failure(
            rank,
            busy[0] if busy else "between calls",
            time.monotonic(),
            f"the process {describe_exit(code)}",
            remote_traceback=f"Its last lines:\n{tail}" if tail else "",
            exit_code=code,
        )
        if self.independent:
            self._lose(rank, to_exception(self.name, [failure]))
        else:
            self._failures.append(failure)

    def _lose(self, rank: int, error: BaseException) -> None:
        """An independent rank is gone: its calls raise, now and until it is started again."""
        with self._lock:
            self._dead[rank] = error
            for call, pending in list(self._pending.items()):
                if rank in pending.ranks and pending.lose(rank, error):
                    del self._pending[call]

    def _fail(self, error: BaseException) -> None:
        """End the group for a reason: everything that is waited for, now or later, raises it."""
        with self._lock:
            if self._error is None:
                self._error = error
            pending, self._pending = self._pending, {}
        for rank in self._ranks:
            rank.kill()
        for call in pending.values():
            call.fail(self._error)


def _restart_log(spec: RankSpec, number: int) -> Path:
    return spec.log.with_name(f"{spec.name}-{spec.rank}.{number}.log")
