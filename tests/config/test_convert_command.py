"""`areal-like convert`: its input, its output, its exit status; and what its document says."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from convert_inputs import FLAGS, NEMO, VERL

from areal_like.cli import main
from areal_like.config import load_config
from areal_like.config.findings import CODES

ROOT = Path(__file__).parents[2]
DOCUMENT = (ROOT / "docs" / "convert.md").read_text(encoding="utf-8")
EXAMPLE = ROOT / "examples" / "math" / "gsm8k_grpo_megatron.yaml"


@pytest.mark.parametrize(("source", "text"), [("verl", VERL), ("nemo-rl", NEMO)])
def test_a_file_with_overrides(source: str, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "theirs.yaml"
    file.write_text(text, encoding="utf-8")
    override = {"verl": "actor_rollout_ref.rollout.n=3", "nemo-rl": "grpo.num_generations_per_prompt=4"}[source]
    assert main(["convert", "--from", source, str(file), override]) == 0
    out, err = capsys.readouterr()
    result = tmp_path / "ours.yaml"
    result.write_text(out, encoding="utf-8")
    assert load_config(result).gconfig.n_samples == int(override[-1])
    assert "warning[AL820]: " in err and "Traceback" not in err


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", "--from", "allocation_mode", "sglang:d4+megatron:d2t2", "--fragment", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert yaml.safe_load(data["text"]) == {"rollout": {"backend": "sglang:d4"}, "actor": {"backend": "megatron:d2t2"}}
    assert data["diagnostics"] == []
    assert main(["convert", "--from", "megatron-lm", FLAGS, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["diagnostics"]
    assert {d["code"] for d in found} == {"AL820", "AL821"} and all(d["message"] and d["severity"] for d in found)


def test_standard_input_and_flags_after_two_dashes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(VERL))
    assert main(["convert", "--from", "verl", "--to", "nemo-rl", "-"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["policy"]["model_name"] == "Qwen/Qwen3-30B-A3B"
    monkeypatch.setattr("sys.stdin", io.StringIO("--tensor-model-parallel-size 2 \\\n --world-size 4\n"))
    assert main(["convert", "--from", "megatron-lm", "-"]) == 0
    assert "backend: megatron:d2t2\n" in capsys.readouterr().out
    assert (
        main(["convert", "--from", "megatron-lm", "--", "--tensor-model-parallel-size", "2", "--world-size", "4"]) == 0
    )
    assert "backend: megatron:d2t2\n" in capsys.readouterr().out


def test_keys_with_the_same_reason_stand_together(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", "--to", "nemo-rl", str(EXAMPLE)]) == 0
    lines = capsys.readouterr().err.splitlines()
    (at,) = [i for i, line in enumerate(lines) if line.startswith("warning[AL820]: left out, ")]
    count = int(lines[at].split()[3])
    assert "    experiment_name: gsm8k-grpo" in lines[at + 1 : at + 1 + count]
    assert all(line.startswith("    ") for line in lines[at + 1 : at + 1 + count])


def test_to_flags(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", "--to", "megatron-lm", str(EXAMPLE), "actor.backend=megatron:d2t2"]) == 0
    flags = capsys.readouterr().out.replace("\\\n", "").split("--")
    assert "tensor-model-parallel-size 2" in [flag.strip() for flag in flags]
    assert "nproc-per-node 4" in [flag.strip() for flag in flags]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--from", "allocation_mode", "sglang:d4|megatron[actor]:d8"], "AL823"),
        (["--from", "verl", "no/such/file.yaml"], "AL801"),
        (["--from", "verl", "a.yaml", "b.yaml"], "one file at a time"),
        (["--from", "verl", "trainer.nnodes"], "AL801"),
        (["--to", "verl", "no/such/file.yaml"], "AL801"),
        (["--to", "verl", "seed=1"], "AL803"),
    ],
)
def test_what_is_refused(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == "" and words in err and "Traceback" not in err


def test_the_table_of_codes_is_that_of_the_code() -> None:
    shown = dict(re.findall(r"^\| (AL82\d) \| (\w+) \|", DOCUMENT, re.M))
    assert shown == {"AL820": "warning", "AL821": "info", "AL822": "warning", "AL823": "error"}
    assert set(shown) == {code for code in CODES if code.startswith("AL82")}


def fragment(name: str) -> object:
    found = re.search(rf"<!-- {name}:begin -->\n```text\n(.*?)```\n<!-- {name}:end -->", DOCUMENT, re.DOTALL)
    assert found is not None
    return yaml.safe_load(found[1])


def test_the_fragments_are_yaml_and_their_commands_exist() -> None:
    workflow, hooks = fragment("workflow"), fragment("pre-commit")
    assert isinstance(workflow, dict) and isinstance(hooks, dict)
    commands = [step["run"] for step in workflow["jobs"]["check"]["steps"] if "run" in step]
    assert commands[-1].split()[:4] == ["areal-like", "check", "--format", "github"]
    (declared,) = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text(encoding="utf-8"))
    (used,) = hooks["repos"][0]["hooks"]
    assert used["id"] == declared["id"]
    line = [sys.executable, "-m", "areal_like.cli", *commands[-1].split()[1:-1], *used["args"], str(EXAMPLE)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=60)
    assert done.returncode in (0, 1) and done.stderr == "" and "::" in done.stdout


def test_the_check_needs_only_the_packages_of_the_workflow() -> None:
    """With every other package hidden, the commands of this page and the check do what they do."""
    (install,) = re.findall(r"run: pip install (lark .*)", DOCUMENT)
    modules = {"PyYAML": "yaml"}
    needed = {modules.get(name, name) for name in install.split()}
    brought_in = {"pydantic_core", "annotated_types", "typing_extensions", "typing_inspection", "_yaml"}
    known = needed | brought_in | {"areal_like"}
    code = f"""
import sys

class Hide:
    def find_spec(self, name, path=None, target=None):
        top = name.split(".")[0]
        if not top.startswith("_") and top not in sys.stdlib_module_names and top not in {known!r}:
            raise ModuleNotFoundError(name, name=name)

sys.meta_path.insert(0, Hide())
from areal_like.cli import main
codes = [
    main(["check", {str(EXAMPLE)!r}]),
    main(["convert", "--from", "allocation_mode", "sglang:d4+megatron:d4"]),
    main(["schema"]),
]
print("CODES", codes)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert re.search(r"CODES \[[01], 0, 0\]", done.stdout), done.stdout[-500:] + done.stderr
