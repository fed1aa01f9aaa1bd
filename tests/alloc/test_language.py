"""What the language accepts and refuses. The strings of AReaL's users (as AReaL 1.0.4 treats them) come first."""

from __future__ import annotations

import pytest

from areal_like.alloc import AllocationError, Diagnostic, ModelAllocation, Span


def faults(text: object) -> tuple[Diagnostic, ...]:
    with pytest.raises(AllocationError) as caught:
        ModelAllocation.parse(text)  # type: ignore[arg-type]
    return caught.value.diagnostics


def codes(text: object) -> list[str]:
    return [d.code for d in faults(text)]


# (string, world, dp, tp, pp, cp, ep, etp, edp): what AReaL accepts with a sensible meaning, sizes by hand. edp is
# Megatron's world / (p * etp * ep), not AReaL's.
ACCEPTED = [
    ("fsdp:d4", 4, 4, 1, 1, 1, 1, 1, 4),
    ("megatron:t4d2p2", 16, 2, 4, 2, 1, 1, 1, 8),
    ("megatron:d4t2p2e4", 16, 4, 2, 2, 1, 4, 1, 2),
    ("megatron: d 4 t 2", 8, 4, 2, 1, 1, 1, 1, 8),
    ("megatron:d4\nt2", 8, 4, 2, 1, 1, 1, 1, 8),
    ("megatron:d4\r\n", 4, 4, 1, 1, 1, 1, 1, 4),
    ("\tmegatron\f:\td4 ", 4, 4, 1, 1, 1, 1, 1, 4),
    ("megatron:d4t2e8", 8, 4, 2, 1, 1, 8, 1, 1),
    ("fsdp:d2e1", 2, 2, 1, 1, 1, 1, 1, 2),
    ("fsdp:d2p1", 2, 2, 1, 1, 1, 1, 1, 2),
    ("fsdp:d2t2c2", 8, 2, 2, 1, 2, 1, 1, 8),
    ("archon:d2p2t4e4c2", 32, 2, 4, 2, 2, 4, 1, 4),
    ("sglang:p2", 2, 1, 1, 2, 1, 1, 1, 1),
    ("vllm:d2t4", 8, 2, 4, 1, 1, 1, 1, 8),
    ("huggingface:d2", 2, 2, 1, 1, 1, 1, 1, 2),
    ("megatron[actor]:d4", 4, 4, 1, 1, 1, 1, 1, 4),
    ("megatron [ _a1 ] : d4", 4, 4, 1, 1, 1, 1, 1, 4),
    ("megatron[actor]:(attn:d1p12t4|ffn:d1p12e4)", 48, 1, 4, 12, 1, 4, 1, 1),
    ("megatron:(attn:d1p12t4|ffn:e4)", 48, 1, 4, 12, 1, 4, 1, 1),
    ("megatron:(attn:d4t2|ffn:t4)", 8, 4, 2, 1, 1, 1, 4, 2),
    ("megatron:(attn:d4p2t2c2|ffn:d2p2t4e2)", 32, 4, 2, 2, 2, 2, 4, 2),
    ("megatron:(attn:d1p4t2c2|ffn:d1p4t1e4)", 16, 1, 2, 4, 2, 4, 1, 1),
    ("megatron : ( attn : d 4 c 2 | ffn : d 8 )", 8, 4, 1, 1, 2, 1, 1, 8),
    ("megatron:d2t4", 8, 2, 4, 1, 1, 1, 1, 8),
    ("megatron:d4p2v2", 8, 4, 1, 2, 1, 1, 1, 4),
    ("megatron:(attn:d1p2t2v3|ffn:e2)", 4, 1, 2, 2, 1, 2, 1, 1),
    ("megatron:d1048576", 2**20, 2**20, 1, 1, 1, 1, 1, 2**20),
    ("megatron:d1v1", 1, 1, 1, 1, 1, 1, 1, 1),
]


