"""From a rank's sequences to micro-batches and back."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from areal_like.data.batch import PackedBatch
from areal_like.engines.megatron.micro_batches import Padding, make_micro_batches
from areal_like.spec import SequenceTooLong


@pytest.fixture
def make(one_process):
    def call(batch, *, max_tokens=None, at_least=1, pad_to=1, local=True, share=False):
        return make_micro_batches(
            batch,
            max_tokens=max_tokens,
            at_least=at_least,
            padding=Padding(micro_batch=pad_to),
            data_parallel_group=one_process,
            device=torch.device("cpu"),
            local_attention=local,
            share_prefixes=share,
        )

    return call


def numbered(lengths):
    """Sequence s is s * 100 + 1, s * 100 + 2, ..."""
    rows = [[100 * s + i + 1 for i in range(n)] for s, n in enumerate(lengths)]
    return PackedBatch.from_sequences(rows, tokens={"loss_mask": [[1.0] * n for n in lengths]})


def test_labels_positions_and_padding_by_hand(make):
    (m,) = make(numbered([3, 1, 2]), pad_to=4)
    assert m.indices == [0, 1, 2]
    assert m.input_ids.tolist() == [[1, 2, 3, 101, 201, 202, 0, 0]]
    assert m.positions.tolist() == [[0, 1, 2, 0, 0, 1, 0, 1]], "the padding is a document of its own"
    assert m.labels.tolist() == [2, 3, 0, 0, 202, 0, 0, 0]
    assert m.packed.groups.index.numel() >= 8 and m.packed.max_seqlen_q == 3
    assert m.batch.input_ids.tolist() == [1, 2, 3, 101, 201, 202], "what the loss sees is not padded"


def test_to_tokens_moves_values_to_the_token_they_are_about(make):
    (m,) = make(numbered([3, 1, 2]), pad_to=4)
    values = torch.tensor([10.0, 11, 12, 13, 14, 15, 16, 17])
    assert m.to_tokens(values).tolist() == [0, 10, 11, 0, 0, 14]
    # exactly the values whose label is the token itself
    assert m.labels[:2].tolist() == m.batch.input_ids[1:3].tolist()


def test_to_tokens_carries_gradients_to_real_predictions_only(make):
    (m,) = make(numbered([3, 1, 2]), pad_to=4)
    values = torch.ones(8, requires_grad=True)
    m.to_tokens(values).sum().backward()
    assert values.grad.tolist() == [1, 1, 0, 0, 1, 0, 0, 0]


@pytest.mark.parametrize("lengths", [[0, 3], [3, 0], [2, 0, 2], [0, 0, 4, 0]], ids=str)
def test_sequences_without_tokens(make, lengths):
    (m,) = make(numbered(lengths), pad_to=2)
    tokens = sum(lengths)
    assert m.batch.lengths == lengths and m.input_ids.numel() == tokens + tokens % 2
    moved = m.to_tokens(torch.arange(1.0, m.input_ids.numel() + 1))
    expected, start = [], 0
    for n in lengths:
        expected += [0.0] * (n > 0) + [float(start + i) for i in range(1, n)]
        start += n
    assert moved.tolist() == expected


def test_an_empty_shard_still_runs_through_the_model(make):
    """A rank without sequences takes part in every collective, with padding alone."""
    empty = numbered([4]).select([])
    made = make(empty, max_tokens=8, at_least=2, pad_to=2)
    assert len(made) == 2
    for m in made:
        assert m.indices == [] and len(m.batch) == 0
        assert m.input_ids.tolist() == [[0, 0]] and m.positions.tolist() == [[0, 1]]
        assert m.to_tokens(torch.ones(2)).shape == (0,)


def test_the_layout_for_transformer_engine(make):
    (m,) = make(numbered([3, 1]), pad_to=4, local=False)
    (padded,) = make(numbered([3, 2]), pad_to=4, local=False)
    assert m.packed.qkv_format == "thd" and m.packed.cu_seqlens_q.tolist() == [0, 3, 4]
    assert padded.packed.cu_seqlens_q.tolist() == [0, 3, 5, 8]
    assert padded.packed.cu_seqlens_q.dtype == torch.int32 and padded.packed.max_seqlen_q == 3


def test_a_shared_beginning_by_hand(make):
    """Two answers to 1 2 3, which goes into the row without its last token, and a sequence with nothing to share."""
    batch = PackedBatch.from_sequences([[1, 2, 3, 40], [7, 8], [1, 2, 3, 50, 60]])
    (m,) = make(batch, pad_to=3, share=True)
    assert m.indices == [0, 2, 1]
    assert m.input_ids.tolist() == [[1, 2, 3, 40, 3, 50, 60, 7, 8]]
    assert m.positions.tolist() == [[0, 1, 2, 3, 2, 3, 4, 0, 1]]
    assert m.labels.tolist() == [2, 3, 40, 0, 50, 60, 0, 8, 0]
    assert m.packed.max_seqlen_q == 5
    assert m.batch.input_ids.tolist() == [1, 2, 3, 40, 1, 2, 3, 50, 60, 7, 8], "the loss sees whole sequences"
    values = torch.arange(10.0, 19.0, requires_grad=True)
    moved = m.to_tokens(values)
    assert moved.tolist() == [0, 10, 11, 12, 0, 10, 11, 14, 15, 0, 17]
    moved.sum().backward()
    assert values.grad.tolist() == [2, 2, 1, 0, 1, 1, 0, 1, 0], "both answers send gradients into what they share"
    (plain,) = make(batch, pad_to=3)
    assert plain.input_ids.numel() == 12


@given(
    prompts=st.lists(st.tuples(st.integers(1, 12), st.lists(st.integers(0, 6), min_size=1, max_size=5)), max_size=5),
    at_least=st.integers(1, 3),
    pad_to=st.integers(1, 5),
)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_shared_beginnings_lose_nothing(make, prompts, at_least, pad_to):
    """Groups of answers to prompts of some length; the row of a micro-batch stays under the budget, whole sequences
    come back, each token is predicted at its predecessor's place and at its predecessor's position."""
    rows = [
        [100 * p + i for i in range(n)] + [1000 + 10 * a + i for i in range(answer)]
        for p, (n, answers) in enumerate(prompts)
        for a, answer in enumerate(answers)
    ]
    batch = PackedBatch.from_sequences(rows)
    made = make(batch, max_tokens=24, at_least=at_least, pad_to=pad_to, share=True)
    assert sorted(i for m in made for i in m.indices) == list(range(len(rows)))
    for m in made:
        assert m.input_ids.numel() <= 24
        assert m.batch.split_tokens(m.batch.input_ids) == [] or [
            ids.tolist() for ids in m.batch.split_tokens(m.batch.input_ids)
        ] == [rows[i] for i in m.indices]
        assert torch.equal(m.input_ids[0, m.places], m.batch.input_ids)
        steps = torch.cat([torch.arange(n) for n in m.batch.lengths]) if m.indices else m.places
        assert torch.equal(m.positions[0, m.places], steps)
        predicted = m.to_tokens(m.labels.float())
        assert torch.equal(predicted[steps > 0], m.batch.input_ids[steps > 0].float())


@given(
    lengths=st.lists(st.integers(1, 40), max_size=15),
    at_least=st.integers(1, 4),
    pad_to=st.integers(1, 4),
)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_sequence_is_in_one_micro_batch_unchanged(make, lengths, at_least, pad_to):
    batch = numbered(lengths)
    made = make(batch, max_tokens=48, at_least=at_least, pad_to=pad_to)
    assert len(made) >= at_least
    assert sorted(i for m in made for i in m.indices) == list(range(len(lengths)))
    sequences = batch.split_tokens(batch.input_ids)
    for m in made:
        assert m.input_ids.numel() <= 48 and m.input_ids.numel() % pad_to == 0
        assert m.input_ids.shape == m.positions.shape == (1, m.labels.numel())
        for index, own in zip(m.indices, m.batch.split_tokens(m.batch.input_ids), strict=True):
            assert torch.equal(own, sequences[index])
        moved = m.to_tokens(m.labels.float()).split(m.batch.lengths) if m.indices else []
        for own, labels in zip(m.batch.split_tokens(m.batch.input_ids), moved, strict=False):
            assert labels[1:].tolist() == own[1:].tolist()


def test_a_sequence_over_the_budget(make):
    with pytest.raises(SequenceTooLong, match=r"a sequence of 9 tokens .* at most 8 tokens; raise mb_spec.max_tokens"):
        make(numbered([3, 9]), max_tokens=8)
    with pytest.raises(SequenceTooLong, match=r"a sequence of 10 tokens .* at most 9 tokens"):
        make(numbered([10]), max_tokens=10, pad_to=3)


def test_ranks_agree_on_the_number(pair, models, helpers):
    """One rank needs two micro-batches, the other one: both have two, and values come back in the batch's order."""
    pair.build("megatron:d2", models("qwen3"))
    batch = helpers.random_batch([90, 60, 30, 40, 10])
    from areal_like.runtime.dispatch import scatter

    shards = scatter(batch, pair.mesh).shards
    counts = pair.group.call_each("micro_batch_counts", [(s,) for s in shards])
    assert len(counts[0]) == len(counts[1]) == 2
    expected = helpers.hugging_face_logits(models("qwen3"), batch)
    assert torch.allclose(pair.logits(batch), expected, atol=1e-4)


