"""What tests ask of the stream of weights inside a worker; each function takes the engine, and travels by name."""

from __future__ import annotations

import contextlib
from typing import Any
from unittest.mock import patch

import torch
from safetensors.torch import load_file

from areal_like.engines.base import PackedTensors
from areal_like.engines.megatron import weight_plan
from areal_like.engines.megatron.weights import stream_tensors


def why_unplanned(engine: Any) -> str | None:
    for _ in engine.weights():
        pass
    return engine.weight_stream.why_unplanned


def differing(engine: Any, folder: str | None = None, bucket_bytes: int = 20_480) -> list[str]:
    """Tensors of either stream that are not, bit for bit, what the bridge exports (and what the folder holds), in its
    order; and buckets that are not where, or as large as, they should be."""
    stream = engine.weight_stream
    exported = {n: t.clone() for b in stream_tensors(stream._export, engine.groups) for n, t in b.tensors.items()}
    found = []
    if folder is not None:
        original = load_file(f"{folder}/model.safetensors")
        found += [n for n in original.keys() | exported.keys() if not _same(exported.get(n), original.get(n))]
    for on_device in (False, True):
        seen: dict[str, torch.Tensor] = {}
        for bucket in stream.buckets(on_device=on_device, bucket_bytes=bucket_bytes):
            assert isinstance(bucket.tensors, PackedTensors)
            buffer = bucket.tensors.buffer
            where = engine.device if on_device else torch.device("cpu")
            if buffer.device != where or (buffer.numel() > bucket_bytes and len(bucket.tensors) > 1):
                found.append(f"bucket of {buffer.numel()} bytes on {buffer.device}")
            seen |= {n: t.clone() for n, t in bucket.tensors.items()}
        if engine.groups.rank == 0 and list(seen) != list(exported):
            found.append(f"names, on_device={on_device}")
        found += [f"{n}, on_device={on_device}" for n, t in seen.items() if not _same(t, exported[n])]
    return found


def _same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    if one is None or other is None or one.shape != other.shape:
        return False
    return torch.equal(one.cpu(), other.cpu().to(one.dtype))


def move_parameters(engine: Any) -> int:
    """Give every parameter other memory, and poison what it had; every second module gets other parameters too."""
    moved = 0
    for module in (m for chunk in engine.modules for m in chunk.modules()):
        for name, parameter in list(module._parameters.items()):
            if parameter is None:
                continue
            values = parameter.data.clone()
            parameter.data.fill_(7.0)
            if moved % 2:
                module._parameters[name] = torch.nn.Parameter(values)
            else:
                parameter.data = values
            moved += 1
    return moved


def offload_inside(engine: Any) -> list[str]:
    """The stream of small buckets, with the parameters taken away after the first; names that came."""
    seen = []
    for bucket in engine.weight_stream.buckets(bucket_bytes=20_480):
        seen += list(bucket.tensors)
        engine.offload(gradients=False, optimizer=False)
    return seen


def with_a_quantised_weight(engine: Any) -> tuple[str | None, list[str]]:
    """Why nothing is planned where one weight says it is FP8, and what the stream then gives that is wrong."""
    from areal_like.engines.megatron.weights import WeightStream

    one = next(p for p in engine.modules[0].parameters() if p.ndim == 2)
    with contextlib.ExitStack() as stack:
        stack.enter_context(patch.object(weight_plan, "is_fp8", lambda p: p is one))
        engine.weight_stream = WeightStream(engine.bridge, engine.modules, engine.groups, device=engine.device)
        return engine.weight_stream.why_unplanned, differing(engine)
