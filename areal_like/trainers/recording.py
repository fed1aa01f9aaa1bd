"""TEMP until observe lands."""

from __future__ import annotations

import contextlib
import json
import time
from typing import Any


class RunRecorder:
    def __init__(self, job: Any) -> None:
        self._job = job
        job.folder.mkdir(parents=True, exist_ok=True)
        self._row: dict[str, Any] = {}

    def __enter__(self) -> RunRecorder:
        for note in self._job.notes:
            print(note)
        return self

    def __exit__(self, *_: object) -> None:
        pass

    @contextlib.contextmanager
    def phase(self, name: str):
        started = time.monotonic()
        yield
        self._row[f"time/{name}"] = time.monotonic() - started

    @contextlib.contextmanager
    def step(self, step: int):
        self._row["step"] = step
        yield
        with open(self._job.folder / "metrics.jsonl", "a") as file:
            file.write(json.dumps(self._row) + "\n")
        print({k: (round(v, 4) if isinstance(v, float) else v) for k, v in self._row.items()}, flush=True)
        self._row = {}

    def figures(self, section: str, values: dict[str, float]) -> None:
        self._row |= {f"{section}/{k}": v for k, v in values.items()}

    def samples(self, groups: Any) -> None:
        pass

    def tokens(self, tokens: int, drawn: int) -> None:
        pass
