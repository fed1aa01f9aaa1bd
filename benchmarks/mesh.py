"""How fast the mesh of a world of 131,072 ranks answers, beside Megatron-Core's own rank generator.

    python benchmarks/mesh.py [--write benchmarks/results/mesh.md]

Exits 1 when a bound of the project is broken: every group of one rank within 1 ms, all groups of all ranks within 1 s.
Megatron-Core must build all groups to know one rank's; it is measured on a world of 4,096 ranks, because its time grows
with the world and is minutes at the full size. The groups of both are compared there.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path

RANK_BOUND, ALL_BOUND = 1e-3, 1.0  # seconds
LAYOUTS = (
    ("megatron:(attn:d512p16t8c2|ffn:e64)", "megatron:(attn:d16p16t8c2|ffn:e64)"),
    ("megatron:(attn:d2048p8t8|ffn:t2e128)", "megatron:(attn:d64p8t8|ffn:t2e128)"),
)
"""131,072 ranks; the same with 4,096."""
ATTENTION = ("tp", "cp", "dp", "pp", "dp-cp", "tp-cp", "tp-pp", "tp-dp-cp")
EXPERT = {"etp": "tp", "ep": "ep", "edp": "dp", "etp-ep": "tp-ep", "etp-ep-pp": "tp-ep-pp"}
"""Our name of a group of the expert grid: Megatron-Core's."""
NAMES = (*ATTENTION, *EXPERT)
ROUNDS = 5


def seconds(work: Callable[[], object]) -> float:
    """Median over rounds."""
    taken = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        work()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def measure(large: str, small: str) -> tuple[list[tuple[str, str, str]], bool]:
    """Rows of the table for one layout, and whether a bound is broken."""
    from areal_like.alloc import ModelAllocation

    mesh = ModelAllocation.parse(large).mesh()
    ranks = range(0, mesh.world_size, mesh.world_size // 50)
    one = max(seconds(lambda rank=rank: [mesh.group(name, rank) for name in NAMES]) for rank in ranks)
    everything = seconds(lambda: [list(mesh.groups(name)) for name in NAMES])
    places = seconds(lambda: [mesh.coordinates(rank) for rank in range(mesh.world_size)])
    little = ModelAllocation.parse(small).mesh()
    ours = seconds(lambda: [list(little.groups(name)) for name in NAMES])
    theirs = seconds(lambda: megatron_groups(little))
    for name, groups in megatron_groups(little).items():
        assert list(little.groups(name)) == groups, name
    members = sum(mesh.world_size for _ in NAMES)
    return [
        (f"`{large}`, {mesh.world_size:,} ranks", "", ""),
        (f"{len(NAMES)} groups of one rank, the slowest of 51", f"{one * 1e3:.3f} ms", f"{RANK_BOUND * 1e3:.0f} ms"),
        (f"all groups, {members:,} members", f"{everything:.2f} s", f"{ALL_BOUND:.0f} s"),
        ("coordinates of all ranks", f"{places:.2f} s", ""),
        (f"all groups of `{small}`, {little.world_size:,} ranks", f"{ours * 1e3:.1f} ms", ""),
        ("- Megatron-Core's RankGenerator (ratio)", f"{theirs * 1e3:.0f} ms ({theirs / ours:.0f} x)", ""),
    ], one > RANK_BOUND or everything > ALL_BOUND


def megatron_groups(mesh: object) -> dict[str, list[tuple[int, ...]]]:
    """The same groups from the generators that `initialize_model_parallel` uses."""
    from megatron.core.parallel_state import RankGenerator

    from areal_like.alloc import Mesh

    assert isinstance(mesh, Mesh)
    order = "tp-cp-ep-dp-pp"
    attention = RankGenerator(tp=mesh.tp, ep=1, dp=mesh.dp, pp=mesh.pp, cp=mesh.cp, order=order)
    expert = RankGenerator(tp=mesh.etp, ep=mesh.ep, dp=mesh.edp, pp=mesh.pp, cp=1, order=order)
    groups = {name: attention.get_ranks(name) for name in ATTENTION}
    groups |= {ours: expert.get_ranks(theirs) for ours, theirs in EXPERT.items()}
    return {name: [tuple(group) for group in found] for name, found in groups.items()}


def table(rows: list[tuple[str, str, str]]) -> str:
    cells = [("what", "measured", "bound"), *rows]
    widths = [max(len(row[i]) for row in cells) for i in range(3)]
    lines = ["| " + " | ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) + " |" for row in cells]
    return "\n".join([lines[0], "|" + "|".join("-" * (w + 2) for w in widths) + "|", *lines[1:]])


def processor() -> str:
    """The machine's kind of processor."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, help="also write the table to this Markdown file")
    options = parser.parse_args()
    results = [measure(*layout) for layout in LAYOUTS]
    text = table([row for rows, _ in results for row in rows])
    broken = any(bad for _, bad in results)
    print(text)
    print("BROKEN: a bound does not hold" if broken else "all bounds hold")
    if options.write:
        machine = f"{os.cpu_count()} cores ({processor()}), load average {os.getloadavg()[0]:.1f} at the end"
        options.write.write_text(
            f"# The mesh of a large world\n\n`python benchmarks/mesh.py`, {date.today()}, Python"
            f" {platform.python_version()}, {machine}. Medians of {ROUNDS} rounds.\n\n{text}\n",
            encoding="utf-8",
        )
    return int(broken)


if __name__ == "__main__":
    sys.exit(main())