@pytest.mark.parametrize("row", ACCEPTED, ids=lambda row: repr(row[0]))
def test_accepted(row: tuple[str, int, int, int, int, int, int, int, int]) -> None:
    a = ModelAllocation.parse(row[0])
    assert (a.world_size, a.dp, a.tp, a.pp, a.cp, a.ep, a.etp, a.edp) == row[1:]
    assert ModelAllocation.parse(str(a)) == a


def test_virtual_stages_and_names_are_read() -> None:
    assert ModelAllocation.parse("megatron:(attn:d1p2t2v3|ffn:e2)").vpp == 3
    assert ModelAllocation.parse("megatron:d4p2").vpp == 1
    assert ModelAllocation.parse("megatron [ _a1 ] : d4").name == "_a1"
    assert ModelAllocation.parse("megatron:d4").name is None


# What AReaL accepts without a sensible meaning, and what it refuses.
REFUSED = [
    ("megatron:d4d8", ["AL017"]),
    ("megatron:t2t2", ["AL017"]),
    ("sglang:d2d3", ["AL017"]),
    ("megatron:(attn:d2d4|ffn:e2e4)", ["AL017", "AL017"]),
    ("megatron:d0", ["AL012"]),
    ("megatron:d00", ["AL012"]),
    ("megatron:d04", ["AL013"]),
    ("megatron:d-1", ["AL015"]),
    ("megatron:d+4", ["AL015"]),
    ("megatron:d1.5", ["AL015"]),
    ("megatron:d99999999999999999999999", ["AL016"]),
    ("megatron:d" + "9" * 5000, ["AL016"]),
    ("megatron:d1048577", ["AL016"]),
    ("megatron:d1000000t1000000", ["AL106"]),
    ("megatron:d1048576t2", ["AL106"]),
    ("megatron:d1048576t1048576e3", ["AL106"]),  # nothing is said about experts in an impossible world
    ("megatron:e8", ["AL104"]),
    ("megatron:d2e4", ["AL104"]),
    ("megatron:d4e3", ["AL104"]),
    ("fsdp:d2e2", ["AL202"]),
    ("fsdp:p2", ["AL202"]),
    ("fsdp:d2v2", ["AL202"]),
    ("archon:d2p2v2", ["AL202"]),
    ("fsdp:(attn:d4t2|ffn:d2t4)", ["AL203"]),
    ("fsdp:(attn:d4c2|ffn:d8)", ["AL203"]),
    ("sglang:(attn:d4|ffn:e4)", ["AL203"]),
    ("sglang:d2e4", ["AL202"]),
    ("sglang:d2c2", ["AL202"]),
    ("vllm:e2", ["AL202"]),
    ("huggingface:d2t2p2", ["AL202", "AL202"]),
    ("trtllm:d2", ["AL201"]),
    ("Megatron:d4", ["AL201"]),
    ("hf:d1", ["AL201"]),
    ("auto", ["AL201", "AL004"]),
    ("cpu", ["AL201", "AL004"]),
    ("megatron:D4", ["AL010"]),
    ("megatron:tp4", ["AL010"]),
    ("megatron:dp4tp2", ["AL010", "AL010"]),
    ("megatron", ["AL004"]),
    ("megatron[actor]", ["AL004"]),
    ("megatron:", ["AL005"]),
    ("megatron:()", ["AL005"]),
    ("", ["AL002"]),
    (" \n", ["AL002"]),
    ("d4", ["AL003"]),
    ("[actor]:d4", ["AL003"]),
    (":d4", ["AL003"]),
    ("(attn:d4|ffn:e4)", ["AL003"]),
    ("attn:d4|ffn:e4", ["AL003", "AL006"]),
    ("megatron[a-b]:d4", ["AL007"]),
    ("megatron[1a]:d4", ["AL007"]),
    ("megatron[]:d4", ["AL007"]),
    ("megatron[é]:d4", ["AL007"]),
    ("megatron[actor:d4", ["AL006"]),
    ("megatron actor]:d4", ["AL201", "AL006"]),
    ("megatron:(attn:d1p12t4|ffn:e4", ["AL006"]),
    ("megatron:attn:d1p12t4|ffn:e4)", ["AL006"]),
    ("megatron:attn:d1p12t4|ffn:e4", ["AL006"]),
    ("megatron:((attn:d4|ffn:e4))", ["AL006", "AL006"]),
    ("megatron:d4)", ["AL006"]),
    ("megatron:(d4", ["AL006"]),
    ("megatron:(ffn:e4|attn:d4)", ["AL008"]),
    ("megatron:(attn:d4)", ["AL008"]),
    ("megatron:(attn:d4|ffn:e2|ffn:e2)", ["AL008"]),
    ("megatron:(attention:d4|ffn:e2)", ["AL008"]),
    ("megatron:(attn:d4|ffn:)", ["AL005"]),
    ("megatron:(attn:d4|ffn:d2e4)", ["AL103"]),
    ("megatron:(attn:d*|ffn:d2e4)", ["AL103"]),
    ("megatron:(attn:d4|ffn:e8)", ["AL104"]),
    ("megatron:(attn:d4t2|ffn:t3)", ["AL104"]),
    ("megatron:(attn:d4p2|ffn:p4e2)", ["AL102"]),
    ("megatron:(attn:d4|ffn:p2e2)", ["AL102"]),
    ("megatron:(attn:d4e2|ffn:c2v2)", ["AL101", "AL101", "AL101"]),
    ("megatron:d4v2", ["AL105"]),
    ("megatron:d4 foo", ["AL010"]),
    ("megatron:d4;rm", ["AL019", "AL010"]),
    ("megatron:d4#c", ["AL019", "AL011"]),
    ("megatron:d4,t2", ["AL019"]),
    ("megatron:d4*t2", ["AL019"]),
    ("megatron:t*", ["AL018"]),
    ("megatron:d4 2", ["AL019"]),
    ("megatron:d٤", ["AL014"]),
    ("megatron:d²", ["AL014"]),
    ("megatron:d4٤", ["AL014"]),
    ("megatron:\uff444", ["AL019"]),
    ("megatron:d4\u00a0", ["AL019"]),
    ("megatron:\u2003d4", ["AL019"]),
    ("\ufeffmegatron:d4", ["AL201"]),
    ("megatron:d4\0", ["AL019"]),
    ("sglang:d4+fsdp:d4", ["AL009"]),
    ("sglang:d4|fsdp[a]:d4", ["AL009"]),
    ("sglang[r]:d2+fsdp[a]:d4|fsdp[c]:d4", ["AL009"]),
    ("sglang:d4+megatron:(attn:d4|ffn:e4)+fsdp[c]:d4", ["AL009"]),
    ("megatron:(attn:d4|ffn:e4)|sglang[r]:d4", ["AL009"]),
    ("sglang[r]:d4|megatron[a]:(attn:d4|ffn:e4)", ["AL009"]),
    ("sglang:d4++fsdp:d4", ["AL009"]),
    ("sglang:d4+", ["AL009"]),
    (None, ["AL001"]),
    (4, ["AL001"]),
    (b"megatron:d4", ["AL001"]),
    (["megatron:d4"], ["AL001"]),
]


