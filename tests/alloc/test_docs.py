"""docs/language.md says what the code does: every table row, example and code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from areal_like.alloc import AllocationError, DiagnosticError, ModelAllocation, backends, get_backend
from areal_like.alloc.codes import CODES

TEXT = (Path(__file__).parents[2] / "docs" / "language.md").read_text(encoding="utf-8")
ROWS = [
    [cell.replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
    for line in TEXT.splitlines()
    if line.startswith("| ")
]


def rows(pattern: str, columns: int) -> list[list[str]]:
    return [row for row in ROWS if len(row) == columns and re.fullmatch(pattern, row[0].strip())]


CODE_ROWS = rows(r"AL\d{3}", 3)


@pytest.mark.parametrize(("code", "example", "message"), CODE_ROWS, ids=[row[0] + row[1] for row in CODE_ROWS])
def test_code_example(code: str, example: str, message: str) -> None:
    source = example[1:-1].strip("`")
    with pytest.raises(DiagnosticError) as caught:
        if source.startswith(("ModelAllocation", "get_backend")):
            eval(source, {"ModelAllocation": ModelAllocation, "get_backend": get_backend})
        else:
            ModelAllocation.parse(source)
    assert [(d.code, d.message) for d in caught.value.diagnostics] == [(code.strip(), message.strip())]


def test_every_code_is_documented() -> None:
    shown = {row[0].strip() for row in CODE_ROWS} | {row[0].strip() for row in rows(r"AL\d{3}", 2)}
    assert shown == set(CODES)


def test_meaning_table() -> None:
    table = rows(r"`megatron:.*`", 4)
    assert len(table) == 6
    for string, world, attention, experts in table:
        a = ModelAllocation.parse(string.strip().strip("`"))
        assert a.world_size == int(world)
        assert [a.dp, a.tp, a.pp, a.cp] == [int(x) for x in attention.split()]
        assert [a.ep, a.etp, a.edp] == [int(x) for x in experts.split()]


def test_backend_table() -> None:
    table = {row[0].strip().strip("`"): [cell.strip() for cell in row[1:]] for row in rows(r" ?`[a-z]{3,}` ?", 5)}
    built_in = {name: d for name, d in backends().items() if name in table}
    assert set(table) == {"megatron", "fsdp", "archon", "huggingface", "sglang", "vllm"} == set(built_in)
    for name, (role, letters, folded, engine) in table.items():
        descriptor = built_in[name]
        assert role == descriptor.role
        assert letters.strip("`").split() == list(descriptor.letters)
        assert (folded == "yes") is descriptor.has_experts
        assert (engine == "yes") is bool(descriptor.engine)


def test_python_examples_run() -> None:
    blocks = re.findall(r"```python\n(.*?)```", TEXT, re.S)
    assert len(blocks) == 2
    for block in blocks:
        exec(block, {})


def test_the_rendered_example() -> None:
    with pytest.raises(AllocationError) as caught:
        ModelAllocation.parse("megatorn:d0t2t2p04")
    indented = "\n".join("    " + line for line in str(caught.value).splitlines())
    assert indented in TEXT


def test_canonical_and_star_examples() -> None:
    assert "is `megatron:d1t2p4c2e4`" in TEXT
    assert str(ModelAllocation.parse("megatron:(attn:d1p4t2c2|ffn:d1p4t1e4)")) == "megatron:d1t2p4c2e4"
    assert str(ModelAllocation.parse("megatron:d*t4").resolve(16)) == "megatron:d4t4"
