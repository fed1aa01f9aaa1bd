"""The nearest layouts: legal, different, ordered, and found fast."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_like.alloc import AllocationError, ModelAllocation
from areal_like.preflight import check_layout, is_legal
from areal_like.preflight.alternatives import nearest
from areal_like.preflight.examples import findings
from areal_like.preflight.registry import Example
from areal_like.spec import ModelSpec

DENSE, MOE = ModelSpec.find("Qwen/Qwen3-0.6B"), ModelSpec.find("Qwen/Qwen3-30B-A3B")


def parse(text: str) -> ModelAllocation:
    return ModelAllocation.parse(text)


@pytest.mark.parametrize(
    ("text", "spec", "expected"),
    [
        ("megatron:d1p4t3", DENSE, ("megatron:d1t4p3", "megatron:d2t2p3", "megatron:d1t2p6")),
        ("megatron:t32", DENSE, ("megatron:d2t16", "megatron:d4t8", "megatron:d1t16p2")),
        ("megatron:d4e4", DENSE, ("megatron:d4", "megatron:d2p2", "megatron:d2t2")),
        ("megatron:p32", DENSE, ("megatron:d2p16", "megatron:d4p8", "megatron:d1t2p16")),
    ],
)
def test_what_is_nearest(text: str, spec: ModelSpec, expected: tuple[str, ...]) -> None:
    assert nearest(parse(text), lambda a: is_legal(a, spec)) == expected


def test_no_more_gpus_than_there_are() -> None:
    found = nearest(parse("megatron:d1t3p4"), lambda a: is_legal(a, DENSE), gpus=8)
    assert found and all(parse(text).world_size <= 8 for text in found)


def test_nothing_passes() -> None:
    assert nearest(parse("megatron:d4t2"), lambda _: False) == ()


SIZES = st.sampled_from([1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 32])


@settings(max_examples=150, deadline=None)
@given(st.tuples(SIZES, SIZES, SIZES, SIZES, SIZES, SIZES), st.sampled_from([DENSE, MOE]))
def test_any_layout(sizes: tuple[int, ...], spec: ModelSpec) -> None:
    names = ("data", "tensor", "pipeline", "context", "expert", "expert_tensor")
    fields = {f"{name}_parallel_size": size for name, size in zip(names, sizes, strict=True)}
    try:
        allocation = ModelAllocation(backend="megatron", name=None, **fields)
    except AllocationError:
        return
    assert is_legal(allocation, spec) == (check_layout(allocation, spec) == [])
    start = time.perf_counter()
    found = nearest(allocation, lambda a: is_legal(a, spec), experts=spec.is_moe)
    assert time.perf_counter() - start < 1.0, "milliseconds on a quiet machine"
    assert len(set(found)) == len(found) <= 3
    for text in found:
        assert parse(text) != allocation and is_legal(parse(text), spec)
    if allocation.world_size > 1:
        assert found, "replicas alone are always legal"


@pytest.mark.parametrize(
    "changes",
    [
        ("actor.backend=megatron:t5",),
        ("actor.backend=megatron:d16",),
        ("actor.backend=megatron:(attn:d3t3|ffn:t3e3)", "actor.path=Qwen/Qwen3-30B-A3B"),
        ("rollout.backend=sglang:d6",),
        ("rollout.backend=vllm:d1t5", "actor.backend=megatron:d1t3"),
    ],
)
def test_alternatives_of_a_job_pass_every_rule(changes: tuple[str, ...]) -> None:
    offered = {(d.key, text) for d in findings(Example(changes)) for text in d.alternatives}
    assert offered
    for key, text in offered:
        again = [d for d in findings(Example((*changes, f"{key}={text}"))) if d.key == key and d.severity == "error"]
        assert {d.code for d in again} <= {"AL205", "AL601", "AL602"}, text


def test_a_layout_is_checked_in_microseconds() -> None:
    """Asked thousands of times by the planner. The bound is ten times what a quiet machine needs."""
    allocation = parse("megatron:d4t4p2")
    start = time.perf_counter()
    for _ in range(2000):
        check_layout(allocation, DENSE)
    assert (time.perf_counter() - start) / 2000 < 200e-6
