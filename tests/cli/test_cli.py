"""The `areal-like` command: output, exit status, and what it refuses."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import pytest

from areal_like.alloc import Diagnostic, DiagnosticError
from areal_like.cli import main


def test_parse(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["parse", "megatron:(attn:d1p4t2c2|ffn:e4)"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["allocation", "megatron:d1t2p4c2e4"] in lines and ["world_size", "16"] in lines and ["name", "-"] in lines


def test_parse_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["parse", "megatron:d4t2e4", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["world_size"] == 8 and data["expert_data_parallel_size"] == 2 and data["backend"] == "megatron"


def test_bad_string(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["parse", "megatorn:d0"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and "AL201" in err and "AL012" in err and "Traceback" not in err
    assert main(["parse", "megatorn:d0", "--json"]) == 2
    assert [d["code"] for d in json.loads(capsys.readouterr().out)] == ["AL201", "AL012"]


def test_mesh(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["mesh", "megatron:(attn:d1p2t4|ffn:t2e2)"]) == 0
    out = capsys.readouterr().out
    assert "8 ranks" in out and "[0 2] [1 3] [4 6] [5 7]" in out
    rows = [line.split() for line in out.splitlines()]
    assert ["rank", "tp", "cp", "dp", "pp", "etp", "ep", "edp"] in rows
    assert ["7", "3", "0", "0", "1", "1", "1", "0"] in rows


def test_mesh_of_a_star(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["mesh", "megatron:d*t2"]) == 2
    assert "AL107" in capsys.readouterr().err
    assert main(["mesh", "megatron:d*t2", "--gpus", "4"]) == 0
    assert "megatron:d2t2: 4 ranks" in capsys.readouterr().out
    assert main(["mesh", "megatron:d*t2", "--gpus", "5"]) == 2


def test_mesh_of_a_large_world_is_short(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["mesh", "megatron:d16384t8p8e64"]) == 0
    out = capsys.readouterr().out
    assert len(out.splitlines()) < 150 and len(out) < 20_000 and "more ranks" in out


@dataclass
class Report:
    passed: bool

    def to_dict(self) -> dict[str, Any]:
        return {"passed": self.passed}

    def render(self) -> str:
        return "pass" if self.passed else "fail"


@dataclass
class Trial:
    """Stands for `trainers.trial`, which has tests of its own: here is tested what the command makes of it."""

    result: Report | Exception = field(default_factory=lambda: Report(True))
    calls: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    def run_trial(self, text: str, **options: Any) -> Report:
        self.calls.append((text, options))
        if isinstance(self.result, Exception):
            raise self.result
        return self.result


@pytest.fixture
def trial(monkeypatch: pytest.MonkeyPatch) -> Iterator[Trial]:
    stub = Trial()
    module = ModuleType("areal_like.trainers.trial")
    module.run_trial = stub.run_trial  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "areal_like.trainers.trial", module)
    yield stub


def test_try(trial: Trial, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["try", "megatron:d2"]) == 0
    assert capsys.readouterr().out == "pass\n"
    options = {"bridge": "mbridge", "dtype": "float32", "steps": 3, "device": "auto", "model": "tiny-dense"}
    options |= {"fp8": None, "deterministic": False, "lora_rank": None, "resume_as": None}
    assert trial.calls == [("megatron:d2", options)]
    trial.result = Report(False)
    arguments = ["--model", "tiny-moe", "--steps", "5", "--device", "cpu", "--dtype", "bfloat16", "--json"]
    assert main(["try", "megatron:e2d2", *arguments]) == 1
    assert json.loads(capsys.readouterr().out) == {"passed": False}
    assert trial.calls[1][1] == options | {"model": "tiny-moe", "steps": 5, "device": "cpu", "dtype": "bfloat16"}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--fp8"], {"fp8": "tensorwise", "dtype": "bfloat16"}),
        (["--fp8", "blockwise", "--dtype", "float32"], {"fp8": "blockwise", "dtype": "float32"}),
        (["--deterministic"], {"deterministic": True, "dtype": "float32"}),
    ],
)
def test_try_in_fp8_and_twice(trial: Trial, arguments: list[str], expected: dict[str, Any]) -> None:
    """A type that is asked for reaches the trial, which refuses what does not go with FP8."""
    assert main(["try", "megatron:d1", *arguments]) == 0
    assert expected.items() <= trial.calls[0][1].items()


def test_try_reports_what_the_trial_refuses(trial: Trial, capsys: pytest.CaptureFixture[str]) -> None:
    trial.result = DiagnosticError([Diagnostic("AL301", "error", "9 heads do not divide by 2")])
    assert main(["try", "megatron:t2"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err == "error[AL301]: 9 heads do not divide by 2\n"


@pytest.mark.parametrize(
    ("text", "code"), [("megatron:d0", "AL012"), ("sglang:d1", "AL207"), ("fsdp:d2", "AL205"), ("megatron:d*", "AL107")]
)
def test_try_refuses_before_it_starts(trial: Trial, capsys: pytest.CaptureFixture[str], text: str, code: str) -> None:
    assert main(["try", text]) == 2
    assert code in capsys.readouterr().err and trial.calls == []


@pytest.mark.parametrize(
    "arguments",
    [[], ["nosuch"], ["try", "megatron:d1", "--steps", "0"], ["try", "megatron:d1", "--model", "/no/such/folder"]],
)
def test_bad_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2 and "usage:" in capsys.readouterr().err


def test_installed_command_and_a_reader_that_goes_away() -> None:
    command = [sys.executable, "-m", "areal_like.cli"]
    done = subprocess.run([*command, "parse", "megatron:tp4"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "did you mean t4?" in done.stderr and done.stdout == ""
    with subprocess.Popen(
        [*command, "mesh", "megatron:d16384t8"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""


def test_the_real_trial_has_the_signature_that_the_command_uses() -> None:
    if importlib.util.find_spec("areal_like.trainers.trial") is None:
        pytest.fail("areal_like.trainers.trial is missing: `areal-like try` cannot work")
    import ast
    from pathlib import Path

    spec = importlib.util.find_spec("areal_like.trainers.trial")
    assert spec is not None and spec.origin is not None
    tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
    [function] = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == "run_trial"]
    names = {argument.arg for argument in function.args.kwonlyargs}
    assert names >= {"model", "bridge", "dtype", "steps", "device", "fp8", "deterministic", "lora_rank"}
