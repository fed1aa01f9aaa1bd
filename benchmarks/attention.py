"""One layer's attention over packed sequences: TransformerEngine's, torch's `varlen_attn`, FlexAttention; in one run.

    python benchmarks/attention.py [--quick] [--json FILE]     # one GPU, TransformerEngine: about 90 s, quick 40 s
    python benchmarks/attention.py --tune                      # FlexAttention with other tiles, one shape
    python benchmarks/attention.py --device cpu                # what a CPU has, at a tiny size

`fused` is what the engine has with `attention_backend: fused`, `flex` with `flex`: the module itself, copies of padding
included. `flex, one kernel` compiles FlexAttention once for every multiple of 128 tokens, `flex, any length` once for
every length, without padding. Times are of the GPU (bfloat16): the calls wait in the queue while it sleeps, so the host
does not count; `host` is what one forward and backward pass keeps the host busy. `mask` is what a micro-batch needs
once; `layer` is forward, backward and the layer's share of the mask. FLOPs are those of the pairs that a causal mask
leaves (backward: 2.5 times forward). `kept` is memory between the passes beyond the inputs, `peak` with the gradients.
`repeats`: three runs give the same gradients, bit for bit. `error`: largest difference of output and gradients from
float64, over the largest value.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from length_mix import log_normal_lengths
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Shape:
    """Heads of one layer, and how many layers share a mask."""

    heads: int
    groups: int
    width: int
    layers: int


SHAPES = {
    "Qwen2.5-1.5B": Shape(12, 2, 128, 28),
    "Qwen3-30B-A3B": Shape(32, 4, 128, 48),
    "Llama-3.1-8B": Shape(32, 8, 128, 32),
    "SmolLM2-135M": Shape(9, 3, 64, 30),
}
TINY = {"tiny": Shape(4, 2, 16, 2)}
TUNING: dict[str, dict[str, Any]] = {
    "as torch has it": {},
    "forward 128 x 128": {"fwd_BLOCK_M": 128, "fwd_BLOCK_N": 128, "fwd_num_warps": 8, "fwd_num_stages": 2},
    "forward 64 x 128": {"fwd_BLOCK_M": 64, "fwd_BLOCK_N": 128, "fwd_num_warps": 4, "fwd_num_stages": 3},
    "TMA": {"USE_TMA": True},
    "backward 64, 4 warps": {"bwd_BLOCK_M1": 64, "bwd_BLOCK_N1": 64, "bwd_BLOCK_M2": 64, "bwd_BLOCK_N2": 64}
    | {"bwd_num_warps": 4, "bwd_num_stages": 3},
    "backward 2 stages": {"bwd_num_stages": 2},
}
COLUMNS = ["fwd_ms", "fwd_bwd_ms", "mask_ms", "layer_ms", "tflops", "host_ms", "kept_mib", "peak_mib", "first_s"]
COLUMNS += ["repeats", "error"]


def packings(tokens: int, *, few: bool) -> dict[str, list[int]]:
    """Lengths of packed micro-batches of `tokens` tokens in all (the last but one: a hundred fewer)."""
    equal = {n: [n] * (tokens // n) for n in (1024, 8192, tokens, 64)}
    mix = log_normal_lengths(4096, seed=0)
    cut = next(i for i, total in enumerate(accumulate(mix)) if total >= tokens)
    mixed = [*mix[:cut], tokens - sum(mix[:cut])]
    found = {f"{len(v)} x {k:,}": v for k, v in equal.items()} | {"log-normal": mixed}
    odd = [*equal[1024][:-1], 924]
    return {k: found[k] for k in (f"{tokens // 1024} x 1,024", "log-normal")} if few else {**found, "100 fewer": odd}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="fewer shapes and packings")
    parser.add_argument("--tune", action="store_true", help="FlexAttention's tiles alone")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    start = time.monotonic()
    cases = list(_cases(arguments))
    rows = []
    print(f"{'shape':<14} {'packing':<12} {'':<22} " + " ".join(f"{name:>10}" for name in COLUMNS))
    for shape, packing, lengths, name, make in cases:
        row = {"shape": shape, "packing": packing, "tokens": sum(lengths), "name": name}
        row |= measure(make, {**SHAPES, **TINY}[shape], lengths, arguments.device)
        cells = " ".join(f"{_cell(row[column]):>10}" for column in COLUMNS)
        print(f"{shape:<14} {packing:<12} {name:<22} {cells}", flush=True)
        rows.append(row)
    _compare(rows)
    print(f"{time.monotonic() - start:.0f} s")
    if arguments.json:
        arguments.json.write_text(json.dumps({"device": _device(arguments.device), "rows": rows}, indent=2))
    return 0


Case = tuple[str, str, list[int], str, Callable[[Shape, list[int], Tensor], "Implementation"]]


def _cases(a: argparse.Namespace) -> Iterator[Case]:
    if a.device == "cpu":
        for name, make in (("local", _local), ("flex", _flex)):
            yield "tiny", "3 lengths", [70, 1, 57], name, make
        return
    both = {"fused": _fused, "flex": _flex}
    if a.tune:
        for packing in ("16 x 1,024", "log-normal"):
            for name, options in TUNING.items():
                yield "Qwen2.5-1.5B", packing, packings(16384, few=True)[packing], name, _tuned(options)
        return
    for number, shape in enumerate(SHAPES):
        if a.quick and shape not in ("Qwen2.5-1.5B", "Qwen3-30B-A3B"):
            continue
        for packing, lengths in packings(16384, few=number > 0 or a.quick).items():
            for name, make in {**both, "varlen_attn": _varlen}.items():
                yield shape, packing, lengths, name, make
            if number == 0 and not a.quick:
                yield shape, packing, lengths, "flex, one kernel", _one_kernel
                yield shape, packing, lengths, "flex, any length", _any_length
    if not a.quick:
        for packing, lengths in packings(32768, few=True).items():
            for name, make in both.items():
                yield "Qwen2.5-1.5B", packing, lengths, name, make


@dataclass(frozen=True)
class Implementation:
    """How to make what a micro-batch needs once, and the attention with it; `trains`: it has a backward pass."""

    prepare: Callable[[], Any]
    attend: Callable[[Any, Tensor, Tensor, Tensor], Tensor]
    trains: bool = True


def _fused(shape: Shape, lengths: list[int], cu: Tensor) -> Implementation:
    import transformer_engine.pytorch as te

    module = te.DotProductAttention(
        shape.heads,
        shape.width,
        num_gqa_groups=shape.groups,
        attention_dropout=0.0,
        qkv_format="thd",
        attn_mask_type="padding_causal",
        layer_number=1,
    )
    bounds = {f"cu_seqlens_{x}{kind}": cu for x in ("q", "kv") for kind in ("", "_padded")}
    longest = {"max_seqlen_q": max(lengths), "max_seqlen_kv": max(lengths)}
    options = {**bounds, **longest, "attn_mask_type": "padding_causal", "pad_between_seqs": False}
    return Implementation(lambda: None, lambda _, q, k, v: module(q, k, v, None, **options))


def _varlen(shape: Shape, lengths: list[int], cu: Tensor) -> Implementation:
    from torch.nn.attention.varlen import varlen_attn

    n = max(lengths)

    def attend(_: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = varlen_attn(q, k, v, cu, cu, n, n, window_size=(-1, 0))
        assert isinstance(out, Tensor)
        return out.flatten(1)

    return Implementation(lambda: None, attend)


def _flex(shape: Shape, lengths: list[int], cu: Tensor) -> Implementation:
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer.transformer_config import TransformerConfig

    from areal_like.engines.megatron.document_attention import DocumentAttention, DocumentMask

    config = TransformerConfig(
        num_layers=1,
        hidden_size=shape.heads * shape.width,
        num_attention_heads=shape.heads,
        num_query_groups=shape.groups,
        kv_channels=shape.width,
        attention_dropout=0.0,
    )
    module = DocumentAttention(config, 1, None, "self")

    def prepare() -> PackedSeqParams:
        packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=cu, cu_seqlens_kv=cu)
        DocumentMask.of(packed, sum(lengths))
        return packed

    def attend(packed: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return module(q, k, v, None, packed_seq_params=packed)

    return Implementation(prepare, attend, trains=cu.device.type == "cuda")


def _local(shape: Shape, lengths: list[int], cu: Tensor) -> Implementation:
    """The attention of the engine on CPUs."""
    from areal_like.engines.megatron.attention import DocumentGroups, PackedAttention

    module: Any = object.__new__(PackedAttention)
    torch.nn.Module.__init__(module)
    module.softmax_scale, module.dropout = None, 0.0
    return Implementation(
        lambda: DocumentGroups.of(cu), lambda groups, q, k, v: PackedAttention._whole(module, q, k, v, groups)
    )


def _tuned(options: dict[str, Any]) -> Callable[[Shape, list[int], Tensor], Implementation]:
    """FlexAttention as the engine has it, with options of its kernel."""
    compiled = torch.compile(
        lambda q, k, v, blocks: _flex_attention(q, k, v, blocks, kernel_options=options), dynamic=False, fullgraph=True
    )

    def make(shape: Shape, lengths: list[int], cu: Tensor) -> Implementation:
        from areal_like.engines.megatron.document_attention import DocumentMask

        return Implementation(
            lambda: DocumentMask.from_bounds(cu, sum(lengths)).blocks, lambda blocks, q, k, v: compiled(q, k, v, blocks)
        )

    return make


def _one_kernel(shape: Shape, lengths: list[int], cu: Tensor) -> Implementation:
    """Compiled for 128 n tokens, n open: rows are handed over as n tiles, so that the kernel knows that 128 divides."""
    from areal_like.engines.megatron.document_attention import DocumentMask

    tokens = sum(lengths)
    padded = -(-tokens // 128) * 128

    def attend(blocks: Any, *qkv: Tensor) -> Tensor:
        rows = [F.pad(x, (0, 0, 0, 0, 0, padded - tokens)) if padded > tokens else x for x in qkv]
        return _dynamic(True)(*(x.view(-1, 128, *x.shape[1:]) for x in rows), blocks)[:tokens]

    return Implementation(lambda: DocumentMask.from_bounds(cu, tokens, padded=padded).blocks, attend)


def _any_length(shape: Shape, lengths: list[int], cu: Tensor) -> Implementation:
    from torch.nn.attention.flex_attention import BlockMask

    from areal_like.engines.megatron.document_attention import DocumentMask

    tokens = sum(lengths)
    padded = -(-tokens // 128) * 128

    def prepare() -> BlockMask:
        b = DocumentMask.from_bounds(cu, tokens, padded=padded).blocks
        blocks = (b.kv_num_blocks, b.kv_indices, b.full_kv_num_blocks, b.full_kv_indices)
        return BlockMask.from_kv_blocks(*blocks, BLOCK_SIZE=128, mask_mod=b.mask_mod, seq_lengths=(tokens, tokens))

    return Implementation(prepare, lambda blocks, q, k, v: _dynamic(False)(q, k, v, blocks))


_COMPILED: dict[bool, Any] = {}


def _dynamic(tiles: bool) -> Any:
    if tiles not in _COMPILED:

        def attend(q: Tensor, k: Tensor, v: Tensor, blocks: Any) -> Tensor:
            if tiles:
                q, k, v = (x.flatten(0, 1) for x in (q, k, v))
            return _flex_attention(q, k, v, blocks)

        _COMPILED[tiles] = torch.compile(attend, dynamic=True, fullgraph=True)
    return _COMPILED[tiles]


def _flex_attention(q: Tensor, k: Tensor, v: Tensor, blocks: Any, **options: Any) -> Tensor:
    from torch.nn.attention.flex_attention import flex_attention

    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    out = flex_attention(q, k, v, block_mask=blocks, enable_gqa=True, **options)
    assert isinstance(out, Tensor)
    return out[0].transpose(0, 1).flatten(1)


def measure(make: Any, shape: Shape, lengths: list[int], device: str) -> dict[str, Any]:
    """The figures of one implementation; where it fails, the reason in the place of the first."""
    cu = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
    tokens, cuda = sum(lengths), device == "cuda"
    generator = torch.Generator(device).manual_seed(0)
    qkv = [
        torch.randn(tokens, n, shape.width, generator=generator, device=device, dtype=_dtype(device))
        for n in (shape.heads, shape.groups, shape.groups)
    ]
    gradient = torch.randn(tokens, shape.heads * shape.width, generator=generator, device=device, dtype=_dtype(device))
    row: dict[str, Any] = dict.fromkeys(COLUMNS)
    try:
        it: Implementation = make(shape, lengths, cu)
        ready = it.prepare()

        def forward() -> Tensor:
            with torch.no_grad():
                return it.attend(ready, *qkv)

        def both() -> list[Tensor]:
            leaves = [x.detach().requires_grad_() for x in qkv]
            out = it.attend(ready, *leaves)
            return [out.detach(), *torch.autograd.grad(out, leaves, gradient)]

        start = time.monotonic()
        forward()
        results = [both() for _ in range(3)] if it.trains else []
        _wait(device)
        row["first_s"] = time.monotonic() - start
        row["repeats"] = all(map(torch.equal, results[0] * 2, results[1] + results[2])) if results else None
        del results
        row["mask_ms"] = _milliseconds(it.prepare, device)[0]
        row["fwd_ms"], row["host_ms"] = _milliseconds(forward, device)
        pairs = sum(n * (n + 1) // 2 for n in lengths)
        flops = 4 * shape.heads * shape.width * pairs
        if it.trains:
            row["fwd_bwd_ms"], row["host_ms"] = _milliseconds(both, device)
            row["layer_ms"] = row["fwd_bwd_ms"] + row["mask_ms"] / shape.layers
            row["tflops"] = 3.5 * flops / row["layer_ms"] / 1e9
        if cuda:
            row["kept_mib"], row["peak_mib"] = _memory(it, ready, qkv, gradient)
        row["error"] = _error(make, shape, device)
    except (RuntimeError, ValueError, ImportError, AssertionError) as error:
        row["failed"] = f"{type(error).__name__}: {str(error)[:300]}"
        print(row["failed"], flush=True)
    return row


def _milliseconds(call: Callable[[], Any], device: str) -> tuple[float, float]:
    """Median of the device and of the host, for one call."""
    call()
    _wait(device)
    repeats, host, seconds = 8, [], []
    for _ in range(3):
        if device == "cuda":
            torch.cuda._sleep(40_000_000)  # about 20 ms: the calls are queued before the first one starts
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if device == "cuda" else []
        start = time.perf_counter()
        if events:
            events[0].record()
        for _ in range(repeats):
            call()
        if events:
            events[1].record()
        host.append((time.perf_counter() - start) / repeats * 1e3)
        _wait(device)
        seconds.append(events[0].elapsed_time(events[1]) / repeats if events else host[-1])
    return statistics.median(seconds), statistics.median(host)


def _memory(it: Implementation, ready: Any, qkv: list[Tensor], gradient: Tensor) -> tuple[float, float]:
    torch.cuda.synchronize()
    leaves = [x.detach().requires_grad_() for x in qkv]
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = it.attend(ready, *leaves)
    kept = torch.cuda.memory_allocated() - before
    torch.autograd.grad(out, leaves, gradient)
    return kept / 2**20, (torch.cuda.max_memory_allocated() - before) / 2**20


ERRORS: dict[tuple[Any, ...], float] = {}


def _error(make: Any, shape: Shape, device: str) -> float:
    """Beside each document alone, in float64."""
    if (make, shape) in ERRORS:
        return ERRORS[make, shape]
    lengths = [300, 5, 700, *[64] * 5, 1] if device == "cuda" else [30, 5, 70, 1]
    generator = torch.Generator(device).manual_seed(1)
    qkv = [
        torch.randn(sum(lengths), n, shape.width, generator=generator, device=device, dtype=_dtype(device))
        for n in (shape.heads, shape.groups, shape.groups)
    ]
    cu = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
    it: Implementation = make(shape, lengths, cu)
    ready = it.prepare()

    def attend(*rows: Tensor) -> Tensor:
        return it.attend(ready, *rows)

    def alone(*rows: Tensor) -> Tensor:
        q, k, v = (x.split(lengths) for x in rows)
        outs = [
            F.scaled_dot_product_attention(
                a.transpose(0, 1), b.transpose(0, 1), c.transpose(0, 1), is_causal=True, enable_gqa=True
            )
            for a, b, c in zip(q, k, v, strict=True)
        ]
        return torch.cat([out.transpose(0, 1) for out in outs]).flatten(1)

    results = []
    for run, inputs in ((attend, qkv), (alone, [x.double() for x in qkv])):
        leaves = [x.detach().requires_grad_(it.trains) for x in inputs]
        out = run(*leaves)
        grads = torch.autograd.grad(out.double().square().sum(), leaves) if it.trains else ()
        results.append([out.detach().double(), *(x.double() for x in grads)])
    ERRORS[make, shape] = max(
        float((a - b).abs().max() / b.abs().max()) for a, b in zip(results[0], results[1], strict=True)
    )
    return ERRORS[make, shape]


def _compare(rows: list[dict[str, Any]]) -> None:
    """What a layer takes with the others beside `fused`."""
    for row in rows:
        if row["name"] == "fused" and row["layer_ms"]:
            others = [
                f"{r['name']} {r['layer_ms'] / row['layer_ms']:.3f}"
                for r in rows
                if (r["shape"], r["packing"], r["tokens"]) == (row["shape"], row["packing"], row["tokens"])
                and r["layer_ms"]
                and r is not row
            ]
            print(f"{row['shape']}, {row['packing']} of {row['tokens']:,}: times of fused: {'; '.join(others)}")


def _device(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else "cpu"


def _dtype(device: str) -> torch.dtype:
    return torch.bfloat16 if device == "cuda" else torch.float32


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.3g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    sys.exit(main())
