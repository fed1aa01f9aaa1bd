"""Weights leave the model as a stream of bounded buckets, and reach a folder whole or not at all."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from areal_like.engines.base import PackedTensors, TensorPlace, WeightBucket
from areal_like.engines.megatron.bridges.base import Bridge
from areal_like.engines.megatron.fp8 import readable
from areal_like.engines.megatron.process_groups import ModelGroups
from areal_like.engines.megatron.values import export_value_head
from areal_like.engines.megatron.weight_copy import Copier, KernelCopier, PieceCopier
from areal_like.engines.megatron.weight_plan import (
    PlanError,
    PlannedBucket,
    WeightPlan,
    aligned,
    make_plan,
    why_unplanned,
)

__all__ = ["WeightStream", "save_hugging_face_folder", "stream_tensors", "write_folder"]

BUCKET_BYTES = 256 * 2**20
SHARD_BYTES = 4 * 2**30
_CPU = torch.device("cpu")
_FILES_TO_KEEP = ("*.json", "*.jinja", "*.txt", "*.model")


class WeightStream:
    """The weights of one rank's model as a stream, planned where they can be (`weight_plan`).

    Args:
        chunks: the model's, adapters in them or not.
        value: what a parameter is exported as where nothing is planned, from this rank's part of it.
        ready: asked before each bucket is filled; raises when the weights are not on the device.
    """

    def __init__(
        self,
        bridge: Bridge,
        chunks: list[torch.nn.Module],
        groups: ModelGroups,
        *,
        device: torch.device,
        has_adapters: bool = False,
        value: Callable[[torch.nn.Parameter], Tensor] = readable,
        ready: Callable[[], None] = lambda: None,
    ) -> None:
        self._bridge, self._chunks, self._groups, self._device = bridge, chunks, groups, device
        self._value, self._ready = value, ready
        self._plan: WeightPlan | None = None
        self._copy_pieces: Copier | None = None
        self._copy_on_device: Copier | None = None
        self._buckets: dict[int, list[PlannedBucket]] = {}
        self.why_unplanned = why_unplanned(groups.mesh, chunks, has_adapters=has_adapters)
        """Why the bridge exports tensor by tensor in each stream; None where a plan takes its place."""

    def buckets(self, *, on_device: bool = False, bucket_bytes: int = BUCKET_BYTES) -> Iterator[WeightBucket]:
        """See `engines.base.TrainEngine.weights`. A tensor larger than `bucket_bytes` has a bucket of its own."""
        if self.why_unplanned is None and self._groups.rank != 0:
            return  # every rank holds all of what rank 0 sends
        if self.why_unplanned is None and self._plan is None:
            self._make_plan()
        if self._plan is None:
            target = self._device if on_device else _CPU
            yield from stream_tensors(self._export, self._groups, bucket_bytes=bucket_bytes, target=target)
            return
        if bucket_bytes not in self._buckets:
            self._buckets[bucket_bytes] = self._plan.buckets(bucket_bytes)
        yield from self._planned(self._buckets[bucket_bytes], on_device)

    def _make_plan(self) -> None:
        started = time.monotonic()
        try:
            self._plan = make_plan(self._export_as, self._chunks)
        except PlanError as error:
            self.why_unplanned = str(error)
            print(f"weights: no plan, {error}", flush=True)
            return
        sources, tensors = self._plan.sources, self._plan.tensors
        self._copy_pieces = PieceCopier(sources)
        self._copy_on_device = KernelCopier(sources) if self._device.type == "cuda" else self._copy_pieces
        pieces = sum(len(pieces) for _, pieces in tensors)
        seconds = time.monotonic() - started
        print(f"weights: {len(tensors)} tensors planned as {pieces} copies, {seconds:.2f} s", flush=True)

    def _planned(self, buckets: list[PlannedBucket], on_device: bool) -> Iterator[WeightBucket]:
        """Two buffers: a bucket is being filled while the one before it is used."""
        to_host = self._device.type == "cuda" and not on_device
        copy, target = (self._copy_on_device, self._device) if on_device else (self._copy_pieces, _CPU)
        assert copy is not None
        buffers = [
            _buffer(max((b.nbytes for b in buckets[part::2]), default=0), target, pinned=to_host) for part in range(2)
        ]
        arrived = [torch.cuda.Event() for _ in range(2)] if to_host else []

        def fill(number: int) -> None:
            self._ready()
            copy(buckets[number], buffers[number % 2][: buckets[number].nbytes])
            if to_host:
                arrived[number % 2].record()

        for number, bucket in enumerate(buckets):
            if number == 0:
                fill(0)
            if number + 1 < len(buckets):
                fill(number + 1)
            if to_host:
                arrived[number % 2].synchronize()
            yield WeightBucket(PackedTensors(buffers[number % 2][: bucket.nbytes], bucket.layout))

    def _export(self) -> Iterator[tuple[str, Tensor]]:
        return self._export_as(self._value)

    def _export_as(self, value: Callable[[torch.nn.Parameter], Tensor]) -> Iterator[tuple[str, Tensor]]:
        yield from self._bridge.export(self._chunks, value)
        yield from export_value_head(self._chunks, value)


def stream_tensors(
    export: Callable[[], Iterator[tuple[str, Tensor]]],
    groups: ModelGroups,
    *,
    bucket_bytes: int = BUCKET_BYTES,
    target: torch.device = _CPU,
) -> Iterator[WeightBucket]:
    """What the stages export, tensor by tensor, on rank 0; other ranks yield nothing. Collective.

    Stage after stage: the ranks of a stage put their shards together, and one of them hands the buckets to rank 0
    through host memory. At no time does a rank hold more than one bucket beside its own weights.

    Args:
        export: whole tensors of this rank's stage, by name; called once, on every rank of the stage.
        target: where rank 0 gets them.
    """
    mesh, rank = groups.mesh, groups.rank
    mine = mesh.coordinates(rank).pp
    for stage in range(mesh.size("pp")):
        sender = mesh.rank(dp=0, tp=0, pp=stage, cp=0)
        if stage == mine:
            if rank not in (0, sender):
                for _ in export():  # its part in what the ranks of the stage do together
                    pass
                continue
            for bucket in _packed(export(), bucket_bytes, target if rank == 0 else _CPU):
                if rank == 0:
                    yield WeightBucket(bucket)
                else:
                    _send(bucket)
            if rank != 0:
                _send(None)
        elif rank == 0:
            buffer = torch.empty(0, dtype=torch.uint8)
            while (layout := _receive_layout(sender)) is not None:
                size = aligned(layout[-1].offset + layout[-1].nbytes)
                if size > buffer.numel():
                    buffer = torch.empty(size, dtype=torch.uint8)
                dist.recv(buffer[:size], src=sender)
                yield WeightBucket(PackedTensors(buffer[:size].to(target), layout))


def _packed(tensors: Iterator[tuple[str, Tensor]], limit: int, target: torch.device) -> Iterator[PackedTensors]:
    """Copies in one buffer, which each bucket overwrites."""
    buffer = torch.empty(0, dtype=torch.uint8)
    layout: list[TensorPlace] = []
    size = 0
    for name, tensor in tensors:
        place = TensorPlace(name, tuple(tensor.shape), tensor.dtype, size)
        if layout and size + place.nbytes > limit:
            yield _arrived(buffer[:size], layout)
            layout, size, place = [], 0, replace(place, offset=0)
        if size + place.nbytes > buffer.numel():  # at the beginning, or for a tensor that is larger than all before it
            buffer = _buffer(aligned(max(limit, place.nbytes)), target, pinned=tensor.is_cuda)
        layout.append(place)
        PackedTensors(buffer, [place])[name].copy_(tensor, non_blocking=True)
        size = aligned(size + place.nbytes)
    if layout:
        yield _arrived(buffer[:size], layout)


def _arrived(buffer: Tensor, layout: list[TensorPlace]) -> PackedTensors:
    if buffer.device.type == "cpu" and buffer.is_pinned():
        torch.cuda.current_stream().synchronize()
    return PackedTensors(buffer, layout)


def _buffer(size: int, device: torch.device, *, pinned: bool) -> Tensor:
    """uint8 `[size]`; `pinned` says of a buffer in host memory that a GPU writes into it."""
    return torch.empty(size, dtype=torch.uint8, device=device, pin_memory=pinned and device.type == "cpu")


def _send(bucket: PackedTensors | None) -> None:
    dist.send_object_list([bucket and bucket.layout], dst=0, device=_CPU)
    if bucket is not None:
        dist.send(bucket.buffer, dst=0)


def _receive_layout(sender: int) -> tuple[TensorPlace, ...] | None:
    box: list[Any] = [None]
    dist.recv_object_list(box, src=sender, device=_CPU)
    layout: tuple[TensorPlace, ...] | None = box[0]
    return layout


def save_hugging_face_folder(
    buckets: Iterator[WeightBucket],
    source: Path,
    target: Path,
    *,
    config: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
) -> None:
    """Write the stream as a Hugging Face folder, with the configuration and tokenizer files of `source`.

    `config` makes the model's `config.json` from that of `source`; None leaves it as it is.

    See `write_folder`: the folder appears whole or not at all.
    """
    write_folder(buckets, target, lambda folder: _write(buckets, source, folder, config))


def write_folder(buckets: Iterator[WeightBucket], target: Path, write: Callable[[Path], None]) -> None:
    """Have rank 0 write a folder out of a stream. Called on every rank.

    Everything goes into a temporary folder beside `target`, renamed at the end: a full disk or a killed process
    leaves nothing under the final name. An older folder of that name is replaced.

    Args:
        buckets: the stream; what `write` leaves of it is drained.
        write: takes the stream's buckets and writes files into the folder it is given.

    Raises:
        OSError: the folder could not be written. The stream is drained first, so that no other rank waits for ever.
    """
    writing = dist.get_rank() == 0
    failure: BaseException | None = None
    temporary: Path | None = None
    try:
        if writing:
            target.parent.mkdir(parents=True, exist_ok=True)
            temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
            temporary.chmod(0o755)
            write(temporary)
            _replace(temporary, target)
    except Exception as error:
        failure = error
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)
    for _ in buckets:
        pass
    if failure is not None:
        raise OSError(f"saving {target} failed and left nothing there: {failure}") from failure


def _write(
    buckets: Iterator[WeightBucket],
    source: Path,
    folder: Path,
    config: Callable[[dict[str, Any]], dict[str, Any]] | None,
) -> None:
    shards: list[tuple[str, list[str], int]] = []
    pending: dict[str, Tensor] = {}
    size = 0

    def flush() -> None:
        nonlocal pending, size
        file = f"model-{len(shards) + 1:05d}.safetensors"
        save_file(pending, folder / file, metadata={"format": "pt"})
        shards.append((file, list(pending), size))
        pending, size = {}, 0

    for bucket in buckets:
        for name, tensor in bucket.tensors.items():
            pending[name] = tensor.clone()  # the next bucket may overwrite it
            size += tensor.numel() * tensor.element_size()
        if size >= SHARD_BYTES:
            flush()
    if pending:
        flush()
    if len(shards) == 1:
        (folder / shards[0][0]).rename(folder / "model.safetensors")
    else:
        weight_map = {name: file for file, names, _ in shards for name in names}
        index = {"metadata": {"total_size": sum(s for _, _, s in shards)}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    for pattern in _FILES_TO_KEEP:
        for file in source.glob(pattern):
            if file.name != "model.safetensors.index.json":
                shutil.copyfile(file, folder / file.name)
    if config is not None:
        written = json.loads((source / "config.json").read_text(encoding="utf-8"))
        (folder / "config.json").write_text(json.dumps(config(written), indent=2))


def _replace(temporary: Path, target: Path) -> None:
    for file in temporary.iterdir():
        with file.open("rb") as handle:
            os.fsync(handle.fileno())
    if target.exists():
        old = Path(tempfile.mkdtemp(prefix=f".{target.name}.old.", dir=target.parent))
        target.rename(old / target.name)
        temporary.rename(target)
        shutil.rmtree(old)
    else:
        temporary.rename(target)
