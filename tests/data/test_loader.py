"""Order, epochs and taking up again."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_like.data.loader import RowLoader
from areal_like.data.rows import Row

ROWS = [Row(str(i), str(i), {}, i) for i in range(10)]


def indices(batch: list[Row]) -> list[int]:
    return [row.index for row in batch]


def test_every_epoch_visits_every_row_once_in_another_order():
    loader = RowLoader(ROWS, batch_size=5, seed=3)
    first = indices(loader.next_batch()) + indices(loader.next_batch())
    second = indices(loader.next_batch()) + indices(loader.next_batch())
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second != list(range(10))


def test_without_shuffling_and_with_a_rest():
    loader = RowLoader(ROWS, batch_size=4, shuffle=False, drop_last=False)
    assert loader.batches_per_epoch == 3
    assert [indices(loader.next_batch()) for _ in range(4)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9], [0, 1, 2, 3]]
    assert RowLoader(ROWS, batch_size=4).batches_per_epoch == 2


def test_the_order_is_the_same_on_every_machine():
    # Python promises random.Random(str) and shuffle across versions since 3.2; this pins it
    assert indices(RowLoader(ROWS, batch_size=10, seed=1).next_batch()) == [8, 5, 9, 0, 4, 2, 3, 1, 7, 6]


@given(st.integers(1, 12), st.integers(1, 12), st.booleans(), st.booleans(), st.integers(0, 30), st.integers(0, 5))
def test_taking_up_again_gives_what_would_have_come(rows, size, shuffle, drop_last, taken, seed):
    def new() -> RowLoader:
        return RowLoader(
            ROWS[:rows] if rows <= 10 else ROWS, batch_size=size, shuffle=shuffle, drop_last=drop_last, seed=seed
        )

    try:
        loader = new()
    except ValueError as error:
        assert drop_last and "every epoch would be" in str(error)
        return
    for _ in range(taken):
        loader.next_batch()
    other = new()
    other.load_state(json.loads(json.dumps(loader.state())))
    assert [indices(loader.next_batch()) for _ in range(7)] == [indices(other.next_batch()) for _ in range(7)]


def test_one_epoch_ends():
    loader = RowLoader(ROWS, batch_size=4, drop_last=False)
    assert len(list(loader.one_epoch())) == 3
    assert (len(list(loader.one_epoch())), loader.epoch) == (3, 1)
    loader.next_batch()
    assert (len(list(loader.one_epoch())), loader.epoch) == (2, 2)


@pytest.mark.parametrize(
    ("change", "name"), [({"rows": 11}, "rows"), ({"batch_size": 2}, "batch_size"), ({"seed": 9}, "seed")]
)
def test_a_position_of_another_loader_is_refused(change, name):
    loader = RowLoader(ROWS, batch_size=5)
    with pytest.raises(ValueError, match=name):
        loader.load_state({**loader.state(), **change})
    with pytest.raises(ValueError, match="not a place"):
        loader.load_state({**loader.state(), "position": 3})


def test_loaders_without_batches_are_refused():
    with pytest.raises(ValueError, match="no rows"):
        RowLoader([], batch_size=1)
    with pytest.raises(ValueError, match="batch_size is 0"):
        RowLoader(ROWS, batch_size=0)
    with pytest.raises(ValueError, match="batch_size is 11 but there are 10 rows"):
        RowLoader(ROWS, batch_size=11)
