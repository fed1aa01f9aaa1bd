"""The processes of a run: all engines of a process share one default process group."""

from __future__ import annotations

import datetime
import os

import torch.distributed as dist

__all__ = ["join_world", "leave_world"]

_engines = 0
_started_here = False


def join_world(device: str) -> None:
    """Start the default process group, unless another engine (or the caller) has; each call is matched by a leave.

    RANK and WORLD_SIZE say which process this is, AREAL_LIKE_INIT_METHOD where they meet (default `env://`).
    """
    global _engines, _started_here
    _engines += 1
    if dist.is_initialized():
        return
    method = os.environ.get("AREAL_LIKE_INIT_METHOD", "env://")
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    backend = "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl"
    # Generous: the first collective waits for every rank to read its part of the checkpoint.
    timeout = datetime.timedelta(minutes=30)
    dist.init_process_group(backend, init_method=method, rank=rank, world_size=size, timeout=timeout)
    _started_here = True


def leave_world() -> None:
    """End the default process group when the last engine leaves; one that the caller started stays."""
    global _engines, _started_here
    _engines -= 1
    if _engines == 0 and _started_here and dist.is_initialized():
        dist.destroy_process_group()
        _started_here = False
