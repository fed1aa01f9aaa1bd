"""`areal-like check`: what it reads, what it prints, and how it exits."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest

from areal_like.cli import main

GOOD = """\
experiment_name: e
trial_name: t
device: cuda
cluster: {n_gpus_per_node: 8}
rollout: {backend: "huggingface:d4"}
gconfig: {n_samples: 8, max_new_tokens: 1024}
actor:
  backend: megatron:d4
  path: Qwen/Qwen3-0.6B
  mb_spec: {max_tokens_per_mb: 8192}
  optimizer: {lr: 1e-6}
  ppo_n_minibatches: 1
  reward_norm: {mean_level: group, std_level: group}
train_dataset: {path: openai/gsm8k, batch_size: 32, max_length: 1024}
"""
BAD = GOOD.replace("megatron:d4", "megatron:d1p2t3")
WASTEFUL = GOOD.replace("megatron:d4", "megatron:d2t2")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name, text in {"good.yaml": GOOD, "bad.yaml": BAD, "wasteful.yaml": WASTEFUL}.items():
        Path(name).write_text(text, encoding="utf-8")
    return tmp_path


def output(capsys: pytest.CaptureFixture[str], *arguments: str, status: int) -> str:
    assert main(["check", *arguments]) == status
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def codes(capsys: pytest.CaptureFixture[str], *arguments: str, status: int) -> list[str]:
    found = json.loads(output(capsys, *arguments, "--format", "json", status=status))
    return [d["code"] for d in found]


pytestmark = pytest.mark.usefixtures("folder")


def test_a_good_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert output(capsys, "good.yaml", status=0) == "good.yaml: nothing found\n"


def test_the_text_points_at_the_letter(capsys: pytest.CaptureFixture[str]) -> None:
    text = output(capsys, "bad.yaml", status=1)
    assert "error[AL303]: 16 attention heads do not divide by t3" in text
    assert "  --> bad.yaml:8:3 (actor.backend)\n  | megatron:d1p2t3\n  |              ^^\n" in text
    assert text.index("error[") < text.index("info[") and text.endswith("bad.yaml: 1 error, 1 warning, 4 info\n")


def test_json_is_one_array_of_objects(capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(output(capsys, "good.yaml", "bad.yaml", "wasteful.yaml", "--format", "json", status=1))
    assert {d["file"] for d in found} == {"bad.yaml", "wasteful.yaml"}
    keys = {"code", "severity", "message", "key", "file", "line", "column", "span", "help", "alternatives"}
    assert all(keys <= set(d) for d in found)
    (error,) = [d for d in found if d["severity"] == "error"]
    assert error["span"] == {"start": 13, "end": 15} and error["line"] == 8 and len(error["alternatives"]) == 3


def test_sarif_and_github(capsys: pytest.CaptureFixture[str]) -> None:
    (run,) = json.loads(output(capsys, "bad.yaml", "--format", "sarif", status=1))["runs"]
    assert run["results"][0]["ruleId"] == "AL303" and run["tool"]["driver"]["name"] == "areal-like"
    lines = output(capsys, "bad.yaml", "--format", "github", status=1).splitlines()
    assert lines[0].startswith("::error file=bad.yaml,line=8,col=3,title=AL303::16 attention heads")
    assert output(capsys, "good.yaml", "--format", "github", status=0) == ""


def test_globs_and_overrides(capsys: pytest.CaptureFixture[str]) -> None:
    text = output(capsys, "*.yaml", "actor.backend=megatron:d4", status=0)
    assert text.count("nothing found") == 3
    assert codes(capsys, "good.yaml", "actor.backend=megatron:d1p29", status=1)[0] == "AL309"


def test_standard_input(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(BAD.encode())))
    assert "<standard input>:8:3 (actor.backend)" in output(capsys, "-", status=1)


def test_select_ignore_and_strict(capsys: pytest.CaptureFixture[str]) -> None:
    assert codes(capsys, "wasteful.yaml", status=0) == ["AL702"]
    assert codes(capsys, "wasteful.yaml", "--strict", status=1) == ["AL702"]
    assert codes(capsys, "wasteful.yaml", "--strict", "--ignore", "AL7", status=0) == []
    assert codes(capsys, "bad.yaml", "--select", "AL303,AL7", status=1) == ["AL303", "AL702"]
    assert codes(capsys, "bad.yaml", "--select", "AL3", "--ignore", "AL303", status=0) == ["AL313", "AL312", "AL314"]


@pytest.mark.parametrize("arguments", [("--select", "XY1"), ("--ignore", "AL1234"), ("--select", "303")])
def test_what_is_no_code(arguments: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        main(["check", "good.yaml", *arguments])
    assert raised.value.code == 2 and "is no code" in capsys.readouterr().err


def test_model_and_cluster(capsys: pytest.CaptureFixture[str]) -> None:
    assert codes(capsys, "good.yaml", "--cluster", "nodes=1,gpus=2", "--select", "AL401", status=1) == ["AL401"] * 2
    assert "AL601" in codes(capsys, "good.yaml", "--cluster", "memory=8GiB", status=1)
    assert codes(capsys, "good.yaml", "--model", "Qwen/Qwen3-30B-A3B", "--select", "AL3", status=0) == []
    changes = ["good.yaml", "--model", "Qwen/Qwen3-30B-A3B", "--select", "AL304", "actor.backend=megatron:t8"]
    assert codes(capsys, *changes, status=0) == []
    Path("config.json").write_text('{"model_type": "llama"}', encoding="utf-8")
    for model in ("config.json", "no/such-model"):
        assert main(["check", "good.yaml", "--model", model]) == 2
        assert model.split("/")[-1] in capsys.readouterr().err


@pytest.mark.parametrize("cluster", ["gpus=0", "gpus=x", "racks=2", "memory=much", "nodes=99999999", "memory=0GiB"])
def test_what_is_no_cluster(cluster: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "good.yaml", "--cluster", cluster]) == 2
    assert cluster.partition("=")[2] in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "code"),
    [(None, "AL801"), (b"\xff\xfe", "AL801"), (b"a: [", "AL802"), (b"- a\n", "AL803"), (b"", "AL803")],
)
def test_input_that_cannot_be_read(content: bytes | None, code: str, capsys: pytest.CaptureFixture[str]) -> None:
    if content is not None:
        Path("input.yaml").write_bytes(content)
    assert codes(capsys, "good.yaml", "input.yaml", status=2) == [code]


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("arguments", [("--ignore", "AL8"), ("--select", "AL3"), ("--ignore", "AL801,AL802,AL803")])
def test_an_unreadable_file_is_never_silenced(arguments: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    Path("broken.yaml").write_text("a: [1,\n b: {  # areal-like: ignore AL8", encoding="utf-8")
    assert main(["check", "broken.yaml", *arguments]) == 2
    assert "AL802" in capsys.readouterr().out


def test_nothing_to_check(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "seed=1"]) == 2
    assert "give a file" in capsys.readouterr().err


def silenced(text: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    Path("silenced.yaml").write_text(text, encoding="utf-8")
    main(["check", "silenced.yaml", "--format", "json"])
    return [d["code"] for d in json.loads(capsys.readouterr().out)]


def test_a_comment_silences_its_line_only(capsys: pytest.CaptureFixture[str]) -> None:
    line = "  backend: megatron:d1p2t3"

    def with_comment(comment: str) -> list[str]:
        return silenced(BAD.replace(line, line + comment), capsys)

    every = silenced(BAD, capsys)
    assert silenced(BAD.replace(line, line + " # areal-like: ignore AL303"), capsys) == [
        c for c in every if c != "AL303"
    ]
    kept = [c for c in every if c not in ("AL303", "AL312")]
    assert silenced(BAD.replace(line, line + "  #areal-like:ignore AL303, AL312"), capsys) == kept
    assert silenced(BAD.replace(line, line + " # areal-like: ignore AL3"), capsys) == [
        c for c in every if c[:3] != "AL3"
    ]
    assert silenced("# areal-like: ignore AL303\n" + BAD, capsys) == every, "another line"
    assert with_comment(" # areal-like: ignore everything") == every


def test_faulty_keys_do_not_hide_the_layout(capsys: pytest.CaptureFixture[str]) -> None:
    text = BAD.replace("gconfig: {n_samples: 8", "gconfig: {n_sample: 8").replace("trial_name: t\n", "")
    Path("faulty.yaml").write_text(text, encoding="utf-8")
    found = codes(capsys, "faulty.yaml", status=1)
    assert {"AL805", "AL806", "AL303"} <= set(found) and not any(code > "AL4" for code in found if code < "AL8")


def test_what_this_version_cannot_do_hides_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    text = BAD.replace("huggingface:d4", "sglang:d4").replace("  optimizer", "  use_lora: true\n  optimizer")
    text = text.replace("max_tokens_per_mb: 8192", "max_tokens_per_mb: 1000").replace(
        "n_gpus_per_node", "n_nodes: 2, n_gpus_per_node"
    )
    Path("cluster.yaml").write_text(text, encoding="utf-8")
    found = codes(capsys, "cluster.yaml", status=1)
    assert {"AL205", "AL811", "AL303", "AL513", "AL521"} <= set(found)
    assert found.count("AL205") == 1


def test_rule_pages(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rule", "al303"]) == 0
    assert "error[AL303]: 16 attention heads do not divide by t5" in capsys.readouterr().out
    assert main(["rule"]) == 0
    assert "\nAL303  error    t does not divide the attention heads\n" in capsys.readouterr().out
    assert main(["rule", "AL391"]) == 0
    assert "a model cannot be found or read" in capsys.readouterr().out
    assert main(["rule", "AL330"]) == 2
    assert "there is no rule 'AL330'" in capsys.readouterr().err
