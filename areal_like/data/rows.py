"""`Row`: one prompt with what its reward is computed from; and how a fault of the data is reported."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from areal_like.alloc.diagnostics import Diagnostic, DiagnosticError

Message = Mapping[str, str]
"""`{"role": ..., "content": ...}`."""

CODES = {
    "AL560": "a dataset cannot be reached",
    "AL561": "a dataset file is missing or cannot be read",
    "AL562": "a dataset row lacks a value",
    "AL563": "unknown reasoning_gym task",
    "AL564": "parameters that the dataset does not take",
    "AL565": "a dataset has no rows to train on",
    "AL566": "unknown reward",
    "AL567": "a tokenizer cannot be loaded",
}


@dataclass(frozen=True)
class Row:
    """One prompt.

    Attributes:
        prompt: the question as text, or a conversation that ends with the user's turn.
        answer: the final answer, for example "18"; empty when only the task's own scorer knows what is right.
        metadata: whatever else the source says, for example `expression` of a sum or `solution` of a word problem.
        index: the row's number in its dataset, from 0.
        dataset: where it comes from, for example `openai/gsm8k` or `reasoning_gym/chain_sum`.
    """

    prompt: str | tuple[Message, ...]
    answer: str
    metadata: Mapping[str, Any] = field(default_factory=dict)
    index: int = 0
    dataset: str = ""


class Place(Protocol):
    """Where a key stands in the YAML file; `config.Location` is one."""

    @property
    def file(self) -> str | None: ...

    @property
    def line(self) -> int | None: ...

    @property
    def column(self) -> int | None: ...


@dataclass(frozen=True)
class Asker:
    """The section that a dataset is loaded for, so that a finding can say where to change what.

    Attributes:
        section: `train_dataset` or `valid_dataset`.
        locate: `config.location`, when the section comes from a file.
    """

    section: str = "train_dataset"
    locate: Callable[[str], Place | None] | None = None

    def error(
        self, code: str, message: str, help: str, *, key: str = "path", alternatives: tuple[str, ...] = ()
    ) -> DataError:
        dotted = f"{self.section}.{key}"
        place = self.locate(dotted) if self.locate is not None else None
        return DataError(
            [
                Diagnostic(
                    code,
                    "error",
                    message,
                    key=dotted,
                    file=place.file if place else None,
                    line=place.line if place else None,
                    column=place.column if place else None,
                    help=help,
                    alternatives=alternatives,
                )
            ]
        )


class DataError(DiagnosticError):
    """A dataset, tokenizer or reward that cannot be used."""
