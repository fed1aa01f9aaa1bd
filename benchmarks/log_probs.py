"""The log-probability pass of the engine beside the GPU's own matrix product, and its output head beside two others.

    python benchmarks/log_probs.py [--model dense|moe] [--tokens 16384 32768] [--json FILE]
    python benchmarks/log_probs.py --device cpu --layers 1 --tokens 64 --seq 16 --steps 1 --matmul 256 --vocabulary 999

Two tables, everything in one run; figures of different runs are not comparable.

The pass: `engine.forward` on the shape of Qwen2.5-1.5B (or 8 layers of Qwen3-30B-A3B), two micro-batches of so many
tokens. Its share is that of a bf16 product of three 8,192 x 8,192 matrices, timed before and after in the same process.
"head GiB" is what the head adds to the peak: the peak of the pass, less the peak of the same pass in which the head
gives zeros, so that only weights, gradients, optimizer states and the activations of layers are left.

The head alone: hidden states and weight to log-probabilities, without gradient, and with the gradients of both. Beside
it the same in plain torch (logits, float32, log_softmax, gather), and TransformerEngine's fused cross-entropy on
torch's logits, where it is installed. GiB are the peak above the inputs.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import torch
from train_step import COMMON, SHAPES, VOCABULARY, configure

GIB = 2**30
MICRO_BATCHES = 2


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SHAPES, default="dense")
    parser.add_argument("--layers", type=int, help="fewer layers than the shape has")
    parser.add_argument("--vocabulary", type=int, default=VOCABULARY)
    parser.add_argument("--tokens", type=int, nargs="+", default=[16384, 32768], help="of a micro-batch; a row each")
    parser.add_argument("--seq", type=int, default=1024, help="tokens of a sequence")
    parser.add_argument("--steps", type=int, default=5, help="timed calls, after two more")
    parser.add_argument("--matmul", type=int, default=8192, help="rows and columns of the product that is the peak")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    results: dict[str, Any] = {"date": date.today().isoformat(), **versions(arguments.device)}
    results["pass"] = [apart(engine_pass, arguments, tokens) for tokens in arguments.tokens]
    print("\n".join(pass_table(results["pass"])), flush=True)
    results["head"] = apart(heads, arguments, arguments.tokens[0])
    print("\n".join(head_table(results["head"])), flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2))
    return 0


def versions(device: str) -> dict[str, str]:
    """Of what decides the figures, and the machine."""
    from importlib.metadata import version

    names = ["torch", "megatron-core"] + ["transformer-engine"] * (
        importlib.util.find_spec("transformer_engine") is not None
    )
    machine = torch.cuda.get_device_name() if device == "cuda" else platform.processor() or platform.machine()
    return {"machine": machine, **{name: version(name) for name in names}}


def apart(function: Callable[..., Any], a: argparse.Namespace, tokens: int) -> Any:
    """What `function` says in a process of its own, so that no two share the GPU's memory.

    Raises:
        SystemExit: it did not come to an end.
    """
    with tempfile.TemporaryDirectory() as folder:
        process = torch.multiprocessing.get_context("spawn").Process(target=_write, args=(function, a, tokens, folder))
        process.start()
        process.join()
        if process.exitcode:
            raise SystemExit(f"{function.__name__} of {tokens} tokens failed with exit code {process.exitcode}")
        return json.loads((Path(folder) / "result.json").read_text())


def _write(function: Callable[..., Any], a: argparse.Namespace, tokens: int, folder: str) -> None:
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", AREAL_LIKE_INIT_METHOD=f"file://{folder}/rendezvous")
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    (Path(folder) / "result.json").write_text(json.dumps(function(a, tokens, folder)))


def engine_pass(a: argparse.Namespace, tokens: int, folder: str) -> dict[str, Any]:
    """`engine.forward`: seconds, TFLOP/s, the share of a plain product's, peaks with and without the head."""
    from areal_like.alloc import ModelAllocation
    from areal_like.data.batch import PackedBatch
    from areal_like.engines.megatron.engine import MegatronEngine
    from areal_like.spec import ModelSpec

    shape = {**COMMON, **SHAPES[a.model], "vocab_size": a.vocabulary}
    if a.layers:
        shape["num_hidden_layers"] = a.layers
    (Path(folder) / "config.json").write_text(json.dumps(shape))
    config = configure(argparse.Namespace(device=a.device, tokens=tokens, set=[]), [], folder)
    engine = MegatronEngine(
        allocation=ModelAllocation.parse(config.backend), config=config, device=a.device, seed=1, total_steps=None
    )
    engine.initialize()
    count = MICRO_BATCHES * tokens // a.seq
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, a.vocabulary, (count * a.seq,), generator=generator)
    batch = PackedBatch(ids, torch.arange(count + 1) * a.seq, {})
    before = matmul_tflops(a)
    seconds, peak, resident = measured(lambda: engine.forward(batch), a)
    peak_tflops = max(before, matmul_tflops(a))
    head: Any = engine.passes._last_module.output_layer
    whole_forward = head.forward

    def nothing(*_: Any, labels: torch.Tensor, **__: Any) -> tuple[torch.Tensor, None]:
        return torch.zeros(labels.shape, device=labels.device), None

    head.forward = nothing
    without_seconds, without_peak, _ = measured(lambda: engine.forward(batch), a)
    head.forward = whole_forward
    spec = ModelSpec.from_path(folder)
    flops = spec.num_layers * spec.layer_flops(context=a.seq // 2) + spec.head_flops()
    tflops = flops * ids.numel() / seconds / 1e12
    result = {
        "model": a.model,
        "tokens": tokens,
        "ms": 1e3 * seconds,
        "head_ms": 1e3 * (seconds - without_seconds),
        "tokens_s": ids.numel() / seconds,
        "tflops": tflops,
        "matmul_tflops": peak_tflops,
        "share": tflops / peak_tflops,
        "peak_gib": peak / GIB,
        "above_weights_gib": (peak - resident) / GIB,
        "head_gib": (peak - without_peak) / GIB,
        "transformer_engine": engine.transformer_engine,
    }
    engine.close()
    return result


def heads(a: argparse.Namespace, tokens: int, folder: str) -> dict[str, dict[str, float]]:
    """Milliseconds and GiB of each head without gradient and with it, by name."""
    import torch.distributed as dist
    import torch.nn.functional as F

    from areal_like.engines.megatron.output_head import token_log_probs

    dist.init_process_group("gloo", init_method=f"file://{folder}/heads", rank=0, world_size=1)
    world: Any = dist.group.WORLD
    width = SHAPES[a.model]["hidden_size"]
    dtype = torch.bfloat16 if a.device == "cuda" else torch.float32
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, width, generator=generator).to(a.device, dtype).requires_grad_(True)
    weight = (
        (torch.randn(a.vocabulary, width, generator=generator) / width**0.5).to(a.device, dtype).requires_grad_(True)
    )
    labels = torch.randint(0, a.vocabulary, (tokens,), generator=generator).to(a.device)

    def ours() -> torch.Tensor:
        return token_log_probs(hidden, weight, labels, group=world, vocab_size=a.vocabulary)[0]

    def plain() -> torch.Tensor:
        return F.linear(hidden, weight).float().log_softmax(-1).gather(1, labels[:, None])[:, 0]

    found: dict[str, Callable[[], torch.Tensor]] = {"areal_like": ours, "torch": plain}
    if a.device == "cuda" and importlib.util.find_spec("transformer_engine") is not None:
        from transformer_engine.pytorch.cross_entropy import parallel_cross_entropy

        def transformer_engine() -> torch.Tensor:
            return -parallel_cross_entropy(F.linear(hidden, weight)[None], labels[None]).view(-1)

        found["TransformerEngine"] = transformer_engine

    def with_gradient(head: Callable[[], torch.Tensor]) -> None:
        hidden.grad = weight.grad = None
        head().mean().backward()

    rows, expected = {}, None
    for name, head in found.items():
        with torch.no_grad():
            values = head()
            expected = values if expected is None else expected
            difference = float((values - expected).abs().max())
            del values
            forward, forward_peak, resident = measured(head, a)
        both, both_peak, base = measured(lambda head=head: with_gradient(head), a)  # type: ignore[misc]
        hidden.grad = weight.grad = None
        rows[name] = {
            "forward_ms": 1e3 * forward,
            "forward_gib": (forward_peak - resident) / GIB,
            "both_ms": 1e3 * both,
            "both_gib": (both_peak - base) / GIB,
            "difference": difference,
        }
    dist.destroy_process_group()
    return rows