def test_the_host_neither_waits_for_the_device_nor_copies_one_by_one(one_process):
    """On the device `meta` nothing can be read back; a micro-batch's tensors of a dtype lie in one, copied at once."""
    made = make_micro_batches(
        numbered([3, 1, 2, 7]),
        max_tokens=8,
        at_least=1,
        data_parallel_group=one_process,
        device=torch.device("meta"),
        local_attention=False,
    )
    assert len(made) == 2 and [m.indices for m in made] == [[3], [0, 1, 2]]
    assert made[1].to_tokens(torch.empty(6, device="meta")).shape == (6,)
    for index, m in enumerate(made):
        assert m is made[index]  # built once
        tensors = [
            m.batch.input_ids,
            m.batch.cu_seqlens,
            m.batch.tokens["loss_mask"],
            m.labels,
            m.places,
            m.is_predicted,
            m.packed.cu_seqlens_q,
        ]
        assert {x.device.type for x in tensors} == {"meta"}
        assert len({x.untyped_storage()._cdata for x in tensors}) == len({x.dtype for x in tensors}) == 4
    assert made[1].batch.sequences == {} and made[1].batch.tokens["loss_mask"].shape == (6,)


@pytest.mark.gpu
def test_copies_arrive():
    from areal_like.engines.megatron.host_copies import copy_to_device

    tensors = [torch.arange(7), torch.rand(3, 5), torch.arange(130), torch.empty(0), torch.tensor(2.5)]
    moved = copy_to_device(tensors, torch.device("cuda"))
    assert all(torch.equal(a.cpu(), b) and a.shape == b.shape for a, b in zip(moved, tensors, strict=True))
    assert all(x.data_ptr() % 256 == 0 for x in moved if x.numel())
