"""The bounds on generation, against the formula's values by hand and as invariants of drawn histories."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_like.rollout.admission import Admission


@pytest.mark.parametrize(
    ("ahead", "concurrent", "version", "running", "accepted", "expected"),
    [
        (0, 64, 0, 0, 0, 8),  # the first batch
        (0, 64, 0, 3, 5, 0),  # all of it under way
        (0, 64, 1, 0, 8, 8),  # one version later the second batch
        (0, 4, 1, 0, 8, 4),  # the engine takes four at once
        (2, 64, 0, 0, 0, 24),  # three batches
        (2, 64, 3, 10, 30, 8),  # (2 + 3 + 1) * 8 - 40
        (2, 12, 3, 10, 30, 2),
        (0, 64, 0, 8, 8, 0),  # never negative
    ],
)
def test_capacity(ahead, concurrent, version, running, accepted, expected):
    admission = Admission(8, concurrent, ahead, version=version, running=running, accepted=accepted)
    assert admission.capacity() == expected


def test_queue_size_bounds_what_waits_to_be_consumed():
    admission = Admission(4, 100, 10, queue_size=6)
    assert admission.capacity() == 6
    admission.admit(6)
    admission.accept(6)
    assert admission.capacity() == 0
    admission.consume(4)
    assert admission.capacity() == 4


def test_queue_size_below_a_batch_is_refused():
    with pytest.raises(ValueError, match=r"rollout\.queue_size is 3, but an update takes 4 groups"):
        Admission(4, 100, 0, queue_size=3)


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 5), st.integers(1, 12), st.integers(0, 3), st.randoms(use_true_random=False))
def test_no_group_is_trained_on_more_versions_later_than_allowed(batch, concurrent, ahead, random):
    """Any interleaving of admissions, finishing and updates: group i is consumed at version i // batch."""
    admission = Admission(batch, concurrent, ahead)
    born: list[int] = []
    for _ in range(200):
        action = random.choice(["admit", "accept", "update"])
        if action == "admit" and admission.capacity():
            born.append(admission.version)
            admission.admit()
        elif action == "accept" and admission.running:
            admission.accept()
        elif action == "update" and admission.accepted - admission.consumed >= batch:
            admission.consume(batch)
            admission.version += 1
        assert admission.running <= concurrent
    for index, version in enumerate(born):
        assert index // batch - version <= ahead
