"""`PackedBatch`: what it refuses, and that selecting, joining and cutting lose nothing."""

from __future__ import annotations

import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_like.data.batch import PackedBatch


def make(lengths, start=0):
    rows = [[start + 100 * s + i for i in range(n)] for s, n in enumerate(lengths)]
    return PackedBatch.from_sequences(
        rows,
        tokens={"loss_mask": [[float(i > 0) for i in range(n)] for n in lengths]},
        sequences={"rewards": [float(start + s) for s in range(len(lengths))]},
    )


def same(a, b):
    assert a.tokens.keys() == b.tokens.keys() and a.sequences.keys() == b.sequences.keys()
    assert torch.equal(a.input_ids, b.input_ids) and torch.equal(a.cu_seqlens, b.cu_seqlens)
    assert all(torch.equal(a.tokens[k], b.tokens[k]) for k in a.tokens)
    assert all(torch.equal(a.sequences[k], b.sequences[k]) for k in a.sequences)


def test_packing_by_hand():
    batch = make([3, 0, 2])
    assert batch.input_ids.tolist() == [0, 1, 2, 200, 201] and batch.input_ids.dtype == torch.int64
    assert batch.cu_seqlens.tolist() == [0, 3, 3, 5] and batch.cu_seqlens.dtype == torch.int64
    assert batch.lengths == [3, 0, 2] and len(batch) == 3
    assert batch.tokens["loss_mask"].tolist() == [0, 1, 1, 0, 1]
    assert batch.sequences["rewards"].tolist() == [0, 1, 2]
    assert [t.tolist() for t in batch.split_tokens(batch.input_ids)] == [[0, 1, 2], [], [200, 201]]


def test_selecting_by_hand():
    chosen = make([3, 1, 2]).select([2, 0])
    assert chosen.input_ids.tolist() == [200, 201, 0, 1, 2] and chosen.cu_seqlens.tolist() == [0, 2, 5]
    assert chosen.tokens["loss_mask"].tolist() == [0, 1, 0, 1, 1]
    assert chosen.sequences["rewards"].tolist() == [2, 0]
    assert make([3, 1]).select([1, 1]).input_ids.tolist() == [100, 100]
    assert make([3, 1]).select(range(1)).lengths == [3]


def test_nothing_at_all():
    empty = make([3]).select([])
    assert len(empty) == 0 and empty.lengths == [] and empty.input_ids.shape == (0,)
    assert empty.tokens["loss_mask"].shape == (0,) and empty.sequences["rewards"].shape == (0,)
    assert len(PackedBatch.from_sequences([])) == 0
    assert PackedBatch.from_sequences([], tokens={"x": []}).tokens["x"].shape == (0,)
    same(PackedBatch.concat([empty, make([2])]), make([2]))


@given(st.lists(st.integers(0, 6), min_size=1, max_size=10), st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None)
def test_selecting_a_permutation_and_back(lengths, random):
    batch, order = make(lengths), list(range(len(lengths)))
    random.shuffle(order)
    back = [order.index(i) for i in range(len(order))]
    same(batch.select(order).select(back), batch)
    same(PackedBatch.concat([batch.select([i]) for i in range(len(batch))]), batch)


def test_concatenating():
    joined = PackedBatch.concat([make([2, 1]), make([3], start=7)])
    assert joined.lengths == [2, 1, 3] and joined.sequences["rewards"].tolist() == [0, 1, 7]
    with pytest.raises(ValueError, match="different fields"):
        PackedBatch.concat([make([2]), PackedBatch.from_sequences([[1]])])
    with pytest.raises(ValueError, match="nothing to concatenate"):
        PackedBatch.concat([])


def test_fields_of_several_columns_stay_together():
    batch = PackedBatch(torch.arange(5), torch.tensor([0, 2, 5]), {"topk": torch.arange(10).view(5, 2)})
    assert batch.select([1]).tokens["topk"].tolist() == [[4, 5], [6, 7], [8, 9]]


def test_it_travels_between_processes():
    same(pickle.loads(pickle.dumps(make([3, 0, 2]))), make([3, 0, 2]))


def test_moving():
    same(make([3, 1]).to("cpu"), make([3, 1]))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: PackedBatch(torch.arange(3), torch.tensor([1, 3])), "start at 0"),
        (lambda: PackedBatch(torch.arange(3), torch.tensor([[0, 3]])), "one-dimensional"),
        (lambda: PackedBatch(torch.arange(0), torch.tensor([], dtype=torch.int64)), "start at 0"),
        (lambda: PackedBatch(torch.arange(3), torch.tensor([0, 2])), "ends at 2 but there are 3 tokens"),
        (
            lambda: PackedBatch(torch.arange(3), torch.tensor([0, 3]), {"mask": torch.zeros(2)}),
            r"token field 'mask' has \(2,\) for 3 tokens",
        ),
        (
            lambda: PackedBatch(torch.arange(3), torch.tensor([0, 3]), {}, {"rewards": torch.zeros(2)}),
            r"sequence field 'rewards' has \(2,\) for 1 sequences",
        ),
        (lambda: PackedBatch.from_sequences([[1, 2]], tokens={"mask": [[1]]}), "token field 'mask' has rows of other"),
        (lambda: PackedBatch.from_sequences([[1]], sequences={"r": [1.0, 2.0]}), "sequence field 'r'"),
    ],
)
def test_what_does_not_fit_is_named(call, words):
    with pytest.raises(ValueError, match=words):
        call()
