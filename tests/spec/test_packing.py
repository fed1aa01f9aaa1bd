"""Sequences into bins: the budget holds, nothing is lost, the balance is within the rule's bound."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_like.spec import SequenceTooLong, balanced_partition, count_micro_batches, pack_micro_batches

LENGTHS = st.lists(st.integers(0, 64), max_size=40)


def test_by_hand():
    assert balanced_partition([5, 4, 3, 3, 3], 2) == [[0, 3], [1, 2, 4]]  # 5+3 against 4+3+3: longest first
    assert balanced_partition([7, 1, 1, 1], 2) == [[0], [1, 2, 3]]
    assert balanced_partition([3], 3) == [[0], [], []]
    assert balanced_partition([], 2) == [[], []]
    assert count_micro_batches([6, 5, 4, 3, 2], 10) == 2
    assert count_micro_batches([6, 5, 4, 3, 2], 10, pad_to=4) == 3  # room for 8
    assert count_micro_batches([], 10) == 1


def test_equal_lengths_are_dealt_out_in_turn():
    assert balanced_partition([2] * 6, 3) == [[0, 3], [1, 4], [2, 5]]
    assert balanced_partition([0] * 4, 2) == [[0, 2], [1, 3]]


@given(LENGTHS, st.integers(1, 8))
def test_a_partition_loses_nothing(lengths, bins):
    result = balanced_partition(lengths, bins)
    assert len(result) == bins
    assert sorted(i for b in result for i in b) == list(range(len(lengths)))
    assert all(b == sorted(b) for b in result)
    assert result == balanced_partition(list(lengths), bins), "the same everywhere"


@given(st.lists(st.integers(1, 30), min_size=1, max_size=7), st.integers(1, 3))
@settings(max_examples=60, deadline=None)
def test_the_largest_bin_is_within_graham_s_bound_of_the_best(lengths, bins):
    """Longest-processing-time first is at most 4/3 - 1/(3 m) of the optimum (Graham 1969)."""
    largest = max(sum(lengths[i] for i in b) for b in balanced_partition(lengths, bins))
    best = min(
        max(sum(n for n, own in zip(lengths, choice, strict=True) if own == b) for b in range(bins))
        for choice in itertools.product(range(bins), repeat=len(lengths))
    )
    assert largest <= (4 / 3 - 1 / (3 * bins)) * best + 1e-9


@given(LENGTHS, st.integers(64, 200), st.integers(1, 6), st.integers(1, 4), st.integers(1, 8))
def test_micro_batches_hold_every_sequence_once_within_the_budget(lengths, max_tokens, at_least, multiple_of, pad_to):
    if max_tokens - max_tokens % pad_to < max(lengths, default=0):
        return
    packed = pack_micro_batches(lengths, max_tokens, at_least=at_least, multiple_of=multiple_of, pad_to=pad_to)
    assert sorted(i for b in packed for i in b) == list(range(len(lengths)))
    assert len(packed) >= at_least and len(packed) % multiple_of == 0
    for b in packed:
        tokens = sum(lengths[i] for i in b)
        assert -(-tokens // pad_to) * pad_to <= max_tokens


@given(LENGTHS.filter(len), st.integers(64, 200), st.integers(1, 8))
def test_the_count_is_never_below_what_the_tokens_need(lengths, max_tokens, pad_to):
    room = max_tokens - max_tokens % pad_to
    if room < max(lengths):
        return
    count = count_micro_batches(lengths, max_tokens, pad_to=pad_to)
    lower = max(1, -(-sum(lengths) // room))
    assert lower <= count <= max(1, 2 * lower), "best-fit leaves at most one bin half empty"
    assert len(pack_micro_batches(lengths, max_tokens, pad_to=pad_to)) == count


def test_surplus_micro_batches_are_empty():
    assert pack_micro_batches([4, 2], 10, at_least=4) == [[0], [1], [], []]
    assert pack_micro_batches([], 10, at_least=2) == [[], []]
    assert len(pack_micro_batches([4, 2, 3], 10, at_least=2, multiple_of=3)) == 3


def test_balancing_that_overflows_is_done_by_fitting():
    """Best-fit needs two micro-batches of 10 (6+4 and 4+3+3); longest-first would make 6+3 and 4+4+3."""
    lengths = [6, 4, 4, 3, 3]
    assert count_micro_batches(lengths, 10) == 2
    assert balanced_partition(lengths, 2) == [[0, 3], [1, 2, 4]]
    assert pack_micro_batches(lengths, 10) == [[0, 1], [2, 3, 4]]
    assert pack_micro_batches(lengths, 11) == [[0, 3], [1, 2, 4]]
    assert len(pack_micro_batches(lengths, 10, multiple_of=3)) == 3


@given(LENGTHS, st.integers(64, 200), st.integers(1, 6), st.integers(1, 4), st.integers(1, 8), st.integers(1, 4))
def test_the_number_of_micro_batches_is_known_before(lengths, max_tokens, at_least, multiple_of, pad_to, multiple):
    """So that ranks that agree on it need not ask again."""
    if any(-(-n // multiple) * multiple > max_tokens - max_tokens % pad_to for n in lengths):
        return
    rounding = {"pad_to": pad_to, "sequence_multiple": multiple}
    count = max(count_micro_batches(lengths, max_tokens, **rounding), at_least)
    packed = pack_micro_batches(lengths, max_tokens, at_least=at_least, multiple_of=multiple_of, **rounding)
    assert len(packed) == -(-count // multiple_of) * multiple_of


@given(st.lists(st.integers(1, 10), min_size=1, max_size=8))
@settings(max_examples=100, deadline=None)
def test_the_count_is_within_the_bound_of_best_fit_decreasing(lengths):
    """11/9 of the fewest possible and 6/9 more (Johnson 1974, Dosa 2007), the fewest found by trying everything."""

    def fits(bins):
        return any(
            all(sum(n for n, own in zip(lengths, choice, strict=True) if own == b) <= 10 for b in range(bins))
            for choice in itertools.product(range(bins), repeat=len(lengths))
        )

    fewest = next(bins for bins in range(-(-sum(lengths) // 10), 9) if bins >= 4 or fits(bins))
    if fewest < 4:  # beyond that, trying everything takes long
        assert fewest <= count_micro_batches(lengths, 10) <= 11 / 9 * fewest + 6 / 9


def test_a_sequence_that_is_too_long_says_what_to_do():
    message = (
        "a sequence of 97 tokens does not fit into a micro-batch of at most 96 tokens; raise mb_spec.max_tokens_per_mb "
        "or shorten the sequences (gconfig.max_new_tokens, dataset max_length)"
    )
    with pytest.raises(SequenceTooLong) as raised:
        count_micro_batches([3, 97], 98, pad_to=3)
    assert str(raised.value) == message
    with pytest.raises(SequenceTooLong):
        pack_micro_batches([97], 96)
    with pytest.raises(ValueError, match="at most 0 tokens"):
        pack_micro_batches([1], 3, pad_to=4)


def test_impossible_numbers():
    with pytest.raises(ValueError, match="bins must be at least 1, not 0"):
        balanced_partition([1], 0)
    with pytest.raises(ValueError, match="max_tokens must be at least 1, not 0"):
        count_micro_batches([1], 0)
