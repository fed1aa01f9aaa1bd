"""Whatever a file holds, the check gives findings: it raises nothing, and loading raises nothing but ConfigError."""

from __future__ import annotations

from typing import Any

import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from areal_like.alloc import to_github, to_json, to_sarif
from areal_like.config import RLConfig, paths
from areal_like.preflight.examples import BASE_JOB
from areal_like.preflight.files import check_text

KEYS = [steps for steps, _ in paths.keys(RLConfig)]
WORDS = st.sampled_from(
    [
        *("megatron:d1", "megatron:d2t3p5", "megatron:(attn:d4|ffn:e2)", "megatron:d*t4", "huggingface:d9", "vllm:t3"),
        *("Qwen/Qwen3-0.6B", "Qwen/Qwen3-30B-A3B", "~nobody/x", "./x", "a\x00b", "${actor}", "${seed}", "auto", "cuda"),
    ]
)
SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(-2, 2**40), st.floats(allow_nan=True), st.text(max_size=6), WORDS
)
TREES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from([str(s[-1]) for s in KEYS]) | st.text(max_size=4), inner, max_size=4)
    ),
    max_leaves=12,
)
SETTINGS = settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def check(data: Any, overrides: list[str], cluster: str | None) -> None:
    text = data if isinstance(data, str) else yaml.safe_dump(data, allow_unicode=True)
    found = check_text(text, "f.yaml", overrides, cluster=cluster)
    for d in found:
        assert d.code.startswith("AL") and d.message and d.file and d.line and d.column
        assert d.render()
    assert to_json(found) and to_sarif(found)
    to_github(found)


@SETTINGS
@given(TREES, st.sampled_from([None, "nodes=2,gpus=3,memory=1GiB,host-memory=1GiB"]))
def test_any_tree(data: Any, cluster: str | None) -> None:
    check(data, [], cluster)


@SETTINGS
@given(st.lists(st.tuples(st.sampled_from(KEYS), TREES), min_size=1, max_size=6), st.sampled_from([None, "gpus=3"]))
def test_a_good_job_with_any_keys_changed(changes: list[tuple[tuple[Any, ...], Any]], cluster: str | None) -> None:
    data = yaml.safe_load(BASE_JOB)
    for steps, value in changes:
        parent = data
        for step in steps[:-1]:
            if not isinstance(parent.get(step), dict):
                parent[step] = {}
            parent = parent[step]
        parent[steps[-1]] = value
    check(data, [], cluster)


@SETTINGS
@given(st.lists(st.tuples(st.sampled_from(KEYS), SCALARS), max_size=4))
def test_a_good_job_with_any_overrides(changes: list[tuple[tuple[Any, ...], Any]]) -> None:
    check(BASE_JOB, [f"{paths.join(steps)}={value}" for steps, value in changes], None)


NUMBERS = [s for s, f in paths.keys(RLConfig) if f.annotation in (int, int | None)]


@SETTINGS
@given(st.lists(st.tuples(st.sampled_from(NUMBERS), st.sampled_from([0, 1, 2, 3, 7, 100, 10**6, 2**62])), max_size=5))
def test_a_good_job_with_any_numbers(changes: list[tuple[tuple[Any, ...], int]]) -> None:
    check(BASE_JOB, [f"{paths.join(steps)}={value}" for steps, value in changes], "gpus=8")