def measured(call: Callable[[], Any], a: argparse.Namespace) -> tuple[float, int, int]:
    """Median seconds of a call after two others; bytes at its peak, and before it (0 without a GPU)."""
    cuda = a.device == "cuda"
    call(), call()
    resident = 0
    if cuda:
        torch.cuda.synchronize()
        resident = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
    seconds = []
    for _ in range(a.steps):
        start = time.monotonic()
        call()
        if cuda:
            torch.cuda.synchronize()
        seconds.append(time.monotonic() - start)
    return statistics.median(seconds), torch.cuda.max_memory_allocated() if cuda else 0, resident


def matmul_tflops(a: argparse.Namespace) -> float:
    """Of a square product in the dtype of the model."""
    dtype = torch.bfloat16 if a.device == "cuda" else torch.float32
    left, right = (torch.randn(a.matmul, a.matmul, device=a.device, dtype=dtype) for _ in range(2))
    repeats = 20 if a.device == "cuda" else 1

    def several() -> None:
        for _ in range(repeats):
            left @ right

    seconds, _, _ = measured(several, a)
    return 2 * a.matmul**3 * repeats / seconds / 1e12


def pass_table(rows: list[dict[str, Any]]) -> list[str]:
    """Markdown."""
    lines = [
        "| pass, tokens of a micro-batch | ms | of it the head | tokens/s | TFLOP/s | matmul TFLOP/s | share "
        "| peak GiB | above weights GiB | head GiB |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    return lines + [
        f"| {r['model']}, {r['tokens']:,} | {r['ms']:.1f} | {r['head_ms']:.1f} | {r['tokens_s']:,.0f} "
        f"| {r['tflops']:.4g} | {r['matmul_tflops']:.4g} | {r['share']:.3f} | {r['peak_gib']:.2f} "
        f"| {r['above_weights_gib']:.2f} | {r['head_gib']:.2f} |"
        for r in rows
    ]


def head_table(rows: dict[str, dict[str, float]]) -> list[str]:
    """Markdown; ratios are to ours."""
    ours = rows["areal_like"]
    lines = [
        "",
        "| head | forward ms | x ours | forward GiB | forward and backward ms | x ours | GiB | largest difference |",
        "|---|---|---|---|---|---|---|---|",
    ]
    return lines + [
        f"| {name} | {r['forward_ms']:.2f} | {r['forward_ms'] / ours['forward_ms']:.2f} | {r['forward_gib']:.2f} "
        f"| {r['both_ms']:.2f} | {r['both_ms'] / ours['both_ms']:.2f} | {r['both_gib']:.2f} | {r['difference']:.1e} |"
        for name, r in rows.items()
    ]


if __name__ == "__main__":
    sys.exit(main())
