"""Scatter and collect on drawn meshes and batches."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_like.alloc import ModelAllocation
from areal_like.data.batch import PackedBatch
from areal_like.runtime.dispatch import scatter

sizes = st.sampled_from([1, 2, 3, 4])
lengths = st.lists(st.integers(1, 40), max_size=12)


def mesh_of(d=1, t=1, p=1, c=1):
    return ModelAllocation.parse(f"megatron:d{d}t{t}p{p}c{c}").mesh()


def batch_of(lengths):
    """Token ids that name sequence and position, and fields of both kinds."""
    ids = [[1000 * i + j for j in range(n)] for i, n in enumerate(lengths)]
    return PackedBatch.from_sequences(
        ids, {"half": [[x / 2 for x in row] for row in ids]}, {"rewards": torch.arange(len(ids)) * 1.5}
    )


def same(a: PackedBatch, b: PackedBatch) -> bool:
    return (
        torch.equal(a.input_ids, b.input_ids)
        and torch.equal(a.cu_seqlens, b.cu_seqlens)
        and all(torch.equal(a.tokens[k], b.tokens[k]) for k in b.tokens)
        and all(torch.equal(a.sequences[k], b.sequences[k]) for k in b.sequences)
    )


@settings(max_examples=150, deadline=None)
@given(lengths, sizes, sizes, sizes, sizes)
def test_collect_undoes_scatter(lengths, d, t, p, c):
    batch = batch_of(lengths)
    dispatch = scatter(batch, mesh_of(d, t, p, c))
    assert len(dispatch.shards) == d * t * p * c
    if lengths:
        assert same(dispatch.collect(dispatch.shards), batch)
        assert torch.equal(dispatch.collect([s.tokens["half"] for s in dispatch.shards]), batch.tokens["half"])
    assert dispatch.collect([[int(x) for x in s.cu_seqlens[:-1] * 0 + 1] for s in dispatch.shards]) == [1] * len(
        lengths
    )
    nested = dispatch.collect([{"ids": s.input_ids, "no": None} for s in dispatch.shards])
    assert torch.equal(nested["ids"], batch.input_ids) and nested["no"] is None


@settings(max_examples=100, deadline=None)
@given(lengths, sizes, sizes, sizes, sizes)
def test_ranks_share_a_shard_exactly_when_their_data_index_is_equal(lengths, d, t, p, c):
    mesh = mesh_of(d, t, p, c)
    dispatch = scatter(batch_of(lengths), mesh)
    for rank, shard in enumerate(dispatch.shards):
        first = mesh.rank(dp=mesh.coordinates(rank).dp, tp=0, pp=0, cp=0)
        assert shard is dispatch.shards[first]
    loads = [sum(dispatch.shards[rank].lengths) for rank in dispatch.sources]
    assert sum(loads) == sum(lengths)
    # longest first: no bin exceeds the average by more than one sequence
    assert not lengths or max(loads) <= sum(lengths) / d + max(lengths)


def test_results_come_from_tensor_0_last_stage_context_0_only():
    mesh = mesh_of(d=2, t=2, p=2, c=2)
    dispatch = scatter(batch_of([3, 5]), mesh)
    wrong = torch.full((100,), -1.0)
    results = [wrong] * 16
    for rank, shard in enumerate(dispatch.shards):
        at = mesh.coordinates(rank)
        if (at.tp, at.cp, at.pp) == (0, 0, 1):
            results[rank] = shard.tokens["half"]
    assert dispatch.collect(results).tolist() == [0, 0.5, 1, 500, 500.5, 501, 501.5, 502]


def test_fewer_sequences_than_data_parallel_ranks():
    dispatch = scatter(batch_of([4]), mesh_of(d=3))
    assert sorted(map(len, dispatch.shards)) == [0, 0, 1]
    assert same(dispatch.collect(dispatch.shards), batch_of([4]))


def test_results_that_do_not_fit_are_refused():
    dispatch = scatter(batch_of([4, 2]), mesh_of(d=2))
    with pytest.raises(ValueError, match="2 ranks have shards but 1 results came"):
        dispatch.collect([None])
    with pytest.raises(ValueError, match="the result of rank 1 has 3 tokens; its shard has 2"):
        dispatch.collect([torch.zeros(4), torch.zeros(3)])
    with pytest.raises(ValueError, match="the result of rank 0 has 0 entries; its shard has 1"):
        dispatch.collect([[], [1]])
    with pytest.raises(TypeError, match="results of type float"):
        dispatch.collect([0.5, 0.5])
