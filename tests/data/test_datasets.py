"""Rows from files, from the Hub's cache, from generated tasks; and every fault of them named."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from areal_like.config import TrainDatasetConfig
from areal_like.data import hub
from areal_like.data.datasets import final_part, load_rows
from areal_like.data.rows import CODES, Asker, DataError

ROWS = [
    {"question": "Two and two?", "answer": "2 + 2 = 4\n#### 4"},
    {"question": "A thousand times 1.5?", "answer": "so\n#### 1,500"},
    {"question": "Minus?", "answer": "#### -3.5"},
]


def write(path: Path, rows=ROWS) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    else:
        datasets.Dataset.from_list(rows).to_csv(str(path))
    return path


def load(path: Path | str, **keys):
    return load_rows(TrainDatasetConfig(path=str(path), **keys), seed=1)


def fault(path: Path | str, **keys) -> DataError:
    with pytest.raises(DataError) as caught:
        load(path, **keys)
    (diagnostic,) = caught.value.diagnostics
    assert diagnostic.code in CODES
    assert diagnostic.help
    return caught.value


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.parquet"])
def test_files_of_every_kind_give_the_same_rows(tmp_path, name):
    rows = load(write(tmp_path / name))
    assert [r.prompt for r in rows] == [r["question"] for r in ROWS]
    assert [r.answer for r in rows] == ["4", "1500", "-3.5"]
    assert [r.index for r in rows] == [0, 1, 2]
    assert rows[0].metadata == {"solution": ROWS[0]["answer"]}


def test_other_columns_are_kept_and_json_may_wrap_its_list(tmp_path):
    path = tmp_path / "x.json"
    path.write_text(json.dumps({"data": [{"prompt": "?", "answer": 7, "level": "easy"}], "version": 1}))
    (row,) = load(path)
    assert (row.prompt, row.answer, row.metadata) == ("?", "7", {"level": "easy"})


def test_conversations(tmp_path):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1?"}]
    (row,) = load(write(tmp_path / "a.parquet", [{"messages": messages, "answer": "2"}]))
    assert row.prompt == tuple(messages)


def test_a_folder_gives_the_files_of_the_split(tmp_path):
    write(tmp_path / "train-00000-of-00002.parquet", ROWS[:1])
    write(tmp_path / "train-00001-of-00002.parquet", ROWS[1:])
    write(tmp_path / "deep" / "test" / "x.jsonl", ROWS[2:])
    assert [r.answer for r in load(tmp_path)] == ["4", "1500", "-3.5"]
    assert [r.answer for r in load(tmp_path, split="test")] == ["-3.5"]
    error = fault(tmp_path, split="valid")
    assert "train-00000-of-00002.parquet" in str(error) and error.diagnostics[0].key == "train_dataset.split"


def test_a_folder_saved_by_datasets(tmp_path):
    saved = datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS)})
    saved.save_to_disk(str(tmp_path / "d"))
    assert [r.answer for r in load(tmp_path / "d")] == ["4", "1500", "-3.5"]
    assert fault(tmp_path / "d", split="test").diagnostics[0].alternatives == ("train",)


def test_a_row_without_an_answer_names_file_row_and_column(tmp_path):
    path = write(tmp_path / "a.jsonl", [ROWS[0], {"question": "And?"}])
    message = str(fault(path))
    assert f"{path}, row 2: the column 'answer' is missing" in message
    assert "has the columns: question" in message


@pytest.mark.parametrize("value", ["", "  ", None, float("nan"), [], True])
@pytest.mark.parametrize("column", ["question", "answer"])
def test_an_empty_value_is_a_missing_one(tmp_path, column, value):
    path = write(tmp_path / "a.jsonl", [{**ROWS[0], column: value}])
    assert f"row 1: the column '{column}' is empty" in str(fault(path))


def test_empty_cells_of_csv_and_parquet(tmp_path):
    (tmp_path / "a.csv").write_text("question,answer\nq,1\nq,\n")
    assert "row 2: the column 'answer' is empty" in str(fault(tmp_path / "a.csv"))
    path = write(tmp_path / "a.parquet", [ROWS[0], {"question": "q", "answer": None}])
    assert "row 2: the column 'answer' is empty" in str(fault(path))


def test_other_faults_of_rows(tmp_path):
    (tmp_path / "r.csv").write_text("question,answer\nq,1\nq,1,000\n")
    assert "row 2: more values than columns" in str(fault(tmp_path / "r.csv"))
    assert "'question' or 'prompt' or 'messages' is missing" in str(fault(write(tmp_path / "a.jsonl", [{"q": "x"}])))
    path = write(tmp_path / "b.jsonl", [{"question": "x", "answer": "thus #### "}])
    assert "nothing after it" in str(fault(path))
    path = write(tmp_path / "c.jsonl", [{"messages": ["hi"], "answer": "1"}])
    assert "'messages' is empty" in str(fault(path))
    path = write(tmp_path / "d.jsonl", [])
    assert "no rows" in str(fault(path))


def test_faults_of_files(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"question": "q", "answer": "1"}\n{"question": \n')
    assert "a.jsonl, line 2 is not JSON" in str(fault(tmp_path / "a.jsonl"))
    (tmp_path / "b.jsonl").write_text("[1]\n")
    assert "row 1: not an object" in str(fault(tmp_path / "b.jsonl"))
    (tmp_path / "c.json").write_text('{"question": "q"}\n{"question": "r"}\n')
    assert "is not JSON" in str(fault(tmp_path / "c.json")) and ".jsonl" in str(fault(tmp_path / "c.json"))
    (tmp_path / "d.json").write_text('"text"')
    assert "no list of records" in str(fault(tmp_path / "d.json"))
    (tmp_path / "e.parquet").write_text("no parquet")
    assert "not a parquet file" in str(fault(tmp_path / "e.parquet"))
    (tmp_path / "f.jsonl").write_bytes(b"\xff\xfe\x00")
    assert "cannot be read" in str(fault(tmp_path / "f.jsonl"))
    (tmp_path / "g.txt").write_text("x")
    assert "no known kind" in str(fault(tmp_path / "g.txt"))
    assert "no file or folder" in str(fault(tmp_path / "nowhere.jsonl"))
    assert "no file or folder" in str(fault("./nowhere"))


def test_kwargs_belong_to_generated_tasks(tmp_path):
    error = fault(write(tmp_path / "a.jsonl"), kwargs={"size": 3})
    assert error.diagnostics[0].key == "train_dataset.kwargs"


@dataclass
class Where:
    file: str = "run.yaml"
    line: int = 12
    column: int = 3


def test_the_place_in_the_yaml_is_told():
    asker = Asker("valid_dataset", {"valid_dataset.path": Where()}.get)
    with pytest.raises(DataError, match=r"run.yaml:12:3 \(valid_dataset.path\)"):
        load_rows(TrainDatasetConfig(path="./nowhere"), seed=1, asker=asker)


@pytest.mark.parametrize(
    ("answer", "final"),
    [("a #### 1,234", "1234"), ("#### 1 #### 2", "2"), ("x", "x"), ("#### $5", "$5"), ("#### 1,2,x", "1,2,x")],
)
def test_final_part(answer, final):
    assert final_part(answer) == final


# the Hub


@pytest.fixture
def no_network(monkeypatch):
    import huggingface_hub

    def fail(self, *args, **kwargs):
        raise ConnectionError("Name or service not known")

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", fail)


def test_offline_and_not_cached_is_one_clear_error(no_network, tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    error = fault("openai/gsm8k")
    (diagnostic,) = error.diagnostics
    assert (diagnostic.code, diagnostic.key) == ("AL560", "train_dataset.path")
    assert "openai/gsm8k is not in the cache and cannot be fetched: no connection to the Hub (ConnectionError)" in str(
        error
    )
    assert diagnostic.alternatives == ("reasoning_gym/chain_sum", "reasoning_gym/gsm_symbolic")
    assert "local file" in diagnostic.help


def test_offline_and_cached(no_network, tmp_path, monkeypatch):
    """The folder that `datasets` itself leaves in its cache: openai___gsm8k/main/0.0.0/HASH."""
    folder = tmp_path / "openai___gsm8k" / "main" / "0.0.0" / "0123abcd"
    folder.mkdir(parents=True)
    table = datasets.Dataset.from_list(ROWS)
    with datasets.arrow_writer.ArrowWriter(path=str(folder / "gsm8k-train.arrow"), features=table.features) as writer:
        for row in ROWS:
            writer.write(row)
        writer.finalize()
    split = {"name": "train", "num_bytes": 0, "num_examples": 3, "dataset_name": "gsm8k"}
    info = datasets.DatasetInfo(
        features=table.features, splits={"train": split}, builder_name="parquet", dataset_name="gsm8k",
        config_name="main", version="0.0.0",
    )  # fmt: skip
    info.write_to_directory(str(folder))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    before = datasets.config.HF_HUB_OFFLINE
    rows = load("openai/gsm8k")
    assert [r.answer for r in rows] == ["4", "1500", "-3.5"]
    assert before == datasets.config.HF_HUB_OFFLINE


def test_a_hub_dataset(monkeypatch):
    asked = {}

    def load_dataset(path, name, split):
        asked.update(path=path, name=name, split=split)
        return ROWS

    monkeypatch.setattr(hub, "_unreachable", lambda path, asker: None)
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    rows = load("openai/gsm8k", split="test")
    assert asked == {"path": "openai/gsm8k", "name": "main", "split": "test"}
    assert [r.answer for r in rows] == ["4", "1500", "-3.5"]
    load("some/other", name="sub")
    assert (asked["path"], asked["name"]) == ("some/other", "sub")


def test_what_the_hub_refuses(monkeypatch):
    monkeypatch.setattr(hub, "_unreachable", lambda path, asker: None)

    def unknown_split(path, name, split):
        raise ValueError('Unknown split "dev". Should be one of ["train", "test"].')

    monkeypatch.setattr(datasets, "load_dataset", unknown_split)
    error = fault("openai/gsm8k", split="dev")
    assert 'Unknown split "dev"' in str(error) and error.diagnostics[0].key == "train_dataset.split"
    monkeypatch.undo()
    assert "neither a local file or folder nor a name on the Hub" in str(fault("what is this"))


@pytest.mark.parametrize(("status", "kind", "text"), [
    (404, "RepositoryNotFoundError", "the Hub has no dataset 'openai/gsm9k', or it is private"),
    (503, "HfHubHTTPError", "not in the cache and cannot be fetched: the Hub answered 503"),
])  # fmt: skip
def test_answers_of_the_hub(monkeypatch, tmp_path, status, kind, text):
    import httpx
    import huggingface_hub
    from huggingface_hub import errors

    def answer(self, *args, **kwargs):
        response = httpx.Response(status, request=httpx.Request("GET", "https://example.org"))
        raise getattr(errors, kind)("no", response=response)

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", answer)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    assert text in str(fault("openai/gsm9k"))


def test_null_as_seed_is_the_seed_of_the_run():
    rows = [load("reasoning_gym/chain_sum", kwargs={"size": 5, **extra})[0] for extra in ({}, {"seed": None})]
    assert rows[0].prompt == rows[1].prompt


# generated tasks


def test_generated_rows_are_the_packages_own():
    import reasoning_gym

    parameters = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1, "size": 20}
    rows = load("reasoning_gym/chain_sum", kwargs={**parameters, "seed": 9})
    theirs = reasoning_gym.create_dataset("chain_sum", seed=9, **parameters)
    assert [(r.prompt, r.answer) for r in rows] == [(e["question"], e["answer"]) for e in theirs]
    assert rows[-1] == rows[19] and len(rows[3:5]) == 2
    assert rows[0].dataset == "reasoning_gym/chain_sum" and rows[0].metadata["expression"] in rows[0].prompt


def test_the_seed_of_the_run_and_the_split_choose_the_rows():
    def prompts(seed: int, split: str) -> list[str]:
        section = TrainDatasetConfig(path="reasoning_gym/chain_sum", split=split, kwargs={"size": 30})
        return [r.prompt for r in load_rows(section, seed=seed)]

    assert prompts(1, "train") == prompts(1, "train")
    assert prompts(1, "train") != prompts(2, "train")
    assert not set(prompts(1, "train")) & set(prompts(1, "test"))


@pytest.mark.parametrize(
    ("path", "kwargs", "code", "text", "alternatives"),
    [
        ("reasoning_gym/chainsum", {}, "AL563", "no task 'chainsum'", ("reasoning_gym/chain_sum",)),
        ("reasoning_gym/", {}, "AL563", "no task ''", ()),
        ("reasoning_gym/chain_sum", {"min_term": 2}, "AL564", "no parameter 'min_term'", ("min_terms",)),
        ("reasoning_gym/chain_sum", {"min_terms": 5, "max_terms": 2}, "AL564", "refuses", ()),
        ("reasoning_gym/chain_sum", {"min_terms": "two"}, "AL564", "refuses", ()),
        ("reasoning_gym/chain_sum", {"size": 0}, "AL564", "refuses", ()),
    ],
)
def test_faults_of_tasks(path, kwargs, code, text, alternatives):
    error = fault(path, kwargs=kwargs)
    (diagnostic,) = error.diagnostics
    assert (diagnostic.code, diagnostic.alternatives) == (code, alternatives)
    assert text in diagnostic.message
