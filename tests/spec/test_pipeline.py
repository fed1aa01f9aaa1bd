"""Layers to stages: by hand, and against trying every split."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_like.spec import ModelSpec, split_layers


def every_split(layers, stages):
    for cuts in itertools.combinations(range(1, layers), stages - 1):
        bounds = (0, *cuts, layers)
        yield [b - a for a, b in itertools.pairwise(bounds)]


def stage_costs(sizes, costs, head):
    result, start = [], 0
    for size in sizes:
        result.append(sum(costs[start : start + size]))
        start += size
    result[-1] += head
    return result


def quality(sizes, costs, head):
    stages = stage_costs(sizes, costs, head)
    return max(stages), sum(c * c for c in stages)


@pytest.mark.parametrize(
    ("layers", "stages", "head", "expected"),
    [
        (28, 4, 0.0, [7, 7, 7, 7]),
        (28, 1, 5.0, [28]),
        (4, 4, 100.0, [1, 1, 1, 1]),  # no stage is empty, however dear the head
        (30, 4, 0.0, [8, 8, 7, 7]),  # the earlier stages get what is left over
        (30, 4, 2.0, [8, 8, 8, 6]),  # 32 units of work: eight each
        (30, 4, 6.0, [9, 9, 9, 3]),  # 36: nine each
        (30, 2, 14.0, [22, 8]),
        (5, 2, 0.0, [3, 2]),
        (6, 2, 10.0, [5, 1]),
    ],
)
def test_equal_layers_by_hand(layers, stages, head, expected):
    assert split_layers([1.0] * layers, stages, head_cost=head) == expected


def test_the_head_of_a_small_model_takes_the_place_of_layers():
    """SmolLM2-135M: 3.54 M multiplications a layer, 28.3 M for the head, which is eight layers' worth."""
    spec = ModelSpec.bundled("demo:smollm2-135m-instruct")
    assert spec.head_flops() / spec.layer_flops() == pytest.approx(8.0, abs=0.01)
    costs = [spec.layer_flops()] * 30
    assert split_layers(costs, 2, head_cost=spec.head_flops()) == [19, 11]


def test_layers_of_unequal_cost():
    assert split_layers([5.0, 1.0, 1.0, 1.0, 1.0, 1.0], 2) == [1, 5]
    assert split_layers([1.0, 1.0, 1.0, 1.0, 1.0, 5.0], 2) == [5, 1]
    assert split_layers([0.0, 0.0, 3.0], 3) == [1, 1, 1]


@pytest.mark.parametrize("layers", range(1, 9))
def test_every_small_case_is_optimal(layers):
    """Least maximum, then least sum of squares, over all compositions and several costs."""
    for costs in (
        [1.0] * layers,
        [float(1 + i % 3) for i in range(layers)],
        [float((7 * i) % 5) for i in range(layers)],
    ):
        for stages in range(1, layers + 1):
            for head in (0.0, 1.0, 2.5, 20.0):
                sizes = split_layers(costs, stages, head_cost=head)
                assert sum(sizes) == layers and len(sizes) == stages and min(sizes) >= 1
                best = min(quality(s, costs, head) for s in every_split(layers, stages))
                assert quality(sizes, costs, head) == pytest.approx(best), (costs, stages, head, sizes)


@given(st.lists(st.floats(0.0, 1e12), min_size=1, max_size=9), st.data())
@settings(max_examples=150, deadline=None)
def test_drawn_costs_are_split_with_the_least_maximum(costs, data):
    stages = data.draw(st.integers(1, len(costs)))
    head = data.draw(st.floats(0.0, 1e12))
    sizes = split_layers(costs, stages, head_cost=head)
    assert sum(sizes) == len(costs) and len(sizes) == stages and min(sizes) >= 1
    best = min(max(stage_costs(s, costs, head)) for s in every_split(len(costs), stages))
    assert max(stage_costs(sizes, costs, head)) == pytest.approx(best, rel=1e-6, abs=1e-6)


@given(st.integers(1, 96), st.data())
@settings(max_examples=50, deadline=None)
def test_equal_layers_spread_evenly(layers, data):
    stages = data.draw(st.integers(1, min(layers, 16)))
    sizes = split_layers([1.0] * layers, stages)
    assert max(sizes) - min(sizes) <= 1 and sizes == sorted(sizes, reverse=True)


def test_too_few_layers_or_stages():
    with pytest.raises(ValueError, match="3 layers cannot fill 4 pipeline stages"):
        split_layers([1.0] * 3, 4)
    with pytest.raises(ValueError, match="stages must be at least 1, not 0"):
        split_layers([1.0], 0)
