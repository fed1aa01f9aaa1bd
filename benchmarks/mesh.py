"""How fast the mesh of a world of 131,072 ranks answers, beside Megatron-Core's own rank generator.

    python benchmarks/mesh.py [--write benchmarks/results/mesh.md]

Exits 1 when a bound of the project is broken: every group of one rank within 1 ms, all groups of all ranks within 1 s.
Megatron-Core lists all groups to know one rank's; the generators that `initialize_model_parallel` takes them from are
measured once on the same world, and the groups of both are compared.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from datetime import date
from functools import partial
from pathlib import Path

from areal_like.alloc import Mesh, ModelAllocation

RANK_BOUND, ALL_BOUND = 1e-3, 1.0  # seconds
LAYOUTS = ("megatron:(attn:d512p16t8c2|ffn:e64)", "megatron:(attn:d2048p8t8|ffn:t2e128)")
"""131,072 ranks."""
ONE_STAGE = "megatron:d16384t8"
"""Also 131,072, but two of a rank's groups are the whole world: a tuple of it alone takes more than the bound."""
ATTENTION = ("tp", "cp", "dp", "pp", "dp-cp", "tp-cp", "tp-pp", "tp-dp-cp")
EXPERT = {"etp": "tp", "ep": "ep", "edp": "dp", "etp-ep": "tp-ep", "etp-ep-pp": "tp-ep-pp"}
"""Our name of a group of the expert grid: Megatron-Core's."""
NAMES = (*ATTENTION, *EXPERT)
ROUNDS = 5


def seconds(work: Callable[[], object]) -> float:
    """Processor time, the median over rounds: nothing here waits, and other work on the machine does not count."""
    taken = []
    for _ in range(ROUNDS):
        start = time.process_time()
        work()
        taken.append(time.process_time() - start)
    return statistics.median(taken)


def groups_of(mesh: Mesh, rank: int) -> list[tuple[int, ...]]:
    """Every group of one rank."""
    return [mesh.group(name, rank) for name in NAMES]


def measure(text: str) -> tuple[list[tuple[str, str, str]], bool]:
    """Rows of the table for one layout, and whether a bound is broken."""
    mesh = ModelAllocation.parse(text).mesh()
    ranks = range(0, mesh.world_size, mesh.world_size // 50)
    one = max(seconds(partial(groups_of, mesh, rank)) for rank in ranks)
    everything = seconds(lambda: [list(mesh.groups(name)) for name in NAMES])
    places = seconds(lambda: [mesh.coordinates(rank) for rank in range(mesh.world_size)])
    start = time.process_time()
    theirs = megatron_groups(mesh)
    megatron = time.process_time() - start
    for name, groups in theirs.items():
        assert list(mesh.groups(name)) == groups, name
    members = mesh.world_size * len(NAMES)
    limit = "" if text == ONE_STAGE else f"{RANK_BOUND * 1e3:.0f} ms"
    return [
        (f"`{text}`, {mesh.world_size:,} ranks", "", ""),
        (f"{len(NAMES)} groups of one rank, the slowest of 51", f"{one * 1e3:.3f} ms", limit),
        (f"all groups, {members:,} members", f"{everything:.2f} s", f"{ALL_BOUND:.0f} s"),
        ("coordinates of all ranks", f"{places:.2f} s", ""),
        (
            "- Megatron-Core's RankGenerator, all groups (ratio)",
            f"{megatron:.2f} s ({megatron / everything:.0f} x)",
            "",
        ),
    ], (one > RANK_BOUND and bool(limit)) or everything > ALL_BOUND


def megatron_groups(mesh: Mesh) -> dict[str, list[tuple[int, ...]]]:
    """The same groups from the generators that `initialize_model_parallel` uses."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no Apex
        from megatron.core.parallel_state import RankGenerator
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
    results = [measure(text) for text in (*LAYOUTS, ONE_STAGE)]
    text = table([row for rows, _ in results for row in rows])
    broken = any(bad for _, bad in results)
    print(text)
    print("BROKEN: a bound does not hold" if broken else "all bounds hold")
    if options.write:
        machine = f"{os.cpu_count()} cores ({processor()}), load average {os.getloadavg()[0]:.1f} at the end"
        options.write.write_text(
            f"# The mesh of a large world\n\n`python benchmarks/mesh.py`, {date.today()}, Python"
            f" {platform.python_version()}, {machine}. Processor time, medians of {ROUNDS} rounds.\n\n{text}\n\n"
            f"In `{ONE_STAGE}` two of a rank's groups are the whole world; the time is that of their tuples.\n",
            encoding="utf-8",
        )
    return int(broken)


if __name__ == "__main__":
    sys.exit(main())