@pytest.mark.parametrize(("text", "expected"), REFUSED, ids=lambda value: ascii(value)[:50])
def test_refused(text: object, expected: list[str]) -> None:
    assert codes(text) == expected


def test_independent_faults_come_at_once() -> None:
    found = faults("megatorn:d0t2t2p04")
    assert [d.code for d in found] == ["AL201", "AL012", "AL017", "AL013"]
    assert [d.span for d in found] == [Span(0, 8), Span(9, 11), Span(13, 15), Span(15, 18)]
    assert found[-1].alternatives == ("megatron:d1t2p4",)


def test_faults_of_structure_do_not_hide_the_others() -> None:
    found = faults("megatorn:(attn:d0|ffn:e04")
    assert [d.code for d in found] == ["AL201", "AL006", "AL012", "AL013"]
    assert codes("fsdp[1]:(attn:d2d2|ffn:e0") == ["AL007", "AL006", "AL203", "AL017", "AL012"]
    assert codes("megatron[a-b] d0") == ["AL007", "AL004", "AL012"]


@pytest.mark.parametrize(
    ("text", "alternatives"),
    [
        ("Megatron:d4", ("megatron:d4",)),
        ("megatorn:d4", ("megatron:d4",)),
        ("megatron:tp4", ("megatron:t4",)),
        ("megatron:D4", ("megatron:d4",)),
        ("megatron:vpp2p2", ("megatron:v2p2",)),
        ("megatron:d4d8", ("megatron:d4", "megatron:d8")),
        ("megatron:d4e3", ("megatron:d4e2", "megatron:d4e4")),
        ("megatron:(attn:d4|ffn:e4", ("megatron:(attn:d4|ffn:e4)",)),
        ("megatron:attn:d4|ffn:e4)", ("megatron:(attn:d4|ffn:e4)",)),
        ("megatron:attn:d4|ffn:e4", ("megatron:(attn:d4|ffn:e4)",)),
        ("megatron:(ffn:e4|attn:d4)", ("megatron:(attn:d4|ffn:e4)",)),
        ("megatron:(attn:d4|ffn:d2e4)", ("megatron:(attn:d4|ffn:e4)",)),
        ("megatron:d4[actor]", ("megatron[actor]:d4",)),
        ("sglang:d4+fsdp:d4", ("sglang:d4", "fsdp:d4")),
        ("sglang:d4|megatron[a]:(attn:d4|ffn:e4)", ("sglang:d4", "megatron[a]:(attn:d4|ffn:e4)")),
        ("megatron d4", ("megatron:d4",)),
        ("fsdp:(attn:d4t2|ffn:d2t4)", ("fsdp:d4t2",)),
        ("megatron:d²", ("megatron:d2",)),
        ("megatron:d4x", ()),
    ],
)
def test_alternatives(text: str, alternatives: tuple[str, ...]) -> None:
    assert faults(text)[-1].alternatives == alternatives


