"""The stream of weights beside plain copies of as many bytes, in one run.

    python benchmarks/weights.py [--model dense|moe] [--bridge mbridge] [--repeat 15] [--json FILE]      # on a GPU
    python benchmarks/weights.py --device cpu --tiny

A random model of Qwen2.5-1.5B's shape (dense) or of 8 layers of Qwen3-30B-A3B's (moe), in the engine with its gradient
buffers and optimizer. Rows, all of them the median of `--repeat` runs that alternate with the copy they stand beside:

    device        engine.weights(on_device=True): Hugging Face tensors in buckets in memory of the same GPU
    and views     the same, and every tensor of each bucket asked for
    tensors       the bridge's export into the same buckets, tensor by tensor (where nothing is planned)
    AReaL         the bridge's export, each tensor copied into memory of its own, held until a bucket is full
    foreach       torch._foreach_copy_ of the planned pieces of a bucket, their views made beforehand
    graph         the planned copies of all buckets as a CUDA graph, replayed
    copy          one copy_ of as many bytes to memory of the same GPU
    host          engine.weights(): the same tensors in buckets of pinned host memory
    host AReaL    the bridge's export, each tensor copied to host memory of its own
    host copy     plain copies of as many bytes into pinned host memory, a bucket at a time

`share` is a row's speed over that of the plain copy. Exits with 1 when the device stream has less than 0.8 of it on a
GPU, or when any tensor of it is not, bit for bit, what the bridge exports. On a CPU the rows foreach and graph are left
out, and host memory is the only kind.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

TARGET = 0.8
TINY = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 1000,
}
TINY_EXPERTS = {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("dense", "moe"), default="dense")
    parser.add_argument("--bridge", choices=("mbridge", "megatron-bridge"), default="mbridge")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a model of some thousand parameters")
    parser.add_argument("--repeat", type=int, default=15)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    with tempfile.TemporaryDirectory() as folder:
        found = measure(arguments, Path(folder))
    print("\n".join(table(found)))
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=2))
    fast = arguments.device == "cpu" or found["rows"]["device"]["share"] >= TARGET
    return 0 if fast and not found["differing"] else 1


def shape(a: argparse.Namespace) -> dict[str, Any]:
    from train_step import COMMON, SHAPES

    return {
        **COMMON,
        **SHAPES[a.model],
        **(TINY if a.tiny else {}),
        **(TINY_EXPERTS if a.tiny and a.model == "moe" else {}),
    }


def measure(a: argparse.Namespace, folder: Path) -> dict[str, Any]:
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", AREAL_LIKE_INIT_METHOD=f"file://{folder}/meet")
    if a.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    (folder / "config.json").write_text(json.dumps(shape(a)))
    import torch

    from areal_like.alloc import ModelAllocation
    from areal_like.config import MegatronConfig, OptimizerConfig, TrainEngineConfig
    from areal_like.engines.megatron.engine import MegatronEngine

    config = TrainEngineConfig(
        backend="megatron:d1",
        path=str(folder),
        init_from_scratch=True,
        dtype="bfloat16" if a.device == "cuda" else "float32",
        optimizer=OptimizerConfig(lr=1e-6),
        megatron=MegatronConfig(bridge_type=a.bridge),
    )
    engine = MegatronEngine(allocation=ModelAllocation.parse("megatron:d1"), config=config, device=a.device, seed=1)
    engine.initialize()
    first, _ = timed(lambda: drain(engine.weights(on_device=True)), a.device)
    if engine.weight_stream.why_unplanned is not None:
        raise SystemExit(f"the stream was not planned: {engine.weight_stream.why_unplanned}")
    exported = dict(engine.bridge.export(engine.modules))
    differing = [
        name
        for bucket in engine.weights(on_device=True)
        for name, tensor in bucket.tensors.items()
        if not torch.equal(tensor, exported.pop(name))
    ]
    differing += list(exported)
    payload, tensors = 0, 0
    largest = 0
    for bucket in engine.weights(on_device=True):
        payload += sum(tensor.nbytes for tensor in bucket.tensors.values())
        tensors += len(bucket.tensors)
        largest = max(largest, bucket.tensors.buffer.numel())
    rows = {}
    for group in (_device_calls(engine, a.device, payload), _host_calls(engine, a.device, payload, largest)):
        seconds: dict[str, list[float]] = {name: [] for name in group}
        for turn in range(a.repeat + 2):
            for name, call in group.items():
                took, _ = timed(call, a.device)
                if turn >= 2:
                    seconds[name].append(took)
        plain = statistics.median(seconds[list(group)[-1]])
        for name, values in seconds.items():
            median = statistics.median(values)
            rows[name] = {"seconds": median, "gb_s": payload / median / 1e9, "share": plain / median}
    engine.close()
    return {
        "model": a.model,
        "bridge": a.bridge,
        "device": torch.cuda.get_device_name() if a.device == "cuda" else "cpu",
        "bytes": payload,
        "tensors": tensors,
        "largest_bucket": largest,
        "first_seconds": first,
        "differing": differing,
        "rows": rows,
    }


def _device_calls(engine: Any, device: str, payload: int) -> dict[str, Callable[[], Any]]:
    """By row; the last is the plain copy."""
    import torch

    from areal_like.engines.megatron.weights import BUCKET_BYTES, stream_tensors

    source, target = (torch.zeros(payload, dtype=torch.uint8, device=engine.device) for _ in range(2))
    stream = engine.weight_stream

    def copies() -> None:
        held: list[Any] = []
        size = 0
        for _, tensor in engine.bridge.export(engine.modules):
            held.append(tensor.clone(memory_format=torch.contiguous_format))
            size += tensor.nbytes
            if size > BUCKET_BYTES:
                held, size = [], 0

    calls: dict[str, Callable[[], Any]] = {
        "device": lambda: drain(engine.weights(on_device=True)),
        "and views": lambda: [list(bucket.tensors.values()) for bucket in engine.weights(on_device=True)],
        "tensors": lambda: drain(stream_tensors(stream._export, engine.groups, target=engine.device)),
        "AReaL": copies,
    }
    if device == "cuda":
        calls |= _other_replays(engine)
    return calls | {"copy": lambda: target.copy_(source)}


def _other_replays(engine: Any) -> dict[str, Callable[[], Any]]:
    """The same copies made by other means, without what a stream does around them."""
    import torch

    from areal_like.engines.megatron.weight_copy import PieceCopier
    from areal_like.engines.megatron.weight_plan import as_bytes
    from areal_like.engines.megatron.weights import BUCKET_BYTES

    plan = engine.weight_stream._plan
    buckets = plan.buckets(BUCKET_BYTES)
    buffer = torch.empty(max(b.nbytes for b in buckets), dtype=torch.uint8, device=engine.device)
    sources = [as_bytes(source.checked()) for source in plan.sources]
    lists = [
        (
            [buffer[p.offset : p.offset + p.nbytes].view(torch.bfloat16) for p in bucket.pieces],
            [sources[p.source][p.start : p.start + p.nbytes].view(torch.bfloat16) for p in bucket.pieces],
        )
        for bucket in buckets
    ]
    copier = PieceCopier(plan.sources)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for bucket in buckets:
            copier(bucket, buffer[: bucket.nbytes])

    def foreach() -> None:
        for targets, values in lists:
            torch._foreach_copy_(targets, values)

    return {"foreach": foreach, "graph": graph.replay}


def _host_calls(engine: Any, device: str, payload: int, bucket: int) -> dict[str, Callable[[], Any]]:
    """By row; the last is the plain copy."""
    import torch

    source = torch.zeros(payload, dtype=torch.uint8, device=engine.device)
    target = torch.empty(bucket, dtype=torch.uint8, pin_memory=device == "cuda")

    def copy() -> None:
        for part in source.split(bucket):
            target[: part.numel()].copy_(part, non_blocking=True)

    return {
        "host": lambda: drain(engine.weights()),
        "host AReaL": lambda: [t.to("cpu", copy=True) for _, t in engine.bridge.export(engine.modules)],
        "host copy": copy,
    }


def drain(buckets: Any) -> None:
    for _ in buckets:
        pass


def timed(call: Callable[[], Any], device: str) -> tuple[float, Any]:
    import torch

    if device == "cuda":
        torch.cuda.synchronize()
    started = time.perf_counter()
    result = call()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started, result


def table(found: dict[str, Any]) -> list[str]:
    lines = [
        f"{found['model']}, {found['bridge']}, {found['device']}: {found['tensors']} tensors, "
        f"{found['bytes'] / 1e9:.3f} GB, largest bucket {found['largest_bucket'] / 2**20:.1f} MiB",
        f"first stream, planning included: {found['first_seconds']:.3f} s",
        f"tensors that differ from the bridge's export: {len(found['differing'])}",
        "",
        "| row | ms | GB/s | share |",
        "|---|---|---|---|",
    ]
    for name, row in found["rows"].items():
        lines.append(f"| {name} | {row['seconds'] * 1e3:.3f} | {row['gb_s']:.1f} | {row['share']:.3f} |")
    return lines


if __name__ == "__main__":
    sys.exit(main())
