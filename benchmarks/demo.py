"""Where the time of the demo's step goes, and what an option changes.

    python benchmarks/demo.py [--config FILE] [--steps 3] [--rounds 1] [--set key=value ...] [--json FILE]

Runs the configuration as it is and, after it, with the options of `--set`; `--rounds` times in turn, so that other load
on the machine meets both. Each run is `examples/math/gsm8k_rl.py` in a folder of its own. Seconds of the phases are the
run's own (`seconds/...` in its figures), medians over all steps but the first, which warms up. Generation with a lag of
0 is waited for in full; with a lag its seconds are what training waited. `others` is what no phase covers (figures,
samples). By default `--set` switches off what the demo's file switches on (`actor.enable_tree_training=false`).
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PHASES = ("generation", "reference", "log_probs", "update", "weights")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default=str(ROOT / "examples/math/gsm8k_grpo_cpu.yaml"))
    parser.add_argument("--steps", type=int, default=3, help="of each run, at least 2")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--set", nargs="+", default=["actor.enable_tree_training=false"], metavar="KEY=VALUE")
    parser.add_argument("--json", type=Path)
    a = parser.parse_args()
    if a.steps < 2:
        parser.error("--steps is at least 2: the first step warms up and is not counted")
    variants: dict[str, list[str]] = {"as it is": [], " ".join(a.set): a.set}
    steps: dict[str, list[dict[str, Any]]] = {name: [] for name in variants}
    for _ in range(a.rounds):
        for name, overrides in variants.items():
            steps[name] += run(a.config, a.steps, overrides)[1:]
    shares = {name: seconds_of_phases(figures) for name, figures in steps.items()}
    print("\n".join(table(shares)))
    if a.json:
        a.json.write_text(json.dumps({"seconds": shares, "steps": steps}, indent=2))
    return 0


def run(config: str, steps: int, overrides: list[str]) -> list[dict[str, Any]]:
    """The figures of each step; all but the first with the whole step's seconds, from the end of the one before.

    Raises:
        SystemExit: the run failed; its last lines are the message.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(ROOT / "examples/math/gsm8k_rl.py"), "--config", config]
        command += [f"total_train_steps={steps}", f"cluster.fileroot={folder}", *overrides]
        done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
        files = list(Path(folder).rglob("metrics.jsonl"))
        if done.returncode or len(files) != 1:
            raise SystemExit(f"the run failed ({done.returncode}):\n{done.stdout[-1500:]}\n{done.stderr[-3000:]}")
        figures = [json.loads(line) for line in files[0].read_text().splitlines()]
    for before, step in pairwise(figures):
        step["seconds/step"] = step["time"] - before["time"]
    return figures


def seconds_of_phases(steps: list[dict[str, Any]]) -> dict[str, float]:
    """Median seconds of each phase that occurs, of the rest of the step, and of the whole step."""
    names = [name for name in PHASES if any(f"seconds/{name}" in step for step in steps)]
    found = {name: statistics.median(step.get(f"seconds/{name}", 0.0) for step in steps) for name in names}
    found["step"] = statistics.median(step["seconds/step"] for step in steps)
    found["others"] = found["step"] - sum(found[name] for name in names)
    return found


def table(shares: dict[str, dict[str, float]]) -> list[str]:
    """Markdown: seconds and share of each phase in each variant, and how much less of it the first one takes."""
    (first, ours), (second, theirs) = shares.items()
    lines = [f"| phase | {first}: s | share | {second}: s | share | x |", "|---|---|---|---|---|---|"]
    for name in theirs:
        before, after = theirs[name], ours.get(name, 0.0)
        factor = f"{before / after:.2f}" if after > 0.01 else "-"
        lines.append(
            f"| {name} | {after:.2f} | {after / ours['step']:.0%} | {before:.2f} | {before / theirs['step']:.0%} "
            f"| {factor} |"
        )
    return lines


if __name__ == "__main__":
    sys.exit(main())