@pytest.mark.parametrize("text", [text for text, _ in REFUSED if isinstance(text, str)], ids=lambda t: ascii(t)[:50])
def test_alternatives_are_legal_and_spans_lie_in_the_string(text: str) -> None:
    for d in faults(text):
        assert d.source == text
        assert d.span is not None and 0 <= d.span.start <= d.span.end <= len(text)
        assert d.message and d.help
        for alternative in d.alternatives:
            ModelAllocation.parse(alternative)


def test_messages_speak_in_the_letters_of_the_user() -> None:
    [d] = faults("megatron:(attn:d4|ffn:d2e4)")
    assert "d4·t1·p1·c1 = 4" in d.message and "d2·t1·p1·e4 = 8" in d.message
    [d] = faults("megatron:d4t2e3")
    assert "e3" in d.message and "8 ranks" in d.message
    [d] = faults("sglang:d2e4")
    assert d.message == "backend sglang has no e" and "d, t, p" in (d.help or "")
    [d] = faults("sglang:d4+fsdp:d4")
    assert "each role its own string" in (d.help or "")


def test_long_garbage_is_refused_quickly() -> None:
    import time

    for text in (
        "megatron:" + "d2" * 5000,
        "megatron:" + "(" * 5000,
        "[" * 5000,
        "a|" * 3000,
        "megatron:" + "-" * 9000,
    ):
        start = time.perf_counter()
        assert faults(text)
        assert time.perf_counter() - start < 5
