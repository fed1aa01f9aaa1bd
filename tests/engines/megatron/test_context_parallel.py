"""Packed sequences over context-parallel ranks: by hand, and the permutations as inverse pairs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from areal_like.data.batch import PackedBatch
from areal_like.engines.megatron.context_parallel import local_tokens, padded_to_gathered
from areal_like.engines.megatron.micro_batches import Padding, make_micro_batches
from areal_like.spec import padding_multiples


@dataclass(frozen=True)
class Place:
    """A rank of a context-parallel group, of which only the numbers are asked."""

    number: int
    ranks: int

    def size(self) -> int:
        return self.ranks

    def rank(self) -> int:
        return self.number


def test_each_rank_has_a_chunk_from_each_end():
    assert local_tokens([8, 4], 2, 0).tolist() == [0, 1, 6, 7, 8, 11]
    assert local_tokens([8, 4], 2, 1).tolist() == [2, 3, 4, 5, 9, 10]
    assert padded_to_gathered([4], 2).tolist() == [0, 2, 3, 1]
    assert local_tokens([3, 2], 1, 0).tolist() == [0, 1, 2, 3, 4]


@given(st.integers(1, 5), st.lists(st.integers(1, 5), min_size=1, max_size=6))
@settings(deadline=None)
def test_ranks_share_the_row_and_the_causal_work(cp, chunks):
    lengths = [2 * cp * n for n in chunks]
    held = [local_tokens(lengths, cp, rank) for rank in range(cp)]
    gathered = torch.cat(held)
    assert sorted(gathered.tolist()) == list(range(sum(lengths)))
    assert torch.equal(gathered[padded_to_gathered(lengths, cp)], torch.arange(sum(lengths)))
    first = sum(lengths[:-1])
    seen = {sum(t - first + 1 for t in tokens.tolist() if t >= first) for tokens in held}
    assert len(seen) == 1, "keys that the queries of the last sequence see, by rank"


@given(
    lengths=st.lists(st.integers(0, 30), max_size=8),
    cp=st.sampled_from([1, 2, 3]),
    tp=st.sampled_from([1, 2, 3]),
)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_predictions_of_all_ranks_meet_their_tokens(one_process, lengths, cp, tp):
    """What each rank says about the next token, gathered, is about the right token of the whole batch."""
    rows = [[1000 * s + i for i in range(n)] for s, n in enumerate(lengths)]
    batch = PackedBatch.from_sequences(rows)
    made = [
        make_micro_batches(
            batch,
            max_tokens=None,
            at_least=1,
            padding=Padding(*padding_multiples(tp, cp)),
            data_parallel_group=one_process,
            context_parallel_group=Place(rank, cp),
            device=torch.device("cpu"),
            local_attention=True,
        )[0]
        for rank in range(cp)
    ]
    assert {m.input_ids.numel() for m in made} == {made[0].input_ids.numel()}
    assert made[0].input_ids.numel() % tp == 0
    labels, ids = torch.cat([m.labels for m in made]), torch.cat([m.input_ids[0] for m in made])
    positions = torch.cat([m.positions[0] for m in made])
    whole = made[0]
    assert torch.equal(ids[whole.places], batch.input_ids)
    assert positions[whole.places].tolist() == [i for n in lengths for i in range(n)]
    for row in batch.split_tokens(torch.stack([whole.to_tokens(labels), batch.input_ids], dim=1)):
        assert torch.equal(row[1:, 0], row[1:, 1]) and (row[:1, 0] == 0).all()


def test_multiples():
    assert padding_multiples(1, 1) == (1, 1) and padding_multiples(4, 1) == (1, 4)
    assert padding_multiples(1, 2) == (4, 4) and padding_multiples(2, 2) == (4, 4)
    assert padding_multiples(3, 2) == (4, 12) and padding_multiples(4, 2) == (4, 8)


def test_the_stand_in_has_what_is_asked_of_a_group():
    assert {"size", "rank"} <= set(dir(dist.ProcessGroup))
