"""Megatron-Core's `torch_dist` files, written at once or by a thread beside the training.

A folder is written under a temporary name. Only when every rank has written its files does rank 0 add the metadata and
the manifest and rename it, so that a folder under its own name is whole. When any rank fails all of them raise, with
the same message, and nothing is left.

Megatron-Core's own callers of an asynchronous save are not used: the persistent one needs CUDA, the other one forks a
process that holds CUDA contexts and threads. A thread ends with its process and needs neither.
"""

from __future__ import annotations

import queue
import shutil
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedStateDict, ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

from areal_like.spec.checkpoint import sync_folder

__all__ = ["Writing", "agree"]

# Two needs of Megatron-Core's writer that are none: a process that holds a queue of results, which are returned here,
# and psutil, for a debug message about memory.
filesystem_async._results_queue = queue.Queue()
filesystem_async._process_memory = lambda: 0


class _Strategy(TorchDistSaveShardedStrategy):
    """Plans what each rank writes, and leaves writing and finishing to `Writing`.

    Megatron-Core's own way of finishing lets the other ranks wait for ever when rank 0 cannot write the metadata.
    """

    writer: Any = None
    metadata: Any = None

    def _get_save_and_finalize_callbacks(self, writer: Any, planned: Any, async_strategy: str) -> AsyncRequest:
        self.writer, (_, self.metadata, _) = writer, planned
        return AsyncRequest(None, (), [])


class Writing:
    """One checkpoint on its way to disk. Every rank makes one and calls `finish`.

    Args:
        folder: where it appears.
        state: shards of all ranks; changed by Megatron-Core.
        beside: return as soon as the values are copied into host memory, and write in a thread.

    Raises:
        OSError: the folder cannot be made.
    """

    def __init__(self, folder: Path, state: ShardedStateDict, *, beside: bool) -> None:
        self.folder = folder
        self.temporary = folder.with_name(f".{folder.name}.partial")
        self._results: list[Any] | str = []
        self._thread: threading.Thread | None = None
        agree(f"writing the checkpoint {folder}", self._make_folder if dist.get_rank() == 0 else None)
        if beside:
            _copy_to_host(state)
        self._strategy = _Strategy(thread_count=1)
        dist_checkpointing.save(
            state, str(self.temporary), self._strategy, async_sharded_save=True, async_strategy="mcore"
        )
        writer = self._strategy.writer
        buckets = writer.preload_tensors(writer.write_buckets, torch.cuda.is_available())
        if beside:
            self._thread = threading.Thread(target=self._write, args=(buckets,), name="checkpoint", daemon=True)
            self._thread.start()
        else:
            self._write(buckets)

    @property
    def written(self) -> bool:
        """Whether this rank has written its files."""
        return self._thread is None or not self._thread.is_alive()

    def finish(self, describe: Callable[[Path], None]) -> None:
        """Wait for all ranks, and let the folder appear.

        Args:
            describe: called on rank 0 with the complete folder under its temporary name; writes the manifest.

        Raises:
            OSError: it could not be written, on every rank, whichever failed.
        """
        if self._thread is not None:
            self._thread.join()
        first = dist.get_rank() == 0
        gathered: list[Any] | None = [None] * dist.get_world_size() if first else None
        dist.gather_object(self._results, gathered)
        complete = partial(self._complete, gathered or [], describe) if first else None
        try:
            agree(f"writing the checkpoint {self.folder}", complete)
        finally:
            if first:
                shutil.rmtree(self.temporary, ignore_errors=True)  # there is none, unless it failed

    def _make_folder(self) -> None:
        shutil.rmtree(self.temporary, ignore_errors=True)  # of a run that was killed
        self.temporary.mkdir(parents=True)

    def _write(self, buckets: list[Any]) -> None:
        writer = self._strategy.writer
        results: list[Any] = []
        for number, bucket in enumerate(buckets):
            _, found = writer.write_preloaded_data(
                [writer.transforms], number, bucket, results_queue=None, count_queue=None, use_fsync=True
            )
            if isinstance(found, BaseException):
                self._results = _in_words(found)
                return
            results += found
        self._results = results

    def _complete(self, results: list[Any], describe: Callable[[Path], None]) -> None:
        failed: dict[str, list[int]] = {}
        for rank, result in enumerate(results):
            if isinstance(result, str):
                failed.setdefault(result, []).append(rank)
        if failed:
            raise OSError("; ".join(f"{error} (rank {', '.join(map(str, on))})" for error, on in failed.items()))
        self._strategy.writer.finish(self._strategy.metadata, results)
        save_config(CheckpointingConfig(self._strategy.backend, self._strategy.version), str(self.temporary))
        describe(self.temporary)
        if self.folder.exists():
            shutil.rmtree(self.folder)
        self.temporary.rename(self.folder)
        sync_folder(self.folder.parent)


def agree(doing: str, action: Callable[[], Any] | None = None) -> None:
    """Run `action` where there is one, then let every rank know how it went. Collective.

    Raises:
        OSError: on every rank, when it failed on any.
    """
    error: str | None = None
    cause: BaseException | None = None
    try:
        if action is not None:
            action()
    except Exception as problem:
        cause = problem
        error = _in_words(problem)
    errors: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(errors, error)
    told = next((e for e in errors if e is not None), None)
    if told is not None:
        raise OSError(f"{doing} failed: {told}") from cause


def _in_words(error: BaseException) -> str:
    """What went wrong. torch.save says of a full disk that a position is unexpected: the system's error lies below."""
    below: BaseException | None = error
    while below is not None:
        if isinstance(below, OSError):
            return str(below)
        below = below.__cause__ or below.__context__
    return f"{type(error).__name__}: {error}"


def _copy_to_host(state: ShardedStateDict) -> None:
    """Training goes on while the values are written: they have to be copies."""
    for shard in nested_values(state):
        if isinstance(shard, ShardedTensor | ShardedTensorFactory) and shard.data is not None:
            shard.data = shard.data.detach().to("cpu", copy=True)
