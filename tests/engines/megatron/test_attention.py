"""Packed attention, rotary positions and norms of the local layers, each document against torch alone."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.transformer.transformer_config import TransformerConfig

from areal_like.engines.megatron.attention import (
    DocumentGroups,
    LocalPackedSeqParams,
    PackedAttention,
    PackedRotaryEmbedding,
)
from areal_like.engines.megatron.norm import RMSNorm


def cumulative(lengths):
    return torch.tensor([0, *lengths]).cumsum(0)


def parameters(lengths):
    positions = torch.cat([torch.arange(n) for n in lengths])
    return LocalPackedSeqParams(
        qkv_format="sbhd",
        max_seqlen_q=max(lengths),
        max_seqlen_kv=max(lengths),
        positions=positions,
        groups=DocumentGroups.of(cumulative(lengths)),
    )


def attention(scale=None, dropout=0.0):
    config = TransformerConfig(num_layers=1, hidden_size=32, num_attention_heads=4, attention_dropout=dropout)
    return PackedAttention(config, 1, None, "self", softmax_scale=scale)


def by_document(q, k, v, lengths, scale):
    """Causal softmax written out, one document at a time; `[tokens, heads, dim]` each."""
    rows, start, share = [], 0, q.shape[1] // k.shape[1]
    for n in lengths:
        part = slice(start, start + n)
        scores = torch.einsum("qhd,khd->hqk", q[part], k[part].repeat_interleave(share, 1)) * scale
        scores = scores.masked_fill(torch.ones(n, n).triu(1).bool(), float("-inf"))
        out = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v[part].repeat_interleave(share, 1))
        rows.append(out.flatten(1))
        start += n
    return torch.cat(rows)


CASES = [[7], [1], [1, 1, 1], [5, 1, 9, 2], [30, 29, 28, 3, 3, 1, 16], [2, 40, 2, 39, 2]]


@pytest.mark.parametrize("lengths", CASES, ids=str)
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_documents_do_not_see_each_other(lengths, heads, kv_heads, scale):
    torch.manual_seed(sum(lengths))
    tokens, dim = sum(lengths), 8
    shapes = [(tokens, 1, heads, dim), (tokens, 1, kv_heads, dim), (tokens, 1, kv_heads, dim)]
    ours = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shapes]
    theirs = [x.detach().squeeze(1).clone().requires_grad_(True) for x in ours]
    out = attention(scale)(*ours, None, packed_seq_params=parameters(lengths))
    expected = by_document(*theirs, lengths, scale or dim**-0.5)
    assert out.shape == (tokens, 1, heads * dim)
    assert torch.allclose(out.squeeze(1), expected, atol=1e-12)
    weight = torch.randn_like(expected)
    (out.squeeze(1) * weight).sum().backward()
    (expected * weight).sum().backward()
    for a, b in zip(ours, theirs, strict=True):
        assert torch.allclose(a.grad.squeeze(1), b.grad, atol=1e-12)


FAMILIES = [
    # lengths of the documents, and which document each goes on from
    ([4, 3, 2], [None, 0, 0]),
    ([5, 2, 7, 3, 3, 1, 9], [None, 0, None, 2, 2, 0, None]),
    ([1, 1, 1, 40, 30, 16], [None, 0, 0, None, 3, 3]),
    ([2, 5, 60, 5, 5], [None, 0, None, 2, 2]),
]


@pytest.mark.parametrize(("lengths", "seen"), FAMILIES, ids=str)
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2)])
def test_documents_that_go_on_from_another_one(lengths, seen, heads, kv_heads):
    """Each is the end of a sequence of its own; torch is given that sequence whole."""
    torch.manual_seed(sum(lengths))
    dim, tokens = 8, sum(lengths)
    spans = list(torch.arange(tokens).split(lengths))
    whole = torch.cat(
        [torch.cat([spans[s], own]) if s is not None else own for own, s in zip(spans, seen, strict=True)]
    )
    whole_lengths = [n + (lengths[s] if s is not None else 0) for n, s in zip(lengths, seen, strict=True)]
    own_rows, start = [], 0
    for n, total in zip(lengths, whole_lengths, strict=True):
        own_rows.append(torch.arange(start + total - n, start + total))
        start += total
    shapes = [(tokens, 1, heads, dim), (tokens, 1, kv_heads, dim), (tokens, 1, kv_heads, dim)]
    ours = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shapes]
    theirs = [x.detach().squeeze(1).clone().requires_grad_(True) for x in ours]
    packed = LocalPackedSeqParams(qkv_format="sbhd", groups=DocumentGroups.of(cumulative(lengths), seen))
    out = attention()(*ours, None, packed_seq_params=packed).squeeze(1)
    expected = by_document(*(x[whole] for x in theirs), whole_lengths, dim**-0.5)[torch.cat(own_rows)]
    assert torch.allclose(out, expected, atol=1e-12)
    weight = torch.randn_like(expected)
    (out * weight).sum().backward()
    (expected * weight).sum().backward()
    for a, b in zip(ours, theirs, strict=True):
        assert torch.allclose(a.grad.squeeze(1), b.grad, atol=1e-12)


def test_dropout_acts_in_training_only():
    torch.manual_seed(0)
    q = torch.randn(12, 1, 2, 8)
    module, packed = attention(dropout=0.5), parameters([7, 5])
    assert not torch.equal(*(module(q, q, q, None, packed_seq_params=packed) for _ in range(2)))
    module.eval()
    assert torch.equal(*(module(q, q, q, None, packed_seq_params=packed) for _ in range(2)))


def test_attention_without_the_documents_is_refused():
    q = torch.randn(3, 1, 2, 8)
    with pytest.raises(TypeError, match="LocalPackedSeqParams"):
        attention()(q, q, q, None)


@given(st.lists(st.integers(0, 60), min_size=1, max_size=12).filter(lambda x: sum(x) > 0))
@settings(max_examples=100, deadline=None)
def test_every_token_has_its_own_slot(lengths):
    """Slots are distinct, lead back to the token, stand in the order of the document, and little is padded."""
    groups = DocumentGroups.of(cumulative(lengths))
    tokens, slots = sum(lengths), sum(rows * longest for rows, longest in groups.shapes)
    assert groups.index.shape == (slots,) and groups.slots.shape == (tokens,)
    assert len(set(groups.slots.tolist())) == tokens
    assert torch.equal(groups.index[groups.slots], torch.arange(tokens))
    assert sum(rows for rows, _ in groups.shapes) == sum(n > 0 for n in lengths)
    assert tokens >= (1 - DocumentGroups.MAX_PADDING) * slots
    start = 0
    for n in lengths:
        steps = groups.slots[start : start + n]
        assert torch.equal(steps, steps[:1] + torch.arange(n))
        start += n


def test_groups_by_hand():
    """Lengths 4, 3 and 1: 3 fills three quarters of a row of 4 and joins it; 1 does not."""
    groups = DocumentGroups.of(cumulative([1, 4, 3]))
    assert groups.shapes == [(2, 4), (1, 1)]
    assert groups.index.tolist() == [1, 2, 3, 4, 5, 6, 7, 7, 0]
    assert groups.slots.tolist() == [8, 0, 1, 2, 3, 4, 5, 6]


def test_rotary_angles_start_anew_in_each_document(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))  # `cpu.install` in an engine
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    inner = RotaryEmbedding(8, 1.0, use_cpu_initialization=True, rotary_base=100)
    module, packed = PackedRotaryEmbedding(inner), parameters([3, 1, 4])
    longest = module.get_rotary_seq_len(None, None, None, None, packed)
    assert longest == 4
    angles = module(longest).squeeze()
    frequencies = 100.0 ** (-torch.arange(0, 8, 2) / 8)
    expected = torch.tensor([0, 1, 2, 0, 0, 1, 2, 3.0])[:, None] * frequencies
    assert torch.allclose(angles, torch.cat([expected, expected], 1), atol=1e-6)
    with pytest.raises(TypeError, match="LocalPackedSeqParams"):
        module.get_rotary_seq_len(None, None, None, None, None)


def test_rms_norm_by_hand():
    config = TransformerConfig(num_layers=1, hidden_size=4, num_attention_heads=1)
    norm = RMSNorm(config, 4, eps=1.0)
    with torch.no_grad():
        norm.weight.copy_(torch.tensor([1.0, 2.0, 3.0, 4.0]))
    x = torch.tensor([[1.0, -1.0, 2.0, 4.0]])
    expected = x / (22 / 4 + 1.0) ** 0.5 * torch.tensor([1.0, 2.0, 3.0, 4.0])
    assert torch.allclose(norm(x), expected)
    assert norm.weight.sequence_parallel is False
    assert F.rms_norm(x, (4,), norm.weight, 1.0).equal(norm(x))
