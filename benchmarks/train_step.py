"""The engine's whole RL training step beside a plain Megatron-Core loop, in one run on one GPU.

    python benchmarks/train_step.py --reference reference_loop.py [--model dense|moe] [--fp8 RECIPE] [--json FILE]
    python benchmarks/train_step.py [--model dense|moe] [--fp8 RECIPE [--fp8-param]] [--deterministic] [--entropy]
    python benchmarks/train_step.py --set mb_spec.max_tokens_per_mb=8192 \\
        --variant "remainders: megatron.use_precision_aware_optimizer=true" \\
        --variant "fp8: megatron.fp8_config={recipe: tensorwise}, gradient_checkpointing=true"

The reference is a script that prints one JSON line with `tok_s_gpu`, `tflops_gpu` and `peak_gib` (a plain loop over
Megatron-Core with TransformerEngine and fused cross-entropy on packed micro-batches). The engine does what
reinforcement learning needs: log-probabilities from the logits, the clipped policy loss, gradient clipping, the
optimizer. Both train one shape (dense: Qwen2.5-1.5B; moe: 8 layers of Qwen3-30B-A3B) on four micro-batches of 16,384
tokens in sequences of 1,024; FLOPs are counted alike. Figures of different runs are not comparable: only the ratio is a
result.

`--set KEY=VALUE` changes a key of the `actor` section for every row, `--variant "NAME: KEY=VALUE, ..."` adds a row that
differs from the first in these keys. Each row is a process of its own. Keys that the training loop acts on, and not the
engine (offload between uses, ppo_n_minibatches), change nothing here. `predicted` is what `areal_like.spec.memory` says
the allocator's peak should be.
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
from collections.abc import Sequence
from dataclasses import replace
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
    parser.add_argument("--entropy", action="store_true", help="report the policy's entropy, as a training run does")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="of the actor, for every row")
    parser.add_argument(
        "--variant", action="append", default=[], metavar='"NAME: KEY=VALUE, ..."', help="another row of the engine"
    )
    parser.add_argument("--profile", action="store_true", help="print where the time of one step goes")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    arguments.set += _switches(arguments)
    variants = [read_variant(text) for text in arguments.variant]
    for keys in ([], *(keys for _, keys in variants)):
        configure(arguments, keys, ".")  # a key that is wrong is said before anything runs
    try:
        results: dict[str, Any] = {"engine": run_engine(arguments)}
    except EngineFailed as error:
        raise SystemExit(str(error)) from None
    print(json.dumps(results["engine"]), flush=True)
    for name, keys in variants:
        try:
            found = run_engine(arguments, keys)
        except EngineFailed as error:
            found = {"failed": str(error)}
        results.setdefault("variants", {})[name] = found
        print(json.dumps({"variant": name, **found}), flush=True)
    if arguments.reference is not None:
        results["reference"] = run_reference(arguments)
        print(json.dumps(results["reference"]), flush=True)
        ours, theirs = results["engine"], results["reference"]
        print(f"tokens/s: {ours['tok_s_gpu'] / theirs['tok_s_gpu']:.3f} x reference")
        print(f"peak memory: {ours['peak_gib'] / theirs['peak_gib']:.3f} x reference")
    print("\n".join(table(results)))
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2))
    return int(any("failed" in found for found in results.get("variants", {}).values()))


def _switches(a: argparse.Namespace) -> list[str]:
    """The options that are keys, as keys."""
    keys = [f"megatron.fp8_config={{recipe: {a.fp8}, param: {str(a.fp8_param).lower()}}}"] if a.fp8 else []
    return keys + (["megatron.use_deterministic_algorithms=true"] if a.deterministic else [])


def read_variant(text: str) -> tuple[str, list[str]]:
    """A name and its keys, of `NAME: KEY=VALUE, KEY=VALUE`; commas inside brackets belong to a value."""
    name, colon, rest = text.partition(":")
    keys, depth = [""], 0
    for letter in rest:
        depth += (letter in "[{") - (letter in "]}")
        if letter == "," and not depth:
            keys.append("")
        else:
            keys[-1] += letter
    keys = [key.strip() for key in keys if key.strip()]
    if not colon or not name.strip() or not keys or not all("=" in key for key in keys):
        raise SystemExit(f"--variant {text!r}: write it as 'NAME: KEY=VALUE, KEY=VALUE'")
    return name.strip(), keys


def table(results: dict[str, Any]) -> list[str]:
    """Lines of Markdown: a row for the engine, each variant, and the reference."""
    reference = results.get("reference")
    rows = {"engine": results["engine"], **results.get("variants", {})} | (
        {"reference": reference} if reference else {}
    )
    base = "reference" if reference else "engine"
    lines = [
        "",
        f"| row | tokens/s | x {base} | TFLOP/s | forward TFLOP/s | peak GiB | x {base} | predicted GiB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    first = rows[base]
    for name, row in rows.items():
        if "failed" in row:
            lines.append(f"| {name} | failed: {row['failed']} | | | | | | |")
            continue
        memory = row["peak_gib"] / first["peak_gib"] if first["peak_gib"] else float("nan")
        predicted = f"{row['predicted_gib']:.1f}" if "predicted_gib" in row else ""
        lines.append(
            f"| {name} | {row['tok_s_gpu']:,} | {row['tok_s_gpu'] / first['tok_s_gpu']:.3f} | {row['tflops_gpu']} "
            f"| {row.get('fwd_tflops_gpu', '')} | {row['peak_gib']:.1f} | {memory:.3f} | {predicted} |"
        )
    return lines


def run_reference(a: argparse.Namespace) -> dict[str, Any]:
    """The reference's own JSON line."""
    command = [sys.executable, str(a.reference), "--model", a.model, "--tokens", str(a.tokens), "--seq", str(a.seq)]
    command += ["--micro", str(a.micro), "--steps", str(a.steps)]
    command += ["--layers", str(a.layers)] if a.layers else []
    command += ["--fp8", a.fp8] if a.fp8 else []
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29519"}
    done = subprocess.run(command, env={**os.environ, **alone}, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        raise SystemExit(f"the reference failed ({done.returncode}):\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    result: dict[str, Any] = json.loads(lines[-1])
    return result


class EngineFailed(RuntimeError):
    """The engine's process ended with an error, which it printed."""


def run_engine(a: argparse.Namespace, keys: Sequence[str] = ()) -> dict[str, Any]:
    """The engine in a process of its own, so that no two share the GPU's memory.

    Raises:
        EngineFailed: it did not come to an end.
    """
    with tempfile.TemporaryDirectory() as folder:
        shape = {**COMMON, **SHAPES[a.model]}
        if a.layers:
            shape["num_hidden_layers"] = a.layers
        (Path(folder) / "config.json").write_text(json.dumps(shape))
        out = Path(folder) / "result.json"
        context = torch.multiprocessing.get_context("spawn")
        process = context.Process(target=_engine, args=(a, list(keys), folder, out))
        process.start()
        process.join()
        if process.exitcode:
            raise EngineFailed(f"the engine failed with exit code {process.exitcode}")
        result: dict[str, Any] = json.loads(out.read_text())
        return result


CONFIGURATION = """
experiment_name: benchmark
trial_name: train-step
rollout: {{backend: "huggingface:d1"}}
train_dataset: {{path: reasoning_gym/chain_sum}}
actor:
  backend: megatron:d1
  path: {folder}
  init_from_scratch: true
  disable_dropout: true
  dtype: {dtype}
  use_decoupled_loss: true
  ppo_n_minibatches: 1
  mb_spec: {{max_tokens_per_mb: {tokens}}}
  optimizer: {{lr: 1e-6, warmup_steps_proportion: 0.0}}
"""


def configure(a: argparse.Namespace, keys: Sequence[str], folder: str) -> Any:
    """The `actor` section of a run, `--set` and `keys` (of a variant) applied.

    Raises:
        SystemExit: with all that is wrong with a key.
    """
    from areal_like.config import ConfigError, load_config

    dtype = "bfloat16" if a.device == "cuda" else "float32"
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        file.write(CONFIGURATION.format(folder=json.dumps(folder), dtype=dtype, tokens=a.tokens))
        file.flush()
        try:
            return load_config(file.name, [f"actor.{key}" for key in (*a.set, *keys)]).actor
        except ConfigError as error:
            raise SystemExit(str(error)) from None


def _engine(a: argparse.Namespace, keys: list[str], folder: str, out: Path) -> None:
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", AREAL_LIKE_INIT_METHOD=f"file://{folder}/rendezvous")
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    from areal_like.algorithms.settings import policy_loss
    from areal_like.alloc import ModelAllocation
    from areal_like.engines.megatron.engine import MegatronEngine
    from areal_like.spec import ModelSpec

    config = configure(a, keys, folder)
    engine = MegatronEngine(
        allocation=ModelAllocation.parse(config.backend), config=config, device=a.device, seed=1, total_steps=None
    )
    start = time.monotonic()
    engine.initialize()
    build_seconds = time.monotonic() - start
    batch = make_batch(a)
    loss = replace(policy_loss(config), report_entropy=a.entropy)
    step_seconds, peak = timed(lambda: engine.train_batch(batch, loss), a)
    figures = engine.train_batch(batch, loss)
    forward_seconds, forward_peak = timed(lambda: engine.forward(batch), a)
    if a.profile:
        _profile(lambda: engine.train_batch(batch, loss))
    spec = ModelSpec.from_path(folder)
    flops = spec.num_layers * spec.layer_flops(context=a.seq // 2) + spec.head_flops()
    tokens = batch.input_ids.numel()
    predicted = _predicted(a, config, spec, int(figures["micro_batches"]))
    fp8 = config.megatron.fp8_config
    result = {
        "model": a.model,
        "keys": [*a.set, *keys],
        "fp8": fp8 and fp8.recipe + (" with parameters" if fp8.param else ""),
        "deterministic": config.megatron.use_deterministic_algorithms,
        "tok_s_gpu": round(tokens / step_seconds),
        "tflops_gpu": round(3 * flops * tokens / step_seconds / 1e12, 1),
        "fwd_tflops_gpu": round(flops * tokens / forward_seconds / 1e12, 1),
        "peak_gib": round(peak, 2),
        "predicted_gib": round(predicted["update"], 2),
        "fwd_peak_gib": round(forward_peak, 2),
        "fwd_predicted_gib": round(predicted["log-probs"], 2),
        "step_s": round(step_seconds, 4),
        "build_s": round(build_seconds, 1),
        "loss": figures["loss"],
        "grad_norm": figures["grad_norm"],
        "micro_batches": figures["micro_batches"],
        "transformer_engine": engine.transformer_engine,
    }
    out.write_text(json.dumps(result))
    engine.close()


def _predicted(a: argparse.Namespace, config: Any, spec: Any, micro_batches: int) -> dict[str, float]:
    """GiB that PyTorch's allocator should report at the peak of each phase, on a GPU."""
    from areal_like.alloc import ModelAllocation
    from areal_like.preflight.memory_options import memory_options
    from areal_like.spec.memory import GIB, MemoryJob, predict

    job = MemoryJob(
        micro_tokens=a.micro * a.tokens // micro_batches,
        seq=a.seq,
        micro_batches=micro_batches,
        **memory_options(config, trained=True),
    )
    plan = predict(spec, ModelAllocation.parse(config.backend), job)
    return {phase.name: phase.allocated / GIB for phase in plan.ranks[0].phases}


def make_batch(a: argparse.Namespace) -> Any:
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


def timed(call: Any, a: argparse.Namespace) -> tuple[float, float]:
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
