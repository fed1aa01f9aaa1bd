"""From a `train_dataset` or `valid_dataset` section to rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from areal_like.config import TrainDatasetConfig
from areal_like.data.answers import last_boxed
from areal_like.data.files import SUFFIXES, Record, read_local
from areal_like.data.hub import read_hub
from areal_like.data.reasoning import PREFIX, generated_rows
from areal_like.data.rows import Asker, Row

PROMPT_COLUMNS = ("question", "prompt", "messages", "problem", "Problem")
ANSWER_COLUMNS = ("answer", "Answer")


def load_rows(section: TrainDatasetConfig, *, seed: int, asker: Asker | None = None) -> Sequence[Row]:
    """The rows of a dataset section: generated (`reasoning_gym/TASK`), of local files, or of the Hub.

    Files and Hub datasets have a prompt in the column `question`, `prompt`, `problem` or `messages` (text or a
    conversation), and the final answer in `answer`, in `ground_truth` of the column `reward_model`, or in `solution`.
    Of an answer as GSM8K writes it ("... #### 18") the final part counts, of a solution what stands in its last
    `\\boxed`; the whole text is then kept as `metadata["solution"]`.

    Raises:
        DataError: with what is wrong, the key, and what to do.
    """
    asker = asker or Asker()
    path = section.path
    if path is None:
        raise asker.error("AL561", "there is no path", "give the name of a dataset, a folder or reasoning_gym/TASK")
    if path.startswith(PREFIX):
        return generated_rows(path, section.kwargs or {}, section.split, seed, asker)
    if section.kwargs:
        raise asker.error(
            "AL564",
            f"kwargs are parameters of generated tasks, and {path} is none",
            f"remove kwargs (in an override: kwargs=null), or set path to {PREFIX}TASK",
            key="kwargs",
        )
    local = Path(path).expanduser()
    if local.exists():
        records: Iterable[Record] = read_local(local, section.split, asker)
    elif local.suffix in SUFFIXES or path.startswith(("/", "./", "../", "~")):
        raise asker.error(
            "AL561", f"there is no file or folder {local}", "check the path; it is relative to where you start"
        )
    else:
        records = read_hub(path, section.name, section.split, asker)
    rows = [_row(file, number, record, index, path, asker) for index, (file, number, record) in enumerate(records)]
    if not rows:
        raise asker.error("AL565", f"{path} has no rows in the split {section.split!r}", "choose another split or file")
    return rows


def _row(file: Path, number: int, record: Mapping[str, Any], index: int, dataset: str, asker: Asker) -> Row:
    column = next((name for name in PROMPT_COLUMNS if name in record), None)
    if column is None:
        raise _missing(file, number, PROMPT_COLUMNS[:3], record, asker)
    prompt = _conversation(record[column]) or ("" if column == "messages" else _text(record[column]))
    if not prompt:
        raise _missing(file, number, (column,), record, asker)
    solution = _solution(record)
    if not solution:
        raise _missing(file, number, ("answer",), record, asker)
    answer = final_part(solution)
    if not answer:
        raise asker.error(
            "AL562",
            f"{file}, row {number}: the answer ends with '####' and nothing after it",
            "write the final answer there",
        )
    metadata = {k: v for k, v in record.items() if k not in (column, *ANSWER_COLUMNS)}
    if answer != solution:
        metadata["solution"] = solution
    return Row(prompt, answer, metadata, index, dataset)


def _solution(record: Mapping[str, Any]) -> str:
    """What a row says about the right answer; empty when it says nothing."""
    for name in ANSWER_COLUMNS:
        if name in record:
            return _text(record[name])
    judged = record.get("reward_model")
    return _text(judged.get("ground_truth") if isinstance(judged, dict) else record.get("solution"))


def final_part(answer: str) -> str:
    """The final answer of a GSM8K solution: what stands after the last `####`, without thousands separators; of
    others what stands in the last `\\boxed`, if there is one."""
    if "####" not in answer:
        return last_boxed(answer) or answer
    final = answer.rsplit("####", 1)[1].strip()
    plain = final.replace(",", "")
    return plain if plain.lstrip("-").replace(".", "", 1).isdigit() else final


def _missing(file: Path, number: int, columns: Sequence[str], record: Mapping[str, Any], asker: Asker) -> Exception:
    have = ", ".join(str(name) for name in record) or "none"
    state = "is empty" if columns[0] in record else "is missing"
    return asker.error(
        "AL562",
        f"{file}, row {number}: the column {' or '.join(repr(c) for c in columns)} {state}",
        f"each row needs a prompt and an answer; this one has the columns: {have}",
    )


def _text(value: Any) -> str:
    """Text or a number as text; empty for anything else."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return ""
    return str(value).strip() if value == value else ""  # a NaN is an empty cell


def _conversation(value: Any) -> tuple[dict[str, str], ...] | None:
    if not isinstance(value, list | tuple) or not value:
        return None
    if not all(
        isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str) for m in value
    ):
        return None
    return tuple({"role": m["role"], "content": m["content"]} for m in value)
