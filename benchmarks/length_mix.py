"""Sequences of very different lengths: how full the engine's micro-batches are, and how fast it trains on them.

    python benchmarks/length_mix.py                             # packing alone, on a CPU
    python benchmarks/length_mix.py --train [--model dense]     # one GPU: the engine's train_batch, about 90 s
    python benchmarks/length_mix.py --train --device cpu --layers 1 --sequences 4 --longest 48 --budget 96 --steps 1

Lengths are log-normal (median 600 tokens, sigma 1: mean about 950), cut to 64 ... 8,192. Two shares are told of what
`pack_micro_batches` makes: tokens over the budget of all micro-batches, and over as many micro-batches of the longest
one's size. (A micro-batch is never padded to its budget: the rows that are computed hold nothing but these tokens and
what t, c and FP8 round up.) Beside the number of micro-batches is tokens over budget, rounded up: none needs fewer.

Training: one step on these sequences and one on as many tokens in sequences of 1,024, by the same engine in turns.
Attention costs more in long sequences, so FLOP/s are told beside tokens/s (the latter are to be within 5 %).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

MEDIAN, SIGMA, SHORTEST, LONGEST = 600, 1.0, 64, 8192
LEAST_FILLED, LEAST_SPEED = 0.97, 0.95


def log_normal_lengths(count: int, *, seed: int, shortest: int = SHORTEST, longest: int = LONGEST) -> list[int]:
    """Lengths with the median and spread of this benchmark, cut to the two bounds."""
    chance = random.Random(seed)
    drawn = (round(chance.lognormvariate(math.log(MEDIAN), SIGMA)) for _ in range(count))
    return [min(longest, max(shortest, n)) for n in drawn]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", action="store_true", help="the engine too, not the packing alone")
    parser.add_argument("--model", choices=("dense", "moe"), default="dense", help="shapes of train_step.py")
    parser.add_argument("--layers", type=int, help="fewer layers than the shape has")
    parser.add_argument("--sequences", type=int, default=512)
    parser.add_argument("--longest", type=int, default=LONGEST, help="tokens of the longest sequence")
    parser.add_argument("--budget", type=int, default=16384, help="tokens of a micro-batch")
    parser.add_argument("--attention", choices=("auto", "fused", "flex"), default="auto", help="attention_backend")
    parser.add_argument("--steps", type=int, default=2, help="timed steps of each kind")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    results: dict[str, Any] = {"packing": packing()}
    filled = statistics.mean(r["of_budget"] for r in results["packing"] if r["sequences"] == 512)
    passed = filled >= LEAST_FILLED
    print(f"512 sequences fill {filled:.1%} of the budget")
    if arguments.train:
        results["training"] = training = train(arguments)
        for row in training["rows"]:
            print(json.dumps(row))
        print(f"tokens/s: {training['ratio']:.3f} x equal lengths; TFLOP/s: {training['flops_ratio']:.3f} x")
        passed = passed and training["ratio"] >= LEAST_SPEED
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2))
    return 0 if passed else 1


def packing() -> list[dict[str, Any]]:
    """Shares over five batches of each kind, and the longest time of one."""
    from areal_like.spec import pack_micro_batches

    rows: list[dict[str, Any]] = []
    print(f"{'sequences':>9} {'budget':>7} {'batches':>15} {'of budget':>9} {'of longest':>10} {'ms':>6}")
    for count, budget in ((68, 8192), (68, 16384), (512, 8192), (512, 16384), (10000, 8192), (10000, 16384)):
        found = []
        for seed in range(5):
            lengths = log_normal_lengths(count, seed=seed)
            start = time.process_time()
            bins = pack_micro_batches(lengths, budget)
            found.append((lengths, [sum(lengths[i] for i in b) for b in bins], time.process_time() - start))
        row: dict[str, Any] = {
            "sequences": count,
            "budget": budget,
            "micro_batches": [len(loads) for _, loads, _ in found],
            "fewest": [-(-sum(lengths) // budget) for lengths, _, _ in found],
            "of_budget": statistics.mean(sum(lengths) / len(loads) / budget for lengths, loads, _ in found),
            "of_longest": statistics.mean(sum(lengths) / len(loads) / max(loads) for lengths, loads, _ in found),
            "ms": max(seconds for _, _, seconds in found) * 1e3,
        }
        rows.append(row)
        needed = f"{statistics.mean(row['micro_batches']):.1f} of {statistics.mean(row['fewest']):.1f}"
        shares = f"{row['of_budget']:>9.1%} {row['of_longest']:>10.1%}"
        print(f"{count:>9} {budget:>7} {needed:>15} {shares} {row['ms']:>6.1f}")
    return rows


def train(a: argparse.Namespace) -> dict[str, Any]:
    """The engine in this process, on both kinds of batches in turns."""
    from train_step import COMMON, SHAPES

    with tempfile.TemporaryDirectory() as folder:
        shape = {**COMMON, **SHAPES[a.model]}
        if a.layers:
            shape["num_hidden_layers"] = a.layers
        (Path(folder) / "config.json").write_text(json.dumps(shape))
        return _train(a, folder)


def _train(a: argparse.Namespace, folder: str) -> dict[str, Any]:
    import torch

    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", AREAL_LIKE_INIT_METHOD=f"file://{folder}/rendezvous")
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    from areal_like.algorithms import GRPOLoss
    from areal_like.alloc import ModelAllocation
    from areal_like.config import MegatronConfig, MicroBatchConfig, OptimizerConfig, TrainEngineConfig
    from areal_like.engines.megatron.engine import MegatronEngine
    from areal_like.spec import ModelSpec

    mixed = log_normal_lengths(a.sequences, seed=0, longest=a.longest)
    equal = min(1024, a.longest)
    rest = sum(mixed) % equal
    kinds = {"log-normal": mixed, "equal": [equal] * (sum(mixed) // equal) + [rest] * (rest > 0)}
    config = TrainEngineConfig(
        backend="megatron:d1",
        path=folder,
        init_from_scratch=True,
        disable_dropout=True,
        dtype="bfloat16" if a.device == "cuda" else "float32",
        mb_spec=MicroBatchConfig(max_tokens_per_mb=a.budget),
        optimizer=OptimizerConfig(lr=1e-6, warmup_steps_proportion=0.0),
        megatron=MegatronConfig(attention_backend=a.attention),
    )
    engine = MegatronEngine(
        allocation=ModelAllocation.parse("megatron:d1"), config=config, device=a.device, seed=1, total_steps=None
    )
    engine.initialize()
    spec = ModelSpec.from_path(folder)
    batches = {kind: _batch(lengths) for kind, lengths in kinds.items()}
    loss = GRPOLoss(use_decoupled_loss=True)
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    figures: dict[str, dict[str, float]] = {}
    for step in range(a.steps + 1):  # the first compiles, and warms up
        for kind, batch in batches.items():
            start = time.monotonic()
            figures[kind] = engine.train_batch(batch, loss)
            if a.device == "cuda":
                torch.cuda.synchronize()
            if step:
                seconds[kind].append(time.monotonic() - start)
    engine.close()
    rows = []
    for kind, lengths in kinds.items():
        tokens, taken = sum(lengths), statistics.median(seconds[kind])
        # A token sees on average half of its sequence: weighed by tokens, sum(n * n / 2) / sum(n).
        context = round(sum(n * n for n in lengths) / 2 / tokens)
        flops = 3 * tokens * (spec.num_layers * spec.layer_flops(context=context) + spec.head_flops())
        count = int(figures[kind]["micro_batches"])
        rows.append(
            {
                "lengths": kind,
                "sequences": len(lengths),
                "tokens": tokens,
                "micro_batches": count,
                "of_budget": round(tokens / count / a.budget, 4),
                "step_s": round(taken, 4),
                "tok_s": round(tokens / taken),
                "tflops": round(flops / taken / 1e12, 1),
            }
        )
    mix, even = rows
    return {
        "rows": rows,
        "ratio": even["step_s"] / mix["step_s"],
        "flops_ratio": mix["tflops"] / even["tflops"] if even["tflops"] else 0.0,
    }


def _batch(lengths: list[int]) -> Any:
    import torch
    from train_step import VOCABULARY

    from areal_like.data.batch import PackedBatch

    generator = torch.Generator().manual_seed(0)
    tokens = sum(lengths)
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    mask = torch.ones(tokens)
    mask[bounds[:-1]] = 0.0
    noise = torch.randn(tokens, generator=generator)
    fields = {"loss_mask": mask, "advantages": noise, "old_log_probs": -12.0 + 0.1 * noise}
    fields["prox_log_probs"] = torch.full_like(noise, -12.0)
    return PackedBatch(torch.randint(0, VOCABULARY, (tokens,), generator=generator), bounds, fields)


if __name__ == "__main__":
    sys.exit(main())
