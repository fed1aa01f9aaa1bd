"""`areal-like bank`: what it prints, what it finds, and that it changes nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from areal_like.cli import main
from areal_like.data.rows import Row
from areal_like.rollout.bank import RolloutBank
from areal_like.rollout.trajectories import Rollout, RolloutGroup, TokenRollout, Turn


@pytest.fixture
def bank(tmp_path: Path) -> Path:
    turn = Turn([1, 2, 3], [4, 5], [-0.5, -1.0], [7, 9], "stop", "It is 4.\nSure.")
    members = [TokenRollout([turn], 1.0, figures={"format": 0.5}), TokenRollout([], None, "TimeoutError")]
    answer = Rollout([{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "日本"}], 0.25)
    with RolloutBank.open(tmp_path / "bank") as opened:
        opened.append(RolloutGroup("gsm8k", 17, Row("2 + 2?", "4", {}, 3, "openai/gsm8k"), members)).result(30)
        prompt = ({"role": "user", "content": "Hi"},)
        opened.append(RolloutGroup("chat", 0, Row(prompt, "", {"k": (1, 2)}), [answer])).result(30)
        opened.mark_consumed([("chat", 0)], 5)
    return tmp_path / "bank"


def test_ls(bank: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bank", "ls", str(bank)]) == 0
    first, *rows = capsys.readouterr().out.splitlines()
    assert first.startswith(f"{bank}: 2 groups, generation-") and first.endswith("checkpoint of step 0")
    cells = [row.split() for row in rows]
    assert cells[0] == ["name", "members", "failed", "reward", "tokens", "versions", "bytes", "consumed"]
    assert cells[1][:6] == ["gsm8k/17", "2", "1", "1", "5", "7-9"] and cells[1][7] == "-"
    assert cells[2][:6] == ["chat/0", "1", "0", "0.25", "0", "-"] and cells[2][7] == "5"
    assert len({len(row) for row in rows}) == 1


def test_ls_json(bank: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bank", "ls", str(bank), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["format"] == 1 and found["checkpoint"] == 0 and len(found["timeline"]) == 32
    first, second = found["groups"]
    assert first["name"] == "gsm8k/17" and first["versions"] == [7, 9] and first["consumed"] is None
    assert second["consumed"] == 5 and second["reward"] == 0.25 and second["bytes"] > 100


def test_ls_of_an_empty_bank(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    RolloutBank.open(tmp_path).close()
    assert main(["bank", "ls", str(tmp_path)]) == 0
    assert "0 groups" in capsys.readouterr().out


def test_show(bank: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bank", "show", str(bank), "gsm8k/17"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "gsm8k/17: row 3 of openai/gsm8k",
        "not trained yet",
        "prompt",
        "    2 + 2?",
        "answer",
        "    4",
        "member 0: reward 1, format 0.5",
        "  turn: 3 + 2 tokens, stop, version 7-9",
        "    It is 4.",
        "    Sure.",
        "member 1: failed: TimeoutError",
    ]
    assert main(["bank", "show", str(bank), "chat/0"]) == 0
    out = capsys.readouterr().out
    assert "step 5 trains it" in out and "    user: Hi\n" in out and "    assistant: 日本" in out


def test_show_of_what_a_terminal_should_not_see(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    turn = Turn([1], [2], [-1.0], [0], "stop", "a\tb\x1b[31m \ud800 \u3000.")
    with RolloutBank.open(tmp_path) as opened:
        opened.append(RolloutGroup("e", 0, Row("q", ""), [TokenRollout([turn], 1.0)])).result(30)
    assert main(["bank", "show", str(tmp_path), "e/0"]) == 0
    assert "    a\tb\\x1b[31m \\ud800 \u3000.\n" in capsys.readouterr().out


def test_show_json(bank: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bank", "show", str(bank), "gsm8k/17", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["members"][0]["turns"][0]["token_ids"] == [4, 5] and found["members"][1]["reward"] is None
    assert found["row"]["prompt"] == "2 + 2?"


def test_show_of_what_is_not_there(bank: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bank", "show", str(bank), "gsm8k/18"]) == 2
    assert "has no group 'gsm8k/18'; did you mean gsm8k/17?" in capsys.readouterr().err


def test_verify(bank: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bank", "verify", str(bank)]) == 0
    assert capsys.readouterr().out == "2 groups are whole, 0 damages\n"
    index = next(bank.rglob("index.log"))
    index.write_bytes(index.read_bytes() + b"\nhalf a li")
    data = next(bank.rglob("data.bin"))
    content = bytearray(data.read_bytes())
    content[5] ^= 1
    data.write_bytes(content + b"xyz")
    assert main(["bank", "verify", str(bank)]) == 1
    out = capsys.readouterr().out
    assert f"damaged: {data}, byte 0: group gsm8k/17: " in out and "do not agree with their check" in out
    assert f"unfinished: {index}, byte " in out and "3 bytes of data.bin belong to no group" in out
    assert out.endswith("1 groups are whole, 1 damages\n")
    assert main(["bank", "verify", str(bank), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["groups"] == 1 and found["unused"] == 3 and len(found["torn"]) == 1
    assert found["damages"][0]["offset"] == 0 and found["damages"][0]["group"] == ["gsm8k", 17]
    assert main(["bank", "show", str(bank), "gsm8k/17"]) == 2
    assert "this group is lost" in capsys.readouterr().err
    assert data.read_bytes().endswith(b"xyz"), "nothing is repaired"


@pytest.mark.parametrize("action", [["ls"], ["show"], ["verify"]])
def test_what_is_no_bank(tmp_path: Path, action: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    name = ["gsm8k/1"] if action == ["show"] else []
    assert main(["bank", *action, str(tmp_path / "none"), *name]) == 2
    out, err = capsys.readouterr()
    assert out == "" and "it is no rollout bank" in err and "Traceback" not in err
    assert not (tmp_path / "none").exists()


def test_it_starts_without_torch(bank: Path) -> None:
    code = "import sys; from areal_like.cli import main; main(['bank', 'verify', sys.argv[1]])"
    code += "; assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code, str(bank)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
