"""The engine's whole RL training step beside a plain Megatron-Core loop, in one run on one GPU.

    python benchmarks/train_step.py --reference reference_loop.py [--model dense|moe] [--json FILE]
    python benchmarks/train_step.py [--model dense|moe] [--fp8 RECIPE [--fp8-param]] [--deterministic]

The reference is a script that prints one JSON line with `tok_s_gpu`, `tflops_gpu` and `peak_gib` (a plain loop over
Megatron-Core with TransformerEngine and fused cross-entropy on packed micro-batches). The engine does what
reinforcement learning needs: log-probabilities from the logits, the clipped policy loss, gradient clipping, the
optimizer. Both train one shape (dense: Qwen2.5-1.5B; moe: 8 layers of Qwen3-30B-A3B) on four micro-batches of 16,384
tokens in sequences of 1,024; FLOPs are counted alike. Figures of different runs are not comparable: only the ratio is a
result.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

SHAPES: dict[str, dict[str, Any]] = {
    "dense": {
        "model_type": "qwen2",
        "num_hidden_layers": 28,
        "hidden_size": 1536,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "intermediate_size": 8960,
        "tie_word_embeddings": True,
    },
    "moe": {
        "model_type": "qwen3_moe",
        "num_hidden_layers": 8,
        "hidden_size": 2048,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "tie_word_embeddings": False,
    },
}
VOCABULARY = 151936
COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "hidden_act": "silu",
    "attention_dropout": 0.0,
    "dtype": "bfloat16",
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reference", type=Path, help="script to run beside the engine")
    parser.add_argument("--model", choices=SHAPES, default="dense")
    parser.add_argument("--layers", type=int, help="fewer layers than the shape has")
    parser.add_argument("--tokens", type=int, default=16384, help="tokens of a micro-batch")
    parser.add_argument("--seq", type=int, default=1024, help="tokens of a sequence")
    parser.add_argument("--micro", type=int, default=4, help="micro-batches of a step")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--fp8", choices=("delayed", "tensorwise", "blockwise", "mxfp8"), help="FP8 recipe of the engine"
    )
    parser.add_argument("--fp8-param", action="store_true", help="with --fp8: parameters in FP8 too")
    parser.add_argument("--deterministic", action="store_true", help="the engine with repeatable kernels")
    parser.add_argument("--profile", action="store_true", help="print where the time of one step goes")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    results = {"engine": run_engine(arguments)}
    print(json.dumps(results["engine"]), flush=True)
    if arguments.reference is not None:
        results["reference"] = run_reference(arguments)
        print(json.dumps(results["reference"]), flush=True)
        ours, theirs = results["engine"], results["reference"]
        print(f"tokens/s: {ours['tok_s_gpu'] / theirs['tok_s_gpu']:.3f} x reference")
        print(f"peak memory: {ours['peak_gib'] / theirs['peak_gib']:.3f} x reference")
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2))
    return 0


def run_reference(a: argparse.Namespace) -> dict[str, Any]:
    """The reference's own JSON line."""
    command = [sys.executable, str(a.reference), "--model", a.model, "--tokens", str(a.tokens), "--seq", str(a.seq)]
    command += ["--micro", str(a.micro), "--steps", str(a.steps)]
    command += ["--layers", str(a.layers)] if a.layers else []
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29519"}
    done = subprocess.run(command, env={**os.environ, **alone}, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        raise SystemExit(f"the reference failed ({done.returncode}):\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    result: dict[str, Any] = json.loads(lines[-1])
    return result


def run_engine(a: argparse.Namespace) -> dict[str, Any]:
    """The engine in a process of its own, so that the two do not share the GPU's memory."""
    with tempfile.TemporaryDirectory() as folder:
        shape = {**COMMON, **SHAPES[a.model]}
        if a.layers:
            shape["num_hidden_layers"] = a.layers
        (Path(folder) / "config.json").write_text(json.dumps(shape))
        out = Path(folder) / "result.json"
        context = torch.multiprocessing.get_context("spawn")
        process = context.Process(target=_engine, args=(a, folder, out))
        process.start()
        process.join()
        if process.exitcode:
            raise SystemExit(f"the engine failed with exit code {process.exitcode}")
        result: dict[str, Any] = json.loads(out.read_text())
        return result


def _engine(a: argparse.Namespace, folder: str, out: Path) -> None:
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", AREAL_LIKE_INIT_METHOD=f"file://{folder}/rendezvous")
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    from areal_like.algorithms import GRPOLoss
    from areal_like.alloc import ModelAllocation
    from areal_like.config import FP8Config, MegatronConfig, MicroBatchConfig, OptimizerConfig, TrainEngineConfig
    from areal_like.engines.megatron.engine import MegatronEngine
    from areal_like.spec import ModelSpec

    config = TrainEngineConfig(
        backend="megatron:d1",
        path=folder,
        init_from_scratch=True,
        disable_dropout=True,
        dtype="bfloat16" if a.device == "cuda" else "float32",
        mb_spec=MicroBatchConfig(max_tokens_per_mb=a.tokens),
        optimizer=OptimizerConfig(lr=1e-6, warmup_steps_proportion=0.0),
        megatron=MegatronConfig(
            fp8_config=FP8Config(recipe=a.fp8, param=a.fp8_param) if a.fp8 else None,
            use_deterministic_algorithms=a.deterministic,
        ),
    )
    engine = MegatronEngine(
        allocation=ModelAllocation.parse("megatron:d1"), config=config, device=a.device, seed=1, total_steps=None
    )
    start = time.monotonic()
    engine.initialize()
    build_seconds = time.monotonic() - start
    batch = _batch(a)
    loss = GRPOLoss(use_decoupled_loss=True)
    step_seconds, peak = _timed(lambda: engine.train_batch(batch, loss), a)
    figures = engine.train_batch(batch, loss)
    forward_seconds, forward_peak = _timed(lambda: engine.forward(batch), a)
    if a.profile:
        _profile(lambda: engine.train_batch(batch, loss))
    spec = ModelSpec.from_path(folder)
    flops = spec.num_layers * spec.layer_flops(context=a.seq // 2) + spec.head_flops()
    tokens = batch.input_ids.numel()
    result = {
        "model": a.model,
        "fp8": a.fp8 and a.fp8 + (" with parameters" if a.fp8_param else ""),
        "deterministic": a.deterministic,
        "tok_s_gpu": round(tokens / step_seconds),
        "tflops_gpu": round(3 * flops * tokens / step_seconds / 1e12, 1),
        "fwd_tflops_gpu": round(flops * tokens / forward_seconds / 1e12, 1),
        "peak_gib": round(peak, 2),
        "fwd_peak_gib": round(forward_peak, 2),
        "step_s": round(step_seconds, 4),
        "build_s": round(build_seconds, 1),
        "loss": figures["loss"],
        "grad_norm": figures["grad_norm"],
        "micro_batches": figures["micro_batches"],
        "transformer_engine": engine.transformer_engine,
    }
    out.write_text(json.dumps(result))
    engine.close()


def _batch(a: argparse.Namespace) -> Any:
    from areal_like.data.batch import PackedBatch

    count = a.micro * a.tokens // a.seq
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, VOCABULARY, (count * a.seq,), generator=generator)
    mask = torch.ones(count, a.seq)
    mask[:, 0] = 0.0
    noise = torch.randn(count * a.seq, generator=generator)
    return PackedBatch(
        tokens,
        torch.arange(0, count + 1) * a.seq,
        {
            "loss_mask": mask.flatten(),
            "advantages": noise,
            "old_log_probs": -12.0 + 0.1 * noise,
            "prox_log_probs": torch.full_like(noise, -12.0),
        },
    )


def _timed(call: Any, a: argparse.Namespace) -> tuple[float, float]:
    """Median seconds of a call after two warm-up calls, and its peak memory in GiB."""
    cuda = a.device == "cuda"
    call(), call()
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    seconds = []
    for _ in range(a.steps):
        start = time.monotonic()
        call()
        if cuda:
            torch.cuda.synchronize()
        seconds.append(time.monotonic() - start)
    return statistics.median(seconds), torch.cuda.max_memory_allocated() / 2**30 if cuda else 0.0


def _profile(call: Any) -> None:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        call()
    print(profiler.key_averages().table(sort_by="self_cuda_time_total", row_limit=25, max_name_column_width=60))
    print(profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=15, max_name_column_width=60))


if __name__ == "__main__":
    sys.exit(main())
