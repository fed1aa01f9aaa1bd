"""Which sequences share a beginning."""

from __future__ import annotations

from itertools import combinations

from hypothesis import given, settings
from hypothesis import strategies as st

from areal_like.spec.prefixes import Family, find_families


def test_by_hand():
    """Two answers to one prompt of four tokens: the last of the four stays with each answer, whose first it predicts.
    The third sequence has another prompt, the fourth is empty."""
    sequences = [[1, 2, 3, 4, 9], [7, 8], [1, 2, 3, 4, 5, 6], []]
    assert find_families(sequences) == [Family((0, 2), 3, 8), Family((1,), 0, 2), Family((3,), 0, 0)]


def test_equal_sequences_keep_their_last_token():
    assert find_families([[5, 6, 7]] * 3) == [Family((0, 1, 2), 2, 5)]


def test_a_sequence_that_another_one_continues():
    assert find_families([[5, 6, 7], [5, 6, 7, 8]]) == [Family((0, 1), 2, 5)]


def test_one_shared_token_is_nothing_to_share():
    """It would predict different tokens."""
    assert find_families([[1, 2], [1, 3]]) == [Family((0,), 0, 2), Family((1,), 0, 2)]


def test_groups_of_prompts_with_a_common_start_stay_apart():
    """All begin with the same template; sharing more within each prompt saves more than sharing less among all."""
    template = list(range(100, 110))
    prompts = [[*template, *range(10 * p, 10 * p + 8)] for p in range(3)]
    sequences = [[*prompt, 50 + answer] for answer in range(4) for prompt in prompts]
    assert find_families(sequences) == [Family((p, p + 3, p + 6, p + 9), 17, 17 + 4 * 2) for p in range(3)]


def test_families_keep_to_the_budget():
    """Eleven tokens for one, two more for each further member: four in 16 tokens and less."""
    sequences = [[*range(10), 20 + answer] for answer in range(8)]
    families = find_families(sequences, 17)
    assert [len(f.members) for f in families] == [4, 4] and all(f.tokens == 9 + 4 * 2 for f in families)
    assert find_families([list(range(9))], 4) == [Family((0,), 0, 9)], "a long sequence is alone; packing refuses it"


def rows_saved(group):
    """Tokens that sharing saves, found by counting equal columns."""
    columns = 0
    for column in zip(*group, strict=False):
        if len(set(column)) > 1:
            break
        columns += 1
    return (len(group) - 1) * max(0, columns - 1)


@given(st.lists(st.lists(st.integers(0, 2), max_size=7), max_size=7), st.none() | st.integers(1, 30))
@settings(max_examples=300, deadline=None)
def test_no_cut_of_the_sorted_sequences_is_shorter(sequences, budget):
    families = find_families(sequences, budget)
    assert sorted(i for f in families for i in f.members) == list(range(len(sequences)))
    for family in families:
        members = [sequences[i] for i in family.members]
        assert family.tokens == sum(map(len, members)) - (len(members) - 1) * family.shared
        if len(members) > 1:
            assert family.shared > 0 and (budget is None or family.tokens <= budget)
            assert len({tuple(m[: family.shared + 1]) for m in members}) == 1
            assert all(len(m) > family.shared for m in members)
        else:
            assert family.shared == 0
    ordered, best = sorted(sequences), 0
    for count in range(len(sequences)):
        for cut in combinations(range(1, len(sequences)), count):
            parts = [ordered[a:b] for a, b in zip((0, *cut), (*cut, len(ordered)), strict=True)]
            fits = [budget is None or sum(map(len, p)) - rows_saved(p) <= budget or len(p) == 1 for p in parts]
            best = max(best, sum(map(rows_saved, parts))) if all(fits) else best
    assert sum(map(len, sequences)) - sum(f.tokens for f in families) == best
