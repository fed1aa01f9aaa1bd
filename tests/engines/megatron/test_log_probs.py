"""Vocabulary-parallel log-probabilities and entropy, and their gradients, against torch in float64."""

from __future__ import annotations

import pytest
import torch


def reference(logits, labels, weights, vocab_size, temperature):
    """log_softmax over the real columns; the gradient by autograd, 0 at the padding."""
    leaf = logits.double().clone().requires_grad_(True)
    log_p = (leaf[:, :vocab_size] / temperature).log_softmax(-1)
    values = log_p.gather(1, labels[:, None])[:, 0]
    entropy = -(log_p.exp() * log_p).sum(-1)
    (weights[0].double() * values + weights[1].double() * entropy).sum().backward()
    return values.detach(), entropy.detach(), leaf.grad


def check(ranks, *, tokens, vocab_size, columns, temperature=1.0, scale=3.0, dtype=torch.float32, atol=2e-5):
    """Compare all ranks; `columns` is the padded vocabulary of all ranks together."""
    ranks.group.call("join")
    generator = torch.Generator().manual_seed(tokens)
    logits = (scale * torch.randn(tokens, columns, generator=generator)).to(dtype)
    logits[:, vocab_size:] = 50.0  # padding must not take part, whatever it holds
    labels = torch.randint(0, vocab_size, (tokens,), generator=generator)
    labels[0], labels[-1] = 0, vocab_size - 1
    weights = torch.randn(2, tokens, generator=generator)
    results = ranks.group.call("log_probs", logits, labels, weights, vocab_size, temperature)
    values, entropy, grad = reference(logits, labels, weights, vocab_size, temperature)
    for ours in results:
        assert ours[0].dtype == ours[1].dtype == torch.float32
        assert torch.allclose(ours[0].double(), values, atol=atol)
        assert torch.allclose(ours[1].double(), entropy, atol=atol)
    whole = torch.cat([r[2] for r in results], dim=1)
    assert whole.dtype == dtype
    assert torch.allclose(whole.double(), grad, atol=atol if dtype == torch.float32 else 2e-2)
    assert (whole[:, vocab_size:] == 0).all()


@pytest.mark.parametrize("temperature", [1.0, 0.6, 2.5])
@pytest.mark.parametrize(("vocab_size", "columns"), [(64, 64), (61, 64), (1, 64)])
def test_one_rank(solo, temperature, vocab_size, columns):
    check(solo, tokens=7, vocab_size=vocab_size, columns=columns, temperature=temperature)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize(("vocab_size", "columns"), [(64, 64), (61, 64)])
def test_two_ranks(pair, temperature, vocab_size, columns):
    """Labels are on both ranks."""
    check(pair, tokens=9, vocab_size=vocab_size, columns=columns, temperature=temperature)


@pytest.mark.parametrize(("vocab_size", "columns"), [(131, 132), (66, 88), (30, 88)])
def test_four_ranks(quad, vocab_size, columns):
    """In the last two cases the last ranks hold nothing but padding."""
    check(quad, tokens=9, vocab_size=vocab_size, columns=columns, temperature=0.8)


@pytest.mark.parametrize("tokens", [1, 1023, 1024, 1025, 2049])
def test_chunks(pair, tokens):
    """CHUNK_TOKENS is 1024: nothing changes at its boundaries."""
    check(pair, tokens=tokens, vocab_size=11, columns=12)


def test_large_logits_do_not_overflow(pair):
    check(pair, tokens=5, vocab_size=30, columns=32, scale=300.0, atol=2e-3)


def test_bfloat16_logits(pair):
    """The arithmetic is float32; the gradient comes in the logits' own type."""
    check(pair, tokens=33, vocab_size=61, columns=64, dtype=torch.bfloat16)


def test_the_temperature_is_positive(solo):
    solo.group.call("join")
    logits, labels, weights = torch.zeros(1, 4), torch.zeros(1, dtype=torch.int64), torch.zeros(2, 1)
    for temperature in (0.0, -1.0):
        (error,) = solo.attempt("log_probs", logits, labels, weights, 4, temperature)
        assert error == ("ValueError", f"temperature must be positive, not {temperature}")


def test_uneven_collectives_on_gloo(quad):
    """What Megatron asks of NCCL for experts with tensor parallelism: rank r has r + 1 rows."""
    quad.group.call("join")
    for rank, (gathered, scattered) in enumerate(quad.group.call("uneven")):
        for r, rows in enumerate(gathered):
            assert torch.equal(rows, torch.full((r + 1, 2), float(r + 1)))
        # rank q contributed 10 (q + 1) + r to rank r: 10 (1 + 2 + 3 + 4) + 4 r
        assert torch.equal(scattered, torch.full((rank + 1, 2), 100.0 + 4 * rank))


def test_the_cpu_accommodations_refuse_a_process_with_gpus(monkeypatch):
    from areal_like.engines.megatron import cpu

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(RuntimeError, match="CUDA_VISIBLE_DEVICES=''"):
        cpu.install()
