"""How fast the language is: import, first parse, and a warm parse beside Lark's bare LALR parse of the same strings.

    python benchmarks/alloc.py [--write benchmarks/results/alloc.md]

Exits 1 when a bound of the project is broken: import of `areal_like.alloc` in at most 0.25 s without torch or
transformers, a warm parse in at most 200 microseconds. Every string parsed is distinct, and nothing in the parser
remembers strings.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

IMPORT_BOUND = 0.25  # seconds
PARSE_BOUND = 200.0  # microseconds
FORBIDDEN = ("torch", "transformers", "megatron", "lark", "importlib.metadata")
ROUNDS = 7

# AReaL 1.0.4 on two cores (import of areal.api.alloc_mode; ModelAllocation.from_str, which builds its parser each time)
AREAL = {"import": "7.9-15.2 s", "flat": "31,000 us (megatron:d4t2p2e4)", "folded": "39,000 us"}

PLAIN_GRAMMAR = r"""
start: BACKEND ("[" NAME "]")? ":" (dims | "(" "attn" ":" dims "|" "ffn" ":" dims ")")
dims: (LETTER SIZE)+
BACKEND: /[A-Za-z_]\w*/
NAME: /[A-Za-z_]\w*/
LETTER: /[dtpcev]/
SIZE: /\*|[1-9][0-9]*/
%ignore /[ \t\r\n\f]+/
"""
"""The grammar as the design writes it, a token a letter and a token a size: what any LALR parse by Lark costs."""


def fresh(code: str) -> dict[str, Any]:
    """Run code that prints JSON in a new interpreter."""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    figures: dict[str, Any] = json.loads(done.stdout)
    return figures


def import_figures() -> tuple[float, list[str], float]:
    """Median seconds of the import, forbidden modules that it loaded, median seconds of a first parse after it."""
    code = f"""
import sys, time, json
before = set(sys.modules)
start = time.perf_counter()
import areal_like.alloc
seconds = time.perf_counter() - start
loaded = [name for name in {FORBIDDEN!r} if name in sys.modules]
assert "pydantic" in sys.modules
start = time.perf_counter()
areal_like.alloc.ModelAllocation.parse("megatron:d4t2p2e4")
print(json.dumps(dict(seconds=seconds, loaded=loaded, first=time.perf_counter() - start)))
"""
    runs = [fresh(code) for _ in range(ROUNDS)]
    return (
        statistics.median(run["seconds"] for run in runs),
        sorted({name for run in runs for name in run["loaded"]}),
        statistics.median(run["first"] for run in runs),
    )


def flat_strings() -> list[str]:
    """Distinct strings of the length of megatron:d4t2p2e4."""
    return [f"megatron:d{d}t{t}p{p}e2" for d, t, p in itertools.product(range(2, 42, 2), range(1, 11), range(1, 11))]


def folded_strings() -> list[str]:
    """Distinct strings like megatron:(attn:d4p2t2c2|ffn:d4p2t2e2)."""
    sizes = itertools.product(range(1, 11), range(1, 11), range(1, 21))
    return [f"megatron:(attn:d{d}p{p}t{t}c4|ffn:d{d * t}p{p}t2e2)" for d, p, t in sizes]


def microseconds(parsers: list[Callable[[str], object]], strings: list[str]) -> list[float]:
    """For each parser the median over rounds of the mean time a string; the parsers take turns in every round."""
    rounds: list[list[float]] = [[] for _ in parsers]
    for _ in range(ROUNDS):
        for parse, times in zip(parsers, rounds, strict=True):
            start = time.perf_counter()
            for text in strings:
                parse(text)
            times.append((time.perf_counter() - start) / len(strings) * 1e6)
    return [statistics.median(times) for times in rounds]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, help="also write the table to this Markdown file")
    options = parser.parse_args()

    seconds, loaded, first = import_figures()
    from lark import Lark

    from areal_like.alloc import ModelAllocation
    from areal_like.alloc.syntax import GRAMMAR

    bare = Lark(GRAMMAR.read_text(encoding="utf-8"), parser="lalr", maybe_placeholders=False)
    plain = Lark(PLAIN_GRAMMAR, parser="lalr")
    rows = [
        (
            "import areal_like.alloc, median of fresh processes",
            f"{seconds:.3f} s",
            f"{IMPORT_BOUND} s",
            AREAL["import"],
        ),
        (f"of {', '.join(FORBIDDEN)} loaded by it", ", ".join(loaded) or "none", "none", "torch, transformers, ..."),
        ("first parse (scan of entry points, grammar built)", f"{first * 1e3:.1f} ms", "", ""),
    ]
    broken = seconds > IMPORT_BOUND or bool(loaded)
    for kind, strings in (("flat", flat_strings()), ("folded", folded_strings())):
        assert len(set(strings)) == len(strings)
        ours, tree, reference = microseconds([ModelAllocation.parse, bare.parse, plain.parse], strings)
        broken |= ours > PARSE_BOUND
        rows += [
            (
                f"warm parse, {len(strings)} distinct {kind} strings",
                f"{ours:.0f} us",
                f"{PARSE_BOUND:.0f} us",
                AREAL[kind],
            ),
            ("- bare Lark LALR parse, our grammar (ratio)", f"{tree:.0f} us ({ours / tree:.2f})", "", ""),
            (
                "- bare Lark LALR parse, a token a letter (ratio)",
                f"{reference:.0f} us ({ours / reference:.2f})",
                "",
                "",
            ),
        ]
    text = table(rows)
    print(text)
    print("BROKEN: a bound does not hold" if broken else "all bounds hold")
    if options.write:
        options.write.write_text(report(text), encoding="utf-8")
    return int(broken)


def table(rows: list[tuple[str, str, str, str]]) -> str:
    cells = [("what", "measured", "bound", "AReaL 1.0.4, published"), *rows]
    widths = [max(len(row[i]) for row in cells) for i in range(4)]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in cells
    ]
    return "\n".join([lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]])


def processor() -> str:
    """The machine's kind of processor."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()


def report(text: str) -> str:
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("lark", "pydantic"))
    machine = f"{os.cpu_count()} cores ({processor()}), load average {os.getloadavg()[0]:.1f} at the end"
    return (
        f"# The language: import and parse\n\n`python benchmarks/alloc.py`, {date.today()}, Python"
        f" {platform.python_version()}, {versions}, {machine}.\n\n{text}\n\n"
        "AReaL's figures are of another machine of two cores; they are not measured here.\n"
    )


if __name__ == "__main__":
    sys.exit(main())
