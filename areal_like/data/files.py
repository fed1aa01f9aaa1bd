"""Rows of local files: parquet, JSON, JSON lines, CSV, and folders of them or saved by `datasets`.

Each record comes with the file and the number of its row, so that a fault can be found in an editor.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from areal_like.data.rows import Asker

SUFFIXES = (".parquet", ".jsonl", ".json", ".csv")

Record = tuple[Path, int, dict[str, Any]]
"""(file, row counted from 1, values by column)"""


def read_local(path: Path, split: str, asker: Asker) -> Iterator[Record]:
    """All records of a file, or of the files of `split` in a folder, in the order of their names.

    Raises:
        DataError: nothing to read there, or a file that is not what its name says.
    """
    if path.is_dir() and ((path / "dataset_dict.json").is_file() or (path / "state.json").is_file()):
        yield from _read_saved(path, split, asker)
        return
    for file in [path] if path.is_file() else _files_of_split(path, split, asker):
        try:
            yield from _read_file(file, asker)
        except (OSError, UnicodeDecodeError, csv.Error) as error:
            raise asker.error("AL561", f"{file} cannot be read: {error}", "repair or replace the file") from error


def _files_of_split(folder: Path, split: str, asker: Asker) -> list[Path]:
    """Files whose name begins with the split (`train.jsonl`, `train-00000-of-00002.parquet`), or below `split/`."""
    here = [f for f in sorted(folder.rglob("*")) if f.is_file() and f.suffix in SUFFIXES]
    chosen = [
        f
        for f in here
        if f.stem == split or f.stem.startswith((f"{split}-", f"{split}_")) or split in f.relative_to(folder).parts[:-1]
    ]
    if chosen:
        return chosen
    have = ", ".join(str(f.relative_to(folder)) for f in here[:8]) or "no file of these kinds"
    raise asker.error(
        "AL561",
        f"{folder} has no file of the split {split!r}; it has {have}",
        f"name a file {split}.jsonl, {split}.json, {split}.csv or {split}*.parquet, or choose another split",
        key="split",
    )


def _read_file(file: Path, asker: Asker) -> Iterator[Record]:
    if file.suffix == ".parquet":
        yield from _read_parquet(file, asker)
    elif file.suffix == ".jsonl":
        with file.open(encoding="utf-8-sig") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield file, number, _json_object(line, file, number, asker)
    elif file.suffix == ".json":
        yield from _read_json(file, asker)
    elif file.suffix == ".csv":
        with file.open(encoding="utf-8-sig", newline="") as lines:
            for number, record in enumerate(csv.DictReader(lines, strict=True), 1):
                if None in record:
                    help = "quote values that hold commas"
                    raise asker.error("AL562", f"{file}, row {number}: more values than columns", help)
                yield file, number, dict(record)
    else:
        raise asker.error(
            "AL561",
            f"{file} is of no known kind",
            f"give a file that ends in {', '.join(SUFFIXES)}, or a folder of them",
        )


def _read_parquet(file: Path, asker: Asker) -> Iterator[Record]:
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.read_table(file)
    except pyarrow.ArrowException as error:
        raise asker.error("AL561", f"{file} is not a parquet file: {error}", "replace the file") from error
    for number, record in enumerate(table.to_pylist(), 1):
        yield file, number, record


def _read_json(file: Path, asker: Asker) -> Iterator[Record]:
    """A list of objects, or an object with such a list under one key."""
    text = file.read_text(encoding="utf-8-sig")
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise asker.error(
            "AL561", f"{file} is not JSON: {error}", "one record a line goes into a .jsonl file"
        ) from error
    if isinstance(data, dict):
        lists = [value for value in data.values() if isinstance(value, list)]
        data = lists[0] if len(lists) == 1 else data
    if not isinstance(data, list):
        raise asker.error("AL561", f"{file} holds no list of records", "write a list of objects: [{...}, {...}]")
    for number, record in enumerate(data, 1):
        if not isinstance(record, dict):
            raise asker.error("AL562", f"{file}, row {number}: not an object", "each row is an object of named columns")
        yield file, number, record


def _json_object(line: str, file: Path, number: int, asker: Asker) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise asker.error("AL561", f"{file}, line {number} is not JSON: {error}", "write one object a line") from error
    if not isinstance(record, dict):
        raise asker.error("AL562", f"{file}, row {number}: not an object", "each row is an object of named columns")
    return record


def _read_saved(path: Path, split: str, asker: Asker) -> Iterator[Record]:
    """A folder written by `datasets`' `save_to_disk`."""
    import datasets

    loaded = datasets.load_from_disk(str(path))
    if isinstance(loaded, datasets.DatasetDict):
        if split not in loaded:
            raise asker.error(
                "AL561", f"{path} has no split {split!r}", "choose one it has", key="split", alternatives=tuple(loaded)
            )
        loaded = loaded[split]
    for number, record in enumerate(loaded, 1):
        yield path, number, record
