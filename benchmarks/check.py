"""How fast the check is: one file from a cold start, a thousand files, one layout.

    python benchmarks/check.py [--write benchmarks/results/check.md]

Exits 1 when a bound of the project is broken: `areal-like check` of one file within 0.5 s, and within 0.3 s above a
bare interpreter that imports pydantic and lark; 1,000 files within 10 s; a dense layout within 50 microseconds. Every
one of the thousand files is another job, half of them with faults, so that alternatives are searched too.

The check is one thread that waits for nothing, so on an idle machine the time on the clock is its computing time. The
bounds are held against that, the least of several rounds, which other work on the machine disturbs little.
"""

from __future__ import annotations

import argparse
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path
from typing import NamedTuple

TOTAL_BOUND, ABOVE_BOUND = 0.5, 0.3  # seconds
FILES, FILES_BOUND = 1000, 10.0
LAYOUT_BOUND = 50.0  # microseconds
ROUNDS = 9
COMMAND = Path(sys.executable).with_name("areal-like")


class Cost(NamedTuple):
    """Seconds of a fresh process: on the clock, and of computing (user and system)."""

    wall: float
    cpu: float


def cost(command: list[str], *, status: int) -> Cost:
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True)
    wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == status, done.stdout + done.stderr
    return Cost(wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)


def cold(good: Path, bad: Path) -> list[Cost]:
    """The least of a good file, of a file with faults, and of the bare interpreter; they take turns."""
    commands = [
        ([str(COMMAND), "check", str(good)], 0),
        ([str(COMMAND), "check", str(bad)], 1),
        ([sys.executable, "-c", "import pydantic, lark; pydantic.BaseModel"], 0),
    ]
    rounds = [[cost(command, status=status) for command, status in commands] for _ in range(ROUNDS)]
    return [Cost(min(c.wall for c in costs), min(c.cpu for c in costs)) for costs in zip(*rounds, strict=True)]


def write_files(folder: Path) -> None:
    from areal_like.preflight.examples import BASE_JOB

    for number in range(FILES):
        t, d = (4, 2) if number % 4 < 2 else (3, 2)  # 3 does not divide the heads
        text = BASE_JOB.replace("megatron:d4", f"megatron:d{d}t{t}").replace(
            "batch_size: 32", f"batch_size: {number + 1}"
        )
        (folder / f"{number:04}.yaml").write_text(text.replace("lr: 1e-6", f"lr: {number + 1}e-9"), encoding="utf-8")


def layout_microseconds() -> float:
    """Median over rounds of `check_layout` of legal layouts of a dense model."""
    from areal_like.alloc import ModelAllocation
    from areal_like.preflight import check_layout
    from areal_like.spec import ModelSpec

    spec = ModelSpec.find("Qwen/Qwen3-0.6B")
    layouts = [
        ModelAllocation.parse(f"megatron:d{d}t{t}p{p}") for d in range(1, 9) for t in (1, 2, 4, 8) for p in (1, 2, 4)
    ]
    rounds = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        for layout in layouts:
            assert check_layout(layout, spec) == []
        rounds.append((time.perf_counter() - start) / len(layouts) * 1e6)
    return statistics.median(rounds)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, help="also write the table to this Markdown file")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_files(folder)
        good, bad, bare = cold(folder / "0000.yaml", folder / "0002.yaml")
        many = cost([str(COMMAND), "check", *map(str, sorted(folder.glob("*.yaml")))], status=1)
    layout = layout_microseconds()
    rows = [
        row("cold `areal-like check`, a good file", good, TOTAL_BOUND),
        row("the same, a file with faults and alternatives", bad, TOTAL_BOUND),
        row("bare interpreter with pydantic and lark", bare, None),
        row("the check above it", Cost(good.wall - bare.wall, good.cpu - bare.cpu), ABOVE_BOUND),
        row(f"{FILES} files, half of them with faults", many, FILES_BOUND),
        ("`check_layout` of a dense model", f"{layout:.1f} us", "", f"{LAYOUT_BOUND:g} us", layout <= LAYOUT_BOUND),
    ]
    text = table([row[:4] for row in rows])
    broken = [row[0] for row in rows if not row[4]]
    print(text)
    print("BROKEN: " + ", ".join(broken) if broken else "all bounds hold")
    if options.write:
        options.write.write_text(report(text), encoding="utf-8")
    return int(bool(broken))


def row(what: str, taken: Cost, bound: float | None) -> tuple[str, str, str, str, bool]:
    limit = "" if bound is None else f"{bound:g} s"
    return what, f"{taken.cpu:.3f} s", f"{taken.wall:.3f} s", limit, bound is None or taken.cpu <= bound


def table(rows: list[tuple[str, ...]]) -> str:
    cells = [("what", "computing", "on the clock", "bound"), *rows]
    widths = [max(len(row[i]) for row in cells) for i in range(4)]
    lines = ["| " + " | ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) + " |" for row in cells]
    return "\n".join([lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]])


def report(text: str) -> str:
    load = ", ".join(f"{n:.1f}" for n in os.getloadavg())
    return (
        f"# The check: how fast\n\n`python benchmarks/check.py`, {date.today()}, Python {platform.python_version()},"
        f" {os.cpu_count()} cores, load averages {load} at the end (other work was running when they are above 1)."
        f"\n\n{text}\n"
    )


if __name__ == "__main__":
    sys.exit(main())
