"""How well layers are split over pipeline stages: the slowest stage beside a perfect split and beside another system's.

    python benchmarks/pipeline.py

Arithmetic only. A stage's work is that of `spec.stages`: its layers by kind, and on the last one the vocabulary
projection. "Perfect" is the whole work divided by p, which whole layers cannot always reach.
"""

from __future__ import annotations

import argparse

from areal_like.spec import ModelSpec, stage_sizes
from areal_like.spec.stages import StageCount, layer_costs

STAGES = (2, 4, 6, 8, 12)
AREAL: dict[str, list[list[int]]] = {
    "Qwen/Qwen3-0.6B": [
        [14, 14],
        [2, 12, 12, 2],
        [0, 1, 7, 10, 10, 0],
        [0, 1, 1, 1, 5, 10, 10, 0],
        [0, *[1] * 8, 10, 10, 0],
    ],
    "Qwen/Qwen2.5-1.5B": [
        [14, 14],
        [5, 9, 9, 5],
        [2, 6, 6, 6, 6, 2],
        [0, 4, 4, 5, 5, 5, 5, 0],
        [0, 1, 1, 1, 1, *[4] * 6, 0],
    ],
    "Qwen/Qwen3-30B-A3B": [[48 // p] * p for p in STAGES],
    "Qwen/Qwen3-235B-A22B": [
        [47, 47],
        [23, 24, 24, 23],
        [15, *[16] * 4, 15],
        [11, *[12] * 6, 11],
        [7, *[8] * 10, 7],
    ],
}
"""Layers of each stage that AReaL 1.0.4 gave when its splitter was run on these shapes (by parameters)."""


def slowest(spec: ModelSpec, sizes: list[int]) -> float:
    """Forward operations for a token in the stage that has most."""
    costs, done, most = layer_costs(spec), 0, 0.0
    for number, size in enumerate(sizes):
        head = spec.head_flops() if number == len(sizes) - 1 else 0.0
        most = max(most, sum(costs[done : done + size]) + head)
        done += size
    return most


def short(sizes: list[int]) -> str:
    """7, 8, 8, 8, 7 as 7, 3 x 8, 7."""
    runs: list[list[int]] = []
    for size in sizes:
        if runs and runs[-1][0] == size:
            runs[-1][1] += 1
        else:
            runs.append([size, 1])
    return ", ".join(f"{times} x {size}" if times > 2 else ", ".join([str(size)] * times) for size, times in runs)


def table() -> str:
    rows = [
        "| model | p | layers of each stage | slowest : perfect | AReaL | slowest : ours |",
        "|---|---|---|---|---|---|",
    ]
    for name, others in AREAL.items():
        spec = ModelSpec.find(name)
        whole = sum(layer_costs(spec)) + spec.head_flops()
        for p, theirs in zip(STAGES, others, strict=True):
            assert len(theirs) == p and sum(theirs) == spec.num_layers
            ours = stage_sizes(spec, StageCount(p))
            pace = slowest(spec, ours)
            rows.append(
                f"| {name.split('/')[1]} | {p} | {short(ours)} | {pace / (whole / p):.2f} | {short(theirs)} | "
                f"{slowest(spec, theirs) / pace:.2f} |"
            )
    return "\n".join(rows)


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    print(table())
