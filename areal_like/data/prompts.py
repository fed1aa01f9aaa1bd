"""From a row to the token ids that the model is asked to continue."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from jinja2 import TemplateError

from areal_like.alloc.diagnostics import Diagnostic
from areal_like.data.rows import DataError, Message, Row

_WORD_PROBLEM = "{question}\nPlease reason step by step, and put your final answer within \\boxed{{}}."

TEMPLATES: Mapping[str, str] = {
    "openai/gsm8k": _WORD_PROBLEM,
    "reasoning_gym/chain_sum": "What is {expression}? Answer with the number only.",
}
"""How a question of a dataset is put: `{question}`, and the names in the row's metadata. Others are asked as they
are."""


class Tokenizer(Protocol):
    """What is used of a Transformers tokenizer."""

    chat_template: str | None

    def apply_chat_template(self, conversation: Any, **kwargs: Any) -> Any: ...

    def encode(self, text: str, **kwargs: Any) -> list[int]: ...

    def decode(self, token_ids: Any, **kwargs: Any) -> str: ...


def load_tokenizer(folder: str | Path) -> Any:
    """The tokenizer of a model folder, as Transformers loads it.

    Raises:
        DataError: no such folder, or no tokenizer in it.
    """
    from transformers import AutoTokenizer

    path = Path(folder)
    if not path.is_dir():
        raise _tokenizer_error(path, "there is no such folder")
    try:
        return AutoTokenizer.from_pretrained(str(path), local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _tokenizer_error(
            path, f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        ) from error


def _tokenizer_error(path: Path, reason: str) -> DataError:
    help = "it needs tokenizer.json and tokenizer_config.json, as `save_pretrained` writes them"
    return DataError(
        [Diagnostic("AL567", "error", f"no tokenizer in {path}: {reason}", key="tokenizer_path", help=help)]
    )


def conversation(row: Row) -> list[Message]:
    """The messages of a row: its own, or its question put as `TEMPLATES` says."""
    if not isinstance(row.prompt, str):
        return list(row.prompt)
    written_as_gsm8k = "solution" in row.metadata  # a local copy, under another name
    template = TEMPLATES.get(row.dataset, _WORD_PROBLEM if written_as_gsm8k else "{question}")
    return [{"role": "user", "content": template.format_map({**row.metadata, "question": row.prompt})}]


def prompt_text(row: Row) -> str:
    """What the user says in `conversation(row)`, for rewards and samples."""
    return "\n".join(message["content"] for message in conversation(row) if message["role"] != "system")


def encode_prompt(row: Row, tokenizer: Tokenizer) -> list[int]:
    """Token ids up to where the answer begins: through the chat template, or as plain text when there is none.

    Raises:
        ValueError: the prompt has no token, or the chat template refuses it; its row is named.
    """
    messages = conversation(row)
    if tokenizer.chat_template:
        try:
            ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
        except TemplateError as error:
            where = f"row {row.index} of {row.dataset}"
            raise ValueError(f"the tokenizer's chat template refuses {where}: {error}") from error
    else:
        ids = tokenizer.encode("\n".join(m["content"] for m in messages))
    if not ids:
        raise ValueError(f"row {row.index} of {row.dataset} has an empty prompt: there is nothing to continue")
    return [int(i) for i in ids]


@dataclass(frozen=True)
class Filtered:
    """Rows whose prompts fit, and how many were left out."""

    rows: Sequence[Row]
    dropped: int
    max_length: int | None

    def __str__(self) -> str:
        total = len(self.rows) + self.dropped
        return f"{self.dropped} of {total} prompts are longer than {self.max_length} tokens and are left out"


def filter_by_length(rows: Sequence[Row], tokenizer: Tokenizer, max_length: int | None) -> Filtered:
    """Leave out the rows whose prompt has more than `max_length` tokens; `str()` of the result says how many.

    Raises:
        DataError: none is left.
    """
    if max_length is None:
        return Filtered(rows, 0, None)
    kept = [row for row in rows if len(encode_prompt(row, tokenizer)) <= max_length]
    filtered = Filtered(kept, len(rows) - len(kept), max_length)
    if not kept:
        shortest = min(len(encode_prompt(row, tokenizer)) for row in rows)
        raise DataError(
            [
                Diagnostic(
                    "AL565",
                    "error",
                    f"all {len(rows)} prompts are longer than max_length {max_length}",
                    key="train_dataset.max_length",
                    help=f"the shortest has {shortest} tokens, the chat template included",
                )
            ]
        )
    return filtered
