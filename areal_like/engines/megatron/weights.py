"""Weights leave the model as a stream of bounded buckets, and reach a folder whole or not at all."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from areal_like.engines.base import WeightBucket
from areal_like.engines.megatron.bridges.base import Bridge
from areal_like.engines.megatron.fp8 import readable
from areal_like.engines.megatron.process_groups import ModelGroups
from areal_like.engines.megatron.values import export_value_head

__all__ = ["save_hugging_face_folder", "stream_tensors", "stream_weights", "write_folder"]

BUCKET_BYTES = 256 * 2**20
SHARD_BYTES = 4 * 2**30
_FILES_TO_KEEP = ("*.json", "*.jinja", "*.txt", "*.model")


def stream_weights(
    bridge: Bridge,
    chunks: list[torch.nn.Module],
    groups: ModelGroups,
    *,
    value: Callable[[torch.nn.Parameter], Tensor] = readable,
    bucket_bytes: int = BUCKET_BYTES,
) -> Iterator[WeightBucket]:
    """All weights under their Hugging Face names; see `stream_tensors`.

    Args:
        value: what a parameter is exported as, from this rank's part of it.
    """

    def export() -> Iterator[tuple[str, Tensor]]:
        yield from bridge.export(chunks, value)
        yield from export_value_head(chunks)

    return stream_tensors(export, groups, bucket_bytes=bucket_bytes)


def stream_tensors(
    export: Callable[[], Iterator[tuple[str, Tensor]]], groups: ModelGroups, *, bucket_bytes: int = BUCKET_BYTES
) -> Iterator[WeightBucket]:
    """What the stages export, on the CPU, on rank 0; other ranks yield nothing. Collective.

    Stage after stage: the ranks of a stage put their shards together, and one of them hands the buckets to rank 0. At
    no time does a rank hold more than one bucket beside its own weights.

    Args:
        export: whole tensors of this rank's stage, by name; called once, on every rank of the stage.
    """
    mesh, rank = groups.mesh, groups.rank
    mine = mesh.coordinates(rank).pp
    for stage in range(mesh.size("pp")):
        sender = mesh.rank(dp=0, tp=0, pp=stage, cp=0)
        if stage == mine:
            for bucket in _buckets(export(), bucket_bytes, keep=rank == sender):
                if rank == 0:
                    yield WeightBucket(bucket)
                elif rank == sender:
                    _send(bucket)
            if rank == sender and rank != 0:
                _send(None)
        elif rank == 0:
            while (received := _receive(sender)) is not None:
                yield WeightBucket(received)


def _buckets(tensors: Iterator[tuple[str, Tensor]], limit: int, *, keep: bool) -> Iterator[dict[str, Tensor]]:
    bucket: dict[str, Tensor] = {}
    size = 0
    for name, tensor in tensors:
        nbytes = tensor.numel() * tensor.element_size()
        if bucket and size + nbytes > limit:
            yield bucket
            bucket, size = {}, 0
        # A copy: the receiver may keep it while the optimizer changes the parameter.
        bucket[name] = tensor.to("cpu", copy=True).contiguous() if keep else tensor.new_empty(0)
        size += nbytes
    if bucket:
        yield bucket


def _send(bucket: dict[str, Tensor] | None) -> None:
    header = None if bucket is None else [(name, list(t.shape), t.dtype) for name, t in bucket.items()]
    dist.send_object_list([header], dst=0, device=torch.device("cpu"))
    for tensor in (bucket or {}).values():
        dist.send(tensor.view(torch.uint8) if tensor.ndim else tensor.reshape(1).view(torch.uint8), dst=0)


def _receive(sender: int) -> dict[str, Tensor] | None:
    box: list[Any] = [None]
    dist.recv_object_list(box, src=sender, device=torch.device("cpu"))
    if box[0] is None:
        return None
    bucket = {}
    for name, shape, dtype in box[0]:
        tensor = torch.empty(shape, dtype=dtype)
        dist.recv(tensor.view(torch.uint8) if tensor.ndim else tensor.reshape(1).view(torch.uint8), src=sender)
        bucket[name] = tensor
    return bucket


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
            pending[name] = tensor
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
