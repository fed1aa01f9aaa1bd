"""Starting the process of one rank."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from areal_like.runtime.wire import Channel

_BOOT = (
    "import json, sys; a = json.loads(sys.argv[1]); sys.path[:] = a['path']; "
    "from areal_like.runtime.worker import main; main(a['channel'], a['lifeline'], a['interrupt'])"
)
_TAIL_LINES = 20


@dataclass(frozen=True)
class RankSpec:
    """Where and how one rank runs."""

    name: str
    rank: int
    world_size: int
    device: str
    threads: int
    gpu_offset: int
    init_method: str
    log: Path
    environment: Mapping[str, str] = field(default_factory=dict)


def rank_environment(spec: RankSpec) -> dict[str, str]:
    """The environment of a rank: its place in the group, threads, GPUs, and loopback as the only network."""
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    environment = dict(
        os.environ,
        RANK=str(spec.rank),
        LOCAL_RANK=str(spec.rank),
        WORLD_SIZE=str(spec.world_size),
        LOCAL_WORLD_SIZE=str(spec.world_size),
        AREAL_LIKE_INIT_METHOD=spec.init_method,
        GLOO_SOCKET_IFNAME=loopback,
        NCCL_SOCKET_IFNAME=loopback,
        OMP_NUM_THREADS=str(spec.threads),
        TOKENIZERS_PARALLELISM="false",
        CUDA_VISIBLE_DEVICES=visible_gpus(spec) if spec.device == "cuda" else "",
    )
    for stale in ("MASTER_ADDR", "MASTER_PORT"):
        environment.pop(stale, None)
    return environment | dict(spec.environment)


def visible_gpus(spec: RankSpec) -> str:
    """The GPUs of the group, in order, out of those that the driver may use; a rank takes number LOCAL_RANK of them.

    Raises:
        ValueError: fewer GPUs are visible than `gpu_offset + world_size`.
    """
    needed = spec.gpu_offset + spec.world_size
    allowed = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [str(i) for i in range(needed)] if allowed is None else [x for x in allowed.split(",") if x.strip()]
    if len(names) < needed:
        raise ValueError(
            f"{spec.name} needs GPUs {spec.gpu_offset} to {needed - 1}, "
            f"but CUDA_VISIBLE_DEVICES={allowed} has {len(names)}"
        )
    return ",".join(names[spec.gpu_offset : needed])


class RankProcess:
    """A started rank as the driver sees it: the process, the channel to it, and what it wrote."""

    def __init__(self, spec: RankSpec, interrupt_descriptor: int) -> None:
        self.spec = spec
        ours, theirs = socket.socketpair()
        lifeline_read, self._lifeline = os.pipe()
        self.channel = Channel(ours)
        arguments = {
            "path": [str(Path(entry or ".").absolute()) for entry in sys.path],
            "channel": theirs.fileno(),
            "lifeline": lifeline_read,
            "interrupt": interrupt_descriptor,
        }
        try:
            with spec.log.open("wb") as log:
                # A session of its own: Ctrl-C at the terminal reaches the driver alone, and a rank can be ended with
                # whatever it started.
                self.process = subprocess.Popen(
                    [sys.executable, "-c", _BOOT, json.dumps(arguments)],
                    env=rank_environment(spec),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=(theirs.fileno(), lifeline_read, interrupt_descriptor),
                    start_new_session=True,
                )
        except BaseException:
            self.channel.close()
            os.close(self._lifeline)
            raise
        finally:
            theirs.close()
            os.close(lifeline_read)

    def tail(self) -> str:
        """The last lines that the rank wrote."""
        text = self.spec.log.read_text(errors="replace") if self.spec.log.exists() else ""
        return "\n".join(text.splitlines()[-_TAIL_LINES:])

    def wait(self, timeout: float) -> int | None:
        """The exit status, or None when the process still runs after `timeout` seconds."""
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            return None

    def kill(self) -> None:
        """End the rank and everything that it started, at once."""
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def release(self) -> None:
        """Close what the driver holds, after the process has ended."""
        self.channel.close()
        os.close(self._lifeline)
