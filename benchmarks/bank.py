"""The rollout bank: many groups to an fsync beside one at a time, and its bytes beside JSON.

    python benchmarks/bank.py [--groups 300] [--folder .] [--write benchmarks/results/bank.md]

Two kinds of groups: those of the demo (4 answers of 16 tokens) and larger ones (16 answers of log-normal length, 512
tokens in the mean). Every way makes each group durable; they take turns, and the best of the rounds counts.

    bank, in flight       all groups are handed in, as a pipeline with many episodes does, and then waited for
    bank, one by one      each is waited for before the next: 2 fsyncs a group
    four files, 4 fsyncs  tokens, float16 log-probabilities, masks and a ledger line, each synced, as Megatron-RL's bank
                          writes a group; rewritten here, 30 lines
    SQLite                the bank's own payload as a blob, a transaction a group; WAL, synchronous=FULL
    JSON lines            the group as JSON, one fsync

The claim: in flight the bank is at least twice as fast as four files with an fsync each for small groups, and as fast
for large ones, where turning lists into bytes takes more time than the disk; and it takes at most half the bytes of
JSON. Exit status 1 if not.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import random
import sqlite3
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import numpy as np

from areal_like.data.rows import Row
from areal_like.rollout.bank import LogProbWidth, RolloutBank
from areal_like.rollout.bank.record import encode
from areal_like.rollout.trajectories import RolloutGroup, TokenRollout, Turn

ROUNDS = 3
SPEED = {"demo": 2.0, "large": 1.0}
BYTES = 0.5


class Cost(NamedTuple):
    """Of writing all groups."""

    seconds: float
    bytes: int
    fsyncs: int
    longest_call: float


Way = Callable[[Path, list[RolloutGroup]], float]
"""Makes all groups durable; returns the longest time in seconds for which it held its caller."""


def make_groups(count: int, members: int, prompt: int, lengths: Callable[[random.Random], int]) -> list[RolloutGroup]:
    draw = random.Random(1)

    def attempt(asked: list[int]) -> TokenRollout:
        n = lengths(draw)
        text = "".join(draw.choice("etaoin shrdlu") for _ in range(4 * n))
        drawn = [draw.randrange(150_000) for _ in range(n)]
        probabilities = [-draw.expovariate(1.0) for _ in range(n)]
        return TokenRollout([Turn(asked, drawn, probabilities, [3] * (n // 2) + [4] * (n - n // 2), "stop", text)], 1.0)

    groups = []
    for index in range(count):
        asked = [draw.randrange(150_000) for _ in range(prompt)]
        row = Row("x" * 4 * prompt, "18", {"solution": "y" * 200}, index, "openai/gsm8k")
        groups.append(RolloutGroup("gsm8k", index, row, [attempt(asked) for _ in range(members)]))
    return groups


def in_flight(width: LogProbWidth) -> Way:
    def way(folder: Path, groups: list[RolloutGroup]) -> float:
        longest, promises = 0.0, []
        with RolloutBank.open(folder, log_probs=width) as bank:
            for group in groups:
                start = time.perf_counter()
                promises.append(bank.append(group))
                longest = max(longest, time.perf_counter() - start)
            for promise in promises:
                promise.result()
        return longest

    return way


def one_by_one(folder: Path, groups: list[RolloutGroup]) -> float:
    longest = 0.0
    with RolloutBank.open(folder) as bank:
        for group in groups:
            start = time.perf_counter()
            bank.append(group).result()
            longest = max(longest, time.perf_counter() - start)
    return longest


def four_files(folder: Path, groups: list[RolloutGroup]) -> float:
    """Every member's whole sequence, its log-probabilities and its mask; then a line of what is left."""
    longest = 0.0
    with ExitStack() as stack:
        tokens, log_probs, masks, ledger = (stack.enter_context((folder / name).open("ab")) for name in "tlmj")

        def write(file: object, data: bytes) -> None:
            file.write(data)  # type: ignore[attr-defined]
            file.flush()  # type: ignore[attr-defined]
            os.fsync(file.fileno())  # type: ignore[attr-defined]

        for group in groups:
            start = time.perf_counter()
            turns = [turn for member in group.members if isinstance(member, TokenRollout) for turn in member.turns]
            slices = [
                b"".join(np.array(turn.prompt_ids + turn.token_ids, np.int32).tobytes() for turn in turns),
                b"".join(np.array(turn.log_probs, np.float16).tobytes() for turn in turns),
                b"".join(bytes(len(turn.prompt_ids)) + b"\1" * len(turn.token_ids) for turn in turns),
            ]
            rest = {"row": asdict(group.row), "text": [turn.text for turn in turns], "rewards": group.rewards}
            line = json.dumps(rest, sort_keys=True).encode()
            line += hashlib.blake2b(line + b"".join(slices), digest_size=16).hexdigest().encode() + b"\n"
            for file, data in zip((tokens, log_probs, masks, ledger), [*slices, line], strict=True):
                write(file, data)
            longest = max(longest, time.perf_counter() - start)
    return longest


