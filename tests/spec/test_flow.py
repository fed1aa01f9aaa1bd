"""Slots and lags by hand."""

from __future__ import annotations

import itertools

import pytest

from areal_like.spec.flow import FlowControl, Granularity, lag_of_requests, max_effective_lag, refusal

R, G, B = Granularity


def test_the_five_pairs_and_the_reasons_for_the_others():
    legal = {f"{s}/{c}" for s, c in itertools.product(Granularity, repeat=2) if refusal(s, c) is None}
    assert legal == {"B/B", "G/G", "G/B", "R/G", "R/B"}
    with pytest.raises(ValueError, match="B/G: slots are given out by whole batches"):
        FlowControl(4, 2, B, G)
    for submission in Granularity:
        with pytest.raises(ValueError, match=f"{submission}/R: an advantage compares the attempts of a group"):
            FlowControl(4, 2, submission, R)


@pytest.mark.parametrize(
    ("submission", "lag", "slots", "rollouts"),
    [
        (B, 0, 1, 8),
        (B, 1, 2, 16),
        (B, 1.5, 2, 16),  # 2.5 goes to the even neighbour
        (B, 2.5, 4, 32),  # 3.5 too
        (B, -1, 1, 8),
        (G, 0, 4, 8),
        (G, 0.5, 6, 12),
        (G, -1, 1, 2),
        (G, -0.375, 2, 4),  # 2.5
        (R, 0, 8, 8),
        (R, 1, 16, 16),
        (R, -0.75, 2, 2),
        (R, -1, 1, 1),
    ],
)
def test_slots_by_hand(submission, lag, slots, rollouts):
    control = FlowControl(4, 2, submission, B, lag)
    assert (control.slots, control.rollouts) == (slots, rollouts)


def test_the_lag_that_an_engine_can_serve():
    assert max_effective_lag(2, 10, groups=4, attempts=3) == 6 / 4 - 1  # 20 requests hold 6 whole groups
    assert max_effective_lag(1, 7, groups=4, attempts=2) == 3 / 4 - 1  # not even a batch
    assert lag_of_requests(24, groups=4, attempts=2) == 2.0
    control = FlowControl(4, 3, G, G, lag=0.5)
    assert not control.oversubscribes(0.5) and control.oversubscribes(0.25)


def test_what_it_says_at_the_start():
    assert str(FlowControl(4, 2, R, G, 1.0)) == "generation R/G: 16 rollouts in flight (16 rollouts), lag 1"
    assert str(FlowControl(4, 2)) == "generation B/B: 1 batch in flight (8 rollouts), lag 0"
    assert str(FlowControl(4, 2, B, B, 1)).startswith("generation B/B: 2 batches in flight")
    bounded = str(FlowControl(4, 2, G, G, 0, max_ahead=3, max_waiting=8))
    assert bounded.endswith("lag 0; no group is started more than 3 versions ahead; at most 8 finished groups wait")


def test_bounds_that_would_wait_for_ever():
    with pytest.raises(ValueError, match="3 finished groups may wait, but an update takes 4"):
        FlowControl(4, 2, max_waiting=3)
    with pytest.raises(ValueError, match=r"the lag is -1\.5"):
        FlowControl(4, 2, lag=-1.5)
    with pytest.raises(ValueError, match="nan"):
        FlowControl(4, 2, lag=float("nan"))
