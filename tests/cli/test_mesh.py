"""`areal-like mesh` with its options: nodes, a rank, a model, formats, files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from areal_like.cli import main
from areal_like.spec import split_layers

FOLDED = "megatron:(attn:d2p3t2c2|ffn:t2e4)"


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """--build hides the GPUs from its process, which here is that of all tests."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", os.environ.get("CUDA_VISIBLE_DEVICES", ""))


def out(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["mesh", *arguments]) == 0
    return capsys.readouterr().out


def test_plain_output_is_the_text_format(capsys: pytest.CaptureFixture[str]) -> None:
    assert out(capsys, FOLDED) == out(capsys, FOLDED, "--format", "text")


def test_nodes_rank_and_model(capsys: pytest.CaptureFixture[str]) -> None:
    shown = out(capsys, FOLDED, "--nodes", "3x8", "--rank", "9", "--model", "Qwen/Qwen3-30B-A3B")
    assert "24 ranks on 3 nodes of 8 GPUs, Qwen/Qwen3-30B-A3B" in shown
    assert "rank 9 (node 1, GPU 1): tp 1 cp 0 dp 0 pp 1; experts: etp 1 ep 0 edp 0 pp 1" in shown
    assert "experts 0-31 of 128, 1/2 of each" in shown
    # 48 equal layers that attend to 1,024 tokens, and the vocabulary projection costs the last stage some
    cost = 2.0 * 2048 * 128 * (32 + 2 * 4 + 32) + 6.0 * 2048 * 768 * 8 + 2.0 * 2048 * 128 + 4.0 * 32 * 128 * 1024
    first, second, _ = split_layers([cost] * 48, 3, head_cost=2.0 * 2048 * 151936)
    assert f"layers {first}-{first + second - 1} (of 48 layers)" in shown


def test_a_written_split(capsys: pytest.CaptureFixture[str]) -> None:
    shown = out(capsys, "megatron:d1p2", "--model", "Qwen/Qwen3-0.6B", "--rank", "1", "--pipeline-layout", "20,8")
    assert "layers 20-27, output layer (of 28 layers)" in shown


def test_json_svg_and_html(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    content = json.loads(out(capsys, FOLDED, "--format", "json", "--model", "Qwen/Qwen3-30B-A3B"))
    assert content["model"]["experts"] == 128 and sum(b - a + 1 for [[a, b]] in content["model"]["stages"]) == 48
    file = tmp_path / "mesh.svg"
    assert out(capsys, FOLDED, "--format", "svg", "--output", str(file)) == ""
    assert ET.parse(file).getroot().tag.endswith("svg")
    assert out(capsys, FOLDED, "--format", "html").startswith("<!doctype html>")


def test_virtual_stages_take_turns(capsys: pytest.CaptureFixture[str]) -> None:
    content = json.loads(out(capsys, "megatron:d1p2v2", "--model", "Qwen/Qwen3-0.6B", "--format", "json"))
    first, second = content["model"]["stages"]
    assert first[0][1] + 1 == second[0][0] and second[0][1] + 1 == first[1][0] and first[1][1] + 1 == second[1][0]
    assert first[0][0] == 0 and second[1][1] == 27


def test_a_folder_and_a_config_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    config = {"model_type": "llama", "num_hidden_layers": 4, "hidden_size": 8, "num_attention_heads": 2}
    config |= {"intermediate_size": 16, "vocab_size": 32}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for name in (tmp_path, tmp_path / "config.json"):
        assert "pp 1: layers 2-3, output layer" in out(capsys, "megatron:d1p2", "--model", str(name))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["megatron:d2", "--rank", "2"], "AL110"),
        (["megatron:d2", "--rank", "-1"], "AL110"),
        (["megatron:d4", "--nodes", "1x2"], "--nodes 2x2"),
        (["megatron:d4", "--nodes", "4"], "write 2x8"),
        (["megatron:d4", "--nodes", "0x8"], "write 2x8"),
        (["megatron:d4", "--model", "no/such-model"], "no/such-model"),
        (["megatron:d1p40", "--model", "Qwen/Qwen3-0.6B"], "AL309"),
        (["megatron:d1p2", "--model", "Qwen/Qwen3-0.6B", "--pipeline-layout", "14,15"], "AL316"),
        (["megatron:d3e3", "--model", "Qwen/Qwen3-30B-A3B"], "AL308"),
        (["megatron:d2e2", "--model", "Qwen/Qwen3-0.6B"], "AL307"),
        (["megatron:d2", "--output", "/no/such/folder/file"], "cannot write /no/such/folder/file"),
        (["megatron:d2", "--build", "--rank", "2"], "AL110"),
        (["sglang:d2", "--build"], "AL207"),
        (["fsdp:d2", "--build"], "AL205"),
        (["megatron:t3", "--build", "--model", "Qwen/Qwen3-0.6B"], "AL303"),
    ],
)
def test_what_is_refused(capsys: pytest.CaptureFixture[str], arguments: list[str], words: str) -> None:
    assert main(["mesh", *arguments]) == 2
    shown, error = capsys.readouterr()
    assert shown == "" and words in error and "Traceback" not in error


def test_build_reports_and_exits(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """`engines.megatron.proof` has tests of its own: here is tested what the command makes of it."""
    from areal_like.engines.megatron import proof

    found = proof.Proof("megatron:d1p2", 1, 2, groups=40, parameters=7, predicted=7, tensors=2)
    asked = []

    def prove(allocation: object, *, rank: int, spec: object, pipeline_layout: object) -> proof.Proof:
        asked.append((str(allocation), rank, spec and spec.num_layers, pipeline_layout))  # type: ignore[attr-defined]
        return found

    monkeypatch.setattr(proof, "prove", prove)
    shown = out(
        capsys,
        *("megatron:p2", "--build", "--rank", "1", "--model", "Qwen/Qwen3-0.6B", "--pipeline-layout", "27,1"),
    )
    assert "rank 1 of 2 ranks" in shown and "7 parameters in 2 tensors" in shown and shown.endswith("\nequal\n")
    found.differences.append("decoder.x: 3 elements built, 4 predicted")
    assert main(["mesh", "megatron:p2", "--build", "--format", "json"]) == 1
    assert json.loads(capsys.readouterr().out)["holds"] is False
    assert main(["mesh", "megatron:p2", "--build"]) == 1
    assert "DIFFERENT: decoder.x: 3 elements built" in capsys.readouterr().out
    assert asked == [("megatron:d1p2", 1, 28, (27, 1)), *[("megatron:d1p2", 0, None, None)] * 2]


def test_no_view_imports_torch() -> None:
    code = "import sys; from areal_like.cli import main\n"
    code += f"[main(['mesh', {FOLDED!r}, '--format', f, '--model', 'Qwen/Qwen3-30B-A3B', '--output', '/dev/null'])"
    code += " for f in ('text', 'json', 'svg', 'html')]\nprint([m for m in sys.modules if m in ('torch', 'megatron')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[]\n"