def sqlite(folder: Path, groups: list[RolloutGroup]) -> float:
    longest = 0.0
    with closing(sqlite3.connect(folder / "bank.db", isolation_level=None)) as database:
        database.execute("PRAGMA journal_mode=WAL")
        database.execute("PRAGMA synchronous=FULL")
        database.execute("CREATE TABLE groups (environment, number, entry, payload, PRIMARY KEY (environment, number))")
        for group in groups:
            start = time.perf_counter()
            entry, payload = encode(group, "float32")
            row = (group.environment, group.index, json.dumps(entry.to_record()), payload)
            database.execute("INSERT INTO groups VALUES (?, ?, ?, ?)", row)
            longest = max(longest, time.perf_counter() - start)
    return longest


def json_lines(folder: Path, groups: list[RolloutGroup]) -> float:
    longest = 0.0
    with (folder / "groups.jsonl").open("a") as file:
        for group in groups:
            start = time.perf_counter()
            file.write(json.dumps(asdict(group)) + "\n")
            file.flush()
            os.fsync(file.fileno())
            longest = max(longest, time.perf_counter() - start)
    return longest


WAYS: dict[str, Way] = {
    "bank, in flight": in_flight("float32"),
    "bank, in flight, float16": in_flight("float16"),
    "bank, one by one": one_by_one,
    "four files, 4 fsyncs": four_files,
    "SQLite": sqlite,
    "JSON lines": json_lines,
}


def measure(way: Way, groups: list[RolloutGroup], where: Path) -> Cost:
    real, fsyncs = os.fsync, [0]

    def counted(descriptor: int) -> None:
        fsyncs[0] += 1
        real(descriptor)

    with tempfile.TemporaryDirectory(dir=where) as temporary, mock.patch.object(os, "fsync", counted):
        folder = Path(temporary)
        start = time.perf_counter()
        longest = way(folder, groups)
        seconds = time.perf_counter() - start
        size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    return Cost(seconds, size, fsyncs[0], longest)


def compare(name: str, groups: list[RolloutGroup], where: Path) -> tuple[list[str], dict[str, Cost]]:
    drawn = sum(member.drawn for group in groups for member in group.members if isinstance(member, TokenRollout))
    best: dict[str, Cost] = {}
    for _ in range(ROUNDS):
        for label, way in WAYS.items():
            cost = measure(way, groups, where)
            if label not in best or cost.seconds < best[label].seconds:
                best[label] = cost
    reference, text = best["four files, 4 fsyncs"], best["JSON lines"]
    lines = [
        f"| {name} | groups/s | MB/s | fsyncs | times four files | bytes a drawn token | of JSON | longest wait of the"
        " caller |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for label, cost in best.items():
        lines.append(
            f"| {label} | {len(groups) / cost.seconds:,.0f} | {cost.bytes / cost.seconds / 1e6:.1f} |"
            f" {cost.fsyncs or 'not seen'} |"
            f" {reference.seconds / cost.seconds:.2f} | {cost.bytes / drawn:.1f} | {cost.bytes / text.bytes:.2f} |"
            f" {cost.longest_call * 1e3:.2f} ms |"
        )
    return lines, best


def bare_fsync(where: Path) -> float:
    """Median seconds of an fsync of 4 KB."""
    taken = []
    with tempfile.NamedTemporaryFile(dir=where) as file:
        for _ in range(50):
            file.write(bytes(4096))
            file.flush()
            start = time.perf_counter()
            os.fsync(file.fileno())
            taken.append(time.perf_counter() - start)
    return sorted(taken)[25]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=300, help="of each kind (300)")
    parser.add_argument("--folder", type=Path, default=Path("."), help="on the disk that is looked at (.)")
    parser.add_argument("--write", type=Path, help="also write the tables to this Markdown file")
    options = parser.parse_args()
    kinds = {
        "demo: 4 x 16 tokens": make_groups(options.groups, 4, 40, lambda draw: 16),
        "large: 16 x 512 tokens": make_groups(
            max(1, options.groups // 4), 16, 200, lambda draw: max(1, min(4096, int(draw.lognormvariate(5.74, 1.0))))
        ),
    }
    lines, broken = [f"A bare fsync of 4 KB takes {bare_fsync(options.folder) * 1e3:.2f} ms on this disk.", ""], []
    for name, groups in kinds.items():
        rows, best = compare(name, groups, options.folder)
        lines += [*rows, ""]
        bank = best["bank, in flight"]
        bound = SPEED[name.split(":")[0]]
        if best["four files, 4 fsyncs"].seconds < bound * bank.seconds:
            broken.append(f"{name}: less than {bound:g} times as fast as four files")
        if bank.bytes > BYTES * best["JSON lines"].bytes:
            broken.append(f"{name}: more than {BYTES:g} of the bytes of JSON")
    text = "\n".join(lines)
    print(text)
    print("BROKEN: " + "; ".join(broken) if broken else "both claims hold")
    if options.write:
        options.write.write_text(report(text, options.groups), encoding="utf-8")
    return int(bool(broken))


def report(text: str, groups: int) -> str:
    load = ", ".join(f"{n:.1f}" for n in os.getloadavg())
    return (
        f"# The rollout bank: how fast, how large\n\n`python benchmarks/bank.py --groups {groups}`, {date.today()},"
        f" Python {platform.python_version()}, {os.cpu_count()} cores, load averages {load} at the end (other work was"
        f" running when they are above 1).\n\n{text}"
    )


if __name__ == "__main__":
    sys.exit(main())
