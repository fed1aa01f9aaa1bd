"""How fast the planner is, and what its cost model says beside what was measured.

    python benchmarks/plan.py [--write benchmarks/results/plan.md]

Exits 1 when a bound of the project is broken: a plan for 1,024 GPUs takes at most 2 s, the start of the command
included; the model is within a fifth of every measured training step.
"""

from __future__ import annotations

import argparse
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from datetime import date
from pathlib import Path

BOUND = 2.0  # seconds
FIFTH = 0.2
ROUNDS = 5

MIXTURE, DENSE = "Qwen/Qwen3-30B-A3B", "Qwen/Qwen2.5-32B"
COMMANDS = [
    (f"{MIXTURE}, 16 GPUs", ["--model", MIXTURE, "--gpus", "16", "--batch", "256"]),
    (f"{MIXTURE}, 1,024 GPUs", ["--model", MIXTURE, "--gpus", "1024", "--batch", "2048"]),
    (
        f"{MIXTURE}, 1,024 GPUs, any engine",
        ["--model", MIXTURE, "--gpus", "1024", "--batch", "2048", "--engine", "any"],
    ),
    (
        f"{MIXTURE}, 1,024 GPUs, rollout sglang",
        ["--model", MIXTURE, "--gpus", "1024", "--batch", "2048", "--rollout", "sglang"],
    ),
    (f"{DENSE}, 1,024 GPUs", ["--model", DENSE, "--gpus", "1024", "--batch", "2048"]),
    (
        "deepseek-ai/DeepSeek-V3, 1,024 GPUs, any engine",
        ["--model", "deepseek-ai/DeepSeek-V3", "--gpus", "1024", "--batch", "2048", "--engine", "any"],
    ),
]
MEASURED = [
    # benchmarks/results/train_step.md, and the same plain loop with recompute on an earlier version
    ("Qwen2.5-1.5B, engine", "Qwen/Qwen2.5-1.5B", 28, 16384, False, 437),
    ("Qwen2.5-1.5B, plain loop", "Qwen/Qwen2.5-1.5B", 28, 16384, False, 514),
    ("Qwen2.5-1.5B, plain loop, full recompute, 32,768 tokens", "Qwen/Qwen2.5-1.5B", 28, 32768, True, 349),
    ("8 layers of Qwen3-30B-A3B, engine", MIXTURE, 8, 16384, False, 94),
    ("8 layers of Qwen3-30B-A3B, plain loop", MIXTURE, 8, 16384, False, 99),
]
FITTED = (0, 3)
"""Rows that the constants of the model were fitted to; the others were not used."""


def seconds_of(arguments: list[str]) -> tuple[float, float]:
    """Medians of wall and processor time of the whole command in fresh processes."""
    command = [sys.executable, "-m", "areal_like.cli", "plan", "--gpu-memory", "80GiB", "--seq", "32768", *arguments]
    wall, processor = [], []
    for _ in range(ROUNDS):
        start, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(command, check=True, capture_output=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        wall.append(time.perf_counter() - start)
        processor.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return statistics.median(wall), statistics.median(processor)


def predicted(model: str, layers: int, micro_tokens: int, recompute: bool) -> float:
    """TFLOP/s of a step on one H200: 64 sequences of 1,024 tokens."""
    from areal_like.alloc import ModelAllocation
    from areal_like.preflight.cost import StepJob, step_cost
    from areal_like.preflight.hardware import Hardware
    from areal_like.spec import ModelSpec

    spec = replace(ModelSpec.find(model), num_layers=layers)
    job = StepJob(64, 1024, micro_tokens, recompute)
    cost = step_cost(spec, ModelAllocation.parse("megatron:d1"), Hardware.find("H200"), job)
    return cost.flops_per_second / 1e12


def table(header: list[str], rows: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in [header, ["---"] * len(header), *rows])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, help="also write the tables to this Markdown file")
    options = parser.parse_args()
    times = [(name, *seconds_of(arguments)) for name, arguments in COMMANDS]
    broken = any(wall > BOUND for _, wall, _ in times)
    header = ["plan", "seconds", "processor seconds", "bound of seconds"]
    speed = table(header, [[name, f"{wall:.2f}", f"{cpu:.2f}", f"{BOUND:.0f}"] for name, wall, cpu in times])
    rows = []
    for index, (name, model, layers, micro_tokens, recompute, measured) in enumerate(MEASURED):
        found = predicted(model, layers, micro_tokens, recompute)
        broken |= abs(found / measured - 1) > FIFTH
        fitted = "fitted" if index in FITTED else "not used"
        rows.append([name, f"{found:.0f}", str(measured), f"{found / measured:.2f}", fitted])
    steps = table(["step on one H200", "predicted TFLOP/s", "measured", "ratio", "in the fit"], rows)
    print(speed, steps, "BROKEN: a bound does not hold" if broken else "all bounds hold", sep="\n\n")
    if options.write:
        machine = f"{os.cpu_count()} cores, load average {os.getloadavg()[0]:.1f} at the end"
        options.write.write_text(
            f"# The planner\n\n`python benchmarks/plan.py`, {date.today()}, Python {platform.python_version()},"
            f" {machine}. Median of {ROUNDS} fresh processes each, start of Python included; 32,768 tokens a"
            f" sequence.\n\n{speed}\n\nThe cost model beside the measured steps of `train_step.md`. Links between GPUs"
            " have not been measured: their efficiency is an assumption named in `preflight/cost.py`.\n\n"
            f"{steps}\n\nMany small experts are bound by the host that launches their kernels: the plain loop of the"
            " last row reached 132 TFLOP/s on another machine; the model, fitted to this one, does not foresee that.\n",
            encoding="utf-8",
        )
    return int(broken)


if __name__ == "__main__":
    sys.exit(main())
