"""ModelAllocation as a value: parsing, direct construction, canonical form, resolve."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from areal_like.alloc import AllocationError, ModelAllocation
from areal_like.alloc.fields import FIELDS

LETTERS = {"megatron": "dtpcev", "fsdp": "dtc", "archon": "dtpce", "huggingface": "d", "sglang": "dtp", "vllm": "dtp"}


@st.composite
def fields(draw: st.DrawFn) -> dict[str, Any]:
    """Fields of a legal allocation, made without the code under test: the experts are drawn as a divisor."""
    backend = draw(st.sampled_from(sorted(LETTERS)))
    has = LETTERS[backend]
    sizes = {letter: draw(st.integers(1, 9)) if letter in has else 1 for letter in "dtpcv"}
    if sizes["p"] == 1:
        sizes["v"] = 1
    ranks = sizes["d"] * sizes["t"] * sizes["c"]
    etp = draw(st.sampled_from([n for n in range(1, ranks + 1) if ranks % n == 0])) if "e" in has else 1
    ep = draw(st.sampled_from([n for n in range(1, ranks + 1) if ranks % (n * etp) == 0])) if "e" in has else 1
    name = draw(st.none() | st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,8}", fullmatch=True))
    d = None if draw(st.booleans()) and draw(st.booleans()) else sizes["d"]
    return dict(zip(FIELDS, (backend, name, d, *(sizes[x] for x in "tpc"), ep, sizes["v"], etp), strict=True))


@given(fields())
def test_round_trip(values: dict[str, Any]) -> None:
    built = ModelAllocation(**values)
    parsed = ModelAllocation.parse(str(built))
    assert parsed == built and hash(parsed) == hash(built) and str(parsed) == str(built)
    assert {field: getattr(parsed, field) for field in FIELDS} == values
    assert ModelAllocation.model_validate(parsed.model_dump()) == parsed
    assert pickle.loads(pickle.dumps(parsed)) == parsed


TOKENS = ["megatron", "fsdp", "sglang", "megatorn", ":", "(", ")", "[", "]", "|", "+", "attn", "ffn", "a1", " ", "\n"]
TOKENS += [letter + size for letter in "dtpcevx" for size in ("", "1", "2", "4", "0", "04", "*", "-1", "²", "9999999")]


@settings(max_examples=400)
@given(st.text() | st.lists(st.sampled_from(TOKENS), max_size=14).map("".join))
@example("megatron:d4\ud800")
@example("(" * 500)
@example("megatron:d" + "1" * 5000)
def test_any_text_raises_allocation_error_or_parses(text: str) -> None:
    try:
        allocation = ModelAllocation.parse(text)
    except AllocationError as error:
        assert error.diagnostics and str(error)
        assert all(d.span is not None and 0 <= d.span.start <= d.span.end <= len(text) for d in error.diagnostics)
        for d in error.diagnostics:
            assert all(ModelAllocation.parse(alternative) for alternative in d.alternatives)
    else:
        assert ModelAllocation.parse(str(allocation)) == allocation


def built_codes(**values: Any) -> list[str]:
    with pytest.raises(AllocationError) as caught:
        ModelAllocation(**values)
    return [d.code for d in caught.value.diagnostics]


@settings(max_examples=300)
@given(
    st.fixed_dictionaries(
        {"backend": st.sampled_from(["megatron", "fsdp", "sglang", "nosuch"])},
        optional={"name": st.sampled_from(["a", "1a", "a-b"])}
        | {field: st.integers(-1, 6) for field in FIELDS[3:]}
        | {"data_parallel_size": st.none() | st.integers(0, 6)},
    )
)
def test_direct_construction_is_validated_as_its_string_is(values: dict[str, Any]) -> None:
    try:
        built = ModelAllocation(**values)
    except AllocationError as error:
        source = error.diagnostics[0].source
        assert source is not None
        with pytest.raises(AllocationError) as caught:
            ModelAllocation.parse(source)
        assert [(d.code, d.span) for d in caught.value.diagnostics] == [(d.code, d.span) for d in error.diagnostics]
    else:
        assert ModelAllocation.parse(str(built)) == built


@pytest.mark.parametrize(
    "size", [2.5, 2.0, "4", True, float("nan"), [2], 10**5000, -(10**5000), -2, 0, None], ids=lambda s: type(s).__name__
)
def test_sizes_that_are_no_sizes(size: object) -> None:
    [code] = built_codes(backend="megatron", tensor_parallel_size=size)
    assert code in {"AL012", "AL015", "AL016", "AL018"}


def test_direct_construction_without_or_with_wrong_fields() -> None:
    assert built_codes() == ["AL003"]
    assert built_codes(backend=None) == ["AL003"]
    assert built_codes(backend="megatron", name=3) == ["AL007"]
    assert built_codes(backend="nosuch") == ["AL201"]
    assert built_codes(backend="megatron:d4") == ["AL201"]
    assert built_codes(backend="megatron", name="a]b") == ["AL007"]
    with pytest.raises(AllocationError) as caught:
        ModelAllocation(backend="megatron", tensor_paralel_size=2)  # type: ignore[call-arg]
    assert "did you mean tensor_parallel_size" in str(caught.value)


def test_frozen_hashable_and_copied_under_the_same_rules() -> None:
    a = ModelAllocation.parse("megatron:d4t2")
    with pytest.raises(ValueError, match="frozen"):
        a.data_parallel_size = 8
    assert {a: 1}[ModelAllocation.parse("megatron:t2d4")] == 1
    assert a.model_copy(update={"tensor_parallel_size": 4}) == ModelAllocation.parse("megatron:d4t4")
    with pytest.raises(AllocationError):
        a.model_copy(update={"tensor_parallel_size": 0})
    assert ModelAllocation.model_validate("megatron:d4t2") == a
    assert ModelAllocation.model_validate(a) is a


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("megatron:t2", "megatron:d1t2"),
        ("megatron:v2e2c2p2t2d2", "megatron:d2t2p2c2e2v2"),
        ("megatron[a]: d 1 t 1", "megatron[a]:d1"),
        ("megatron:(attn:d4t2|ffn:t1e4)", "megatron:d4t2e4"),
        ("megatron:(attn:p2d4t2v2|ffn:d1p2t4e2)", "megatron:(attn:d4t2p2v2|ffn:t4e2)"),
        ("megatron:(attn:d*t2|ffn:d*t2)", "megatron:(attn:d*t2|ffn:t2)"),
    ],
)
def test_canonical(text: str, canonical: str) -> None:
    assert str(ModelAllocation.parse(text)) == canonical


def test_star_is_resolved_before_it_is_used() -> None:
    star = ModelAllocation.parse("megatron:d*t4p2")
    assert star.data_parallel_size is None and star.tp == 4
    for use in (lambda: star.dp, lambda: star.world_size, lambda: star.edp, star.mesh):
        with pytest.raises(AllocationError, match="AL107") as caught:
            use()
        assert caught.value.diagnostics[0].span == (9, 11)
    assert star.to_dict()["world_size"] is None
    resolved = star.resolve(24)
    assert resolved.dp == 3 and resolved.world_size == 24 and str(resolved) == "megatron:d3t4p2"
    assert resolved.resolve(5) is resolved


@pytest.mark.parametrize(
    ("text", "gpus", "code", "words"),
    [
        ("megatron:d*t4p2", 12, "AL108", "use 8 or 16 GPUs"),
        ("megatron:d*t4p2", 4, "AL108", "use 8 GPUs"),
        ("megatron:d*t4p2", 0, "AL109", "0 is not a number of GPUs"),
        ("megatron:d4", "8", "AL109", "'8' is not a number of GPUs"),
        ("megatron:d*", True, "AL109", "True is not a number"),
        ("megatron:d*t2e4", 6, "AL104", "e4 does not divide the 6 ranks"),
        ("megatron:d*", 2**21, "AL016", "too large"),
    ],
)
def test_resolve_says_what_does_not_fit(text: str, gpus: Any, code: str, words: str) -> None:
    with pytest.raises(AllocationError) as caught:
        ModelAllocation.parse(text).resolve(gpus)
    assert caught.value.diagnostics[0].code == code
    assert words in str(caught.value)
