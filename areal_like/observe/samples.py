"""Generated samples to look at: all that are asked for in a file, a few on the terminal."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType

FILE_NAME = "samples.jsonl"


@dataclass(frozen=True)
class Sample:
    """One answer as text. `version` is that of the policy that drew its last token; `group` the number of its
    prompt."""

    prompt: str
    completion: str
    reward: float
    answer: str = ""
    version: int = 0
    group: int = 0
    finish_reason: str = ""


class SampleWriter:
    """Appends to `folder/samples.jsonl` one line a sample, and shows `shown` of each step: the best and the worst
    first.

    Args:
        show: writes one line to the terminal, for example `Progress.note`; None shows nothing.
        width: characters of prompt and completion that a shown line holds.
    """

    def __init__(
        self, folder: str | Path, *, show: Callable[[str], None] | None = None, shown: int = 2, width: int = 100
    ) -> None:
        self.path = Path(folder) / FILE_NAME
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("a", encoding="utf-8")
        self._show, self._shown, self._width = show, shown, width

    def write(self, step: int, samples: Sequence[Sample]) -> None:
        """Write all samples of a step and flush, then show a few."""
        for sample in samples:
            # model output may hold lone surrogates, which UTF-8 cannot encode: ASCII escapes can
            self._file.write(json.dumps({"step": step, **asdict(sample)}, ensure_ascii=True) + "\n")
        self._file.flush()
        if self._show is None:
            return
        for sample in best_and_worst(samples, self._shown):
            prompt = one_line(sample.prompt, self._width)
            self._show(f"  {sample.reward:+.2f}  {prompt} -> {one_line(sample.completion, self._width)}")

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> SampleWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def best_and_worst(samples: Sequence[Sample], count: int) -> list[Sample]:
    """At most `count` samples: the best, the worst, the second best, ..."""
    ranked = sorted(samples, key=lambda s: -s.reward)
    order: list[Sample] = []
    while ranked and len(order) < count:
        order.append(ranked.pop(0 if len(order) % 2 == 0 else -1))
    return order


def one_line(text: str, width: int) -> str:
    """`text` in at most `width` printable characters: line breaks and control characters escaped, the middle left
    out."""
    printable = "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)
    if len(printable) <= width:
        return printable
    head = (width - 3) // 2
    return f"{printable[:head]}...{printable[len(printable) - (width - 3 - head) :]}"
