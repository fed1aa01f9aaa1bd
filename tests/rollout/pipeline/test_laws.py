"""The pipeline against the laws, in virtual time; tau from draws of its own, not from the pipeline's."""

from __future__ import annotations

import numpy as np
import pytest

from areal_like.rollout.pipeline.simulation import log_normal, simulate
from areal_like.spec.flow import FlowControl, Granularity

R, G, B = Granularity
GROUPS, ATTEMPTS, SIGMA = 8, 4, 1.0


def tau(members: int) -> float:
    """E[longest of so many] / E[one], by Monte Carlo."""
    draws = np.random.default_rng(0).lognormal(-(SIGMA**2) / 2, SIGMA, (200_000 // members, members))
    return float(draws.max(1).mean())


def run(submission, consumption, lag, *, batches=150, **more):
    control = FlowControl(GROUPS, ATTEMPTS, submission, consumption, lag, **more.pop("bounds", {}))
    lengths = more.pop("lengths", [log_normal(100.0, SIGMA, 7)])
    return simulate(control, lengths, batches=batches, **{"train_seconds": 0.01} | more)


@pytest.mark.parametrize("lag", [0, 2])
def test_rollouts_keep_the_engine_busy(lag):
    assert run(R, G, lag).utilisation > 0.99


@pytest.mark.parametrize(("submission", "consumption"), [(G, G), (G, B)])
def test_groups_leave_it_idle_for_their_slowest(submission, consumption):
    assert run(submission, consumption, 1).utilisation == pytest.approx(1 / tau(ATTEMPTS), rel=0.06)


def test_batches_leave_it_idle_for_theirs():
    assert run(B, B, 0, batches=600).utilisation == pytest.approx(1 / tau(GROUPS * ATTEMPTS), rel=0.06)


@pytest.mark.parametrize("lag", [0, 1, 3])
def test_whole_batches_are_exactly_the_lag_old(lag):
    ages = run(B, B, lag, batches=20).staleness
    assert set(ages) == {lag}


@pytest.mark.parametrize("lag", [0, 1])
def test_staleness_of_matched_modes(lag):
    assert run(G, G, lag).mean_staleness == pytest.approx(1 + lag, rel=0.1)
    assert run(R, G, lag).mean_staleness == pytest.approx(tau(ATTEMPTS) * (1 + lag), rel=0.12)


def test_the_measured_taus_are_those_of_the_lengths():
    taus = run(R, G, 0).taus
    assert taus[G] == pytest.approx(tau(ATTEMPTS), rel=0.15)  # over the last batches alone
    assert taus[R] == 1.0


def test_a_slow_trainer_lets_groups_wait_only_as_far_as_allowed():
    """The bound that Megatron-RL lacks under R: what is finished piles up while the trainer works."""
    free = run(R, G, 0, batches=30, train_seconds=2000.0)
    waiting = run(R, G, 0, batches=30, train_seconds=2000.0, bounds={"max_waiting": GROUPS})
    ahead = run(R, G, 0, batches=30, train_seconds=2000.0, bounds={"max_ahead": 1})
    assert free.waited > 20 * GROUPS and max(free.staleness) > 10
    in_flight = GROUPS * ATTEMPTS  # groups that were open when the bound was reached still finish
    assert waiting.waited <= GROUPS + in_flight and max(waiting.staleness) < 10
    assert max(ahead.staleness) <= 2 and ahead.waited <= 2 * GROUPS


def test_the_engine_s_own_bound_is_another_one():
    """Slots for three batches, an engine that serves half of one: it is full, and the rest waits for it."""
    found = run(R, G, 2, capacity=GROUPS * ATTEMPTS // 2, batches=40)
    assert found.utilisation > 0.99


def test_a_batch_waits_for_its_slow_environment_and_takes_no_more_of_the_fast_one():
    found = run(G, G, 1, batches=40, lengths=[log_normal(10.0, 0.1, 1), log_normal(1000.0, 0.1, 2)])
    alone = run(G, G, 1, batches=40, lengths=[log_normal(1000.0, 0.1, 2)])
    assert found.batch_seconds > 0.4 * alone.batch_seconds
