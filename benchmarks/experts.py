"""One layer of experts forward and backward: grouped products beside TransformerEngine's experts, in one run.

    python benchmarks/experts.py [--tokens 16384 4096] [--json FILE]
    python benchmarks/experts.py --device cpu --hidden 64 --width 32 --experts 8 --topk 2 --tokens 128

A MoE layer of Qwen3-30B-A3B's shape (128 experts, 8 a token, hidden size 2,048, width 768) in Megatron's data-parallel
wrapper: router, sorting of tokens, experts, gradients added into float32 buffers. `theirs` is what Megatron-Core builds
(TEGroupedMLP behind the all-to-all dispatcher; on the CPU SequentialMLP), `ours` what the engine builds. `ms` is the
time of a pass of both directions; `host ms` the time until the calls have returned, before the device is done: where
the two are equal the host is what binds. FLOPs are the experts' 18 x tokens x topk x hidden x width. Figures of
different runs are not comparable: only the ratio is a result.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--tokens", type=int, nargs="+", default=[16384, 4096])
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--topk", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    rows = measure(arguments)
    print(f"{'tokens':>7} {'experts':<22} {'ms':>9} {'host ms':>9} {'TFLOP/s':>8} {'peak MiB':>9}")
    for row in rows:
        times = f"{row['ms']:>9.2f} {row['host_ms']:>9.2f} {row['tflops']:>8.1f} {row['peak_mib']:>9.0f}"
        print(f"{row['tokens']:>7} {row['experts']:<22} {times}")
    for tokens in arguments.tokens:
        theirs, ours = (row["ms"] for row in rows if row["tokens"] == tokens)
        print(f"{tokens} tokens: {theirs / ours:.2f} times as fast")
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=2))
    return 0


def measure(a: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows of the table: theirs and ours for each number of tokens."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", AREAL_LIKE_INIT_METHOD=f"file://{folder}/meet")
        from areal_like.alloc import ModelAllocation
        from areal_like.engines.megatron import cpu
        from areal_like.engines.megatron.process_groups import create_process_groups
        from areal_like.engines.megatron.random_states import RandomStates
        from areal_like.engines.megatron.world import join_world, leave_world

        device = torch.device(a.device, 0) if a.device == "cuda" else torch.device("cpu")
        join_world(a.device)
        groups = create_process_groups(ModelAllocation.parse("megatron:d1").mesh())
        if a.device == "cpu":
            cpu.install()
        RandomStates(device).seed(1, groups)
        rows = []
        for ours in (False, True):
            layer = _layer(a, groups, device, ours=ours)
            name = type(layer.module.experts).__name__
            for tokens in a.tokens:
                rows.append({"tokens": tokens, "experts": name, **_time(a, layer, tokens, device)})
            del layer
            if a.device == "cuda":
                torch.cuda.empty_cache()
        leave_world()
    return sorted(rows, key=lambda row: a.tokens.index(row["tokens"]))


def _layer(a: argparse.Namespace, groups: Any, device: torch.device, *, ours: bool) -> Any:
    """A MoE layer in Megatron's data-parallel wrapper."""
    from megatron.core.extensions.transformer_engine import HAVE_TE
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    from areal_like.config import DDPConfig
    from areal_like.engines.megatron import cpu
    from areal_like.engines.megatron.experts import GroupedExperts
    from areal_like.engines.megatron.local_dispatcher import LocalDispatcher
    from areal_like.engines.megatron.optimizer import wrap_for_data_parallel

    on_gpu = device.type == "cuda"
    config = TransformerConfig(
        num_layers=1,
        hidden_size=a.hidden,
        num_attention_heads=4,
        num_moe_experts=a.experts,
        moe_router_topk=a.topk,
        moe_ffn_hidden_size=a.width,
        moe_grouped_gemm=on_gpu,
        moe_permute_fusion=on_gpu,
        moe_token_dispatcher_type="alltoall",
        moe_router_load_balancing_type="none",
        moe_router_dtype="fp32",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        bias_activation_fusion=on_gpu,
        gradient_accumulation_fusion=False,
        calculate_per_token_loss=True,
        bf16=on_gpu,
        params_dtype=torch.bfloat16 if on_gpu else torch.float32,
        use_cpu_initialization=not on_gpu,
    )
    build: Any = get_moe_module_spec(use_te=HAVE_TE, num_experts=a.experts, moe_grouped_gemm=on_gpu)
    if ours:
        build.keywords["submodules"].experts = GroupedExperts
    layer = build(config=config, layer_number=1, pg_collection=groups.collection).to(device)
    if ours:
        LocalDispatcher.become(layer.token_dispatcher)
    if not on_gpu:
        cpu.install()
    (wrapped,) = wrap_for_data_parallel([layer], DDPConfig(), groups, distributed=True)
    return wrapped


def _time(a: argparse.Namespace, layer: Any, tokens: int, device: torch.device) -> dict[str, float]:
    """Medians over the repetitions."""
    on_gpu = device.type == "cuda"
    generator = torch.Generator().manual_seed(1)
    dtype = next(layer.module.experts.parameters()).dtype
    hidden = torch.randn(tokens, 1, a.hidden, generator=generator).to(device, dtype).requires_grad_()
    grad = torch.randn(tokens, 1, a.hidden, generator=generator).to(device, dtype)

    def wait() -> None:
        if on_gpu:
            torch.cuda.synchronize()

    def step() -> tuple[float, float]:
        wait()
        start = time.perf_counter()
        output, _ = layer.module(hidden)
        output.backward(grad)
        returned = time.perf_counter()
        wait()
        return 1e3 * (time.perf_counter() - start), 1e3 * (returned - start)

    for _ in range(3):
        step()
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if on_gpu else 0
    times = [step() for _ in range(a.repeats)]
    peak = torch.cuda.max_memory_allocated() - before if on_gpu else 0
    whole, host = (statistics.median(column) for column in zip(*times, strict=True))
    flops = 18 * tokens * a.topk * a.hidden * a.width
    return {"ms": whole, "host_ms": host, "tflops": flops / whole / 1e9, "peak_mib": peak / 2**20}


if __name__ == "__main__":
    raise SystemExit(main())
