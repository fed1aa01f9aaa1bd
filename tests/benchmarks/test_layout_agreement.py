"""The first step of the demo does not depend on the layout: the benchmark's own exit status says so."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_first_step_is_the_same_under_every_layout(tmp_path: Path) -> None:
    out = tmp_path / "agreement.json"
    command = [sys.executable, "benchmarks/layout_agreement.py", "--json", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    results = json.loads(out.read_text())
    assert [r["layout"] for r in results] == [
        "megatron:d1",
        "megatron:d2",
        "megatron:d1t3",
        "megatron:d1p2",
        "megatron:d1p2t3",
    ]
    # The trainer scores the answers as the engine that drew them did: not a shared error of all layouts.
    assert all(r["log_prob_rms"] < 1e-4 for r in results)
    assert all(r["worst"] <= 1e-4 for r in results)
