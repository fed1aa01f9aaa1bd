"""Log-probabilities and entropies over a split vocabulary, and their gradients, against torch in float64."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode


def reference(hidden, weight, labels, weights, vocab_size, temperature, dtype=torch.float64):
    """log_softmax over the real columns; gradients by autograd, 0 at the padding."""
    hidden, weight = (t.to(dtype).double().clone().requires_grad_(True) for t in (hidden, weight))
    logits = hidden @ weight[:vocab_size].t()
    if dtype != torch.float64:
        # What the engine rounds, rounded here too; the gradient passes as if it had not been.
        logits = logits + (logits.detach().to(dtype).double() - logits.detach())
    log_p = (logits / temperature).log_softmax(-1)
    values = log_p.gather(1, labels[:, None])[:, 0]
    entropy = -(log_p.exp() * log_p).sum(-1)
    (weights[0].double() * values + weights[1].double() * entropy).sum().backward()
    return {"values": values.detach(), "entropy": entropy.detach(), "hidden": hidden.grad, "weight": weight.grad}


def inputs(tokens, vocab_size, columns, *, width=16, scale=3.0, dtype=torch.float32):
    """Random hidden states and weight whose logits have deviation `scale`; padding rows give large logits."""
    generator = torch.Generator().manual_seed(tokens)
    hidden = torch.randn(tokens, width, generator=generator).to(dtype)
    weight = (scale / width**0.5 * torch.randn(columns, width, generator=generator)).to(dtype)
    weight[vocab_size:] *= 20.0  # padding must not take part, whatever it holds
    labels = torch.randint(0, vocab_size, (tokens,), generator=generator)
    labels[0], labels[-1] = 0, vocab_size - 1
    return hidden, weight, labels, torch.randn(2, tokens, generator=generator)


def check(ranks, *, tokens, vocab_size, columns, temperature=1.0, scale=3.0, dtype=torch.float32, atol=2e-5):
    """Compare all ranks; `columns` is the padded vocabulary of all ranks together."""
    ranks.group.call("join")
    hidden, weight, labels, weights = inputs(tokens, vocab_size, columns, scale=scale, dtype=dtype)
    results = ranks.group.call("log_probs", hidden, weight, labels, weights, vocab_size, temperature)
    rounded = torch.float64 if dtype == torch.float32 else dtype
    expected = reference(hidden, weight, labels, weights, vocab_size, temperature, rounded)
    for ours in results:
        assert ours["values"].dtype == ours["entropy"].dtype == torch.float32
        for name in ("values", "entropy"):
            assert torch.allclose(ours[name].double(), expected[name], atol=atol), name
        # The rounding of a product depends on its number of rows.
        unchunked = torch.stack([ours["values"], ours["entropy"]])
        assert torch.allclose(ours["chunked"], unchunked, atol=atol if dtype == torch.float32 else 5e-2)
    whole = torch.cat([r["weight"] for r in results])
    summed = torch.stack([r["hidden"].double() for r in results]).sum(0)
    assert whole.dtype == results[0]["hidden"].dtype == dtype
    for name, ours in (("weight", whole.double()), ("hidden", summed)):
        size = expected[name].abs().max().clamp(min=1.0)
        limit = 2 * atol if dtype == torch.float32 else 2e-2
        assert float((ours - expected[name]).abs().max() / size) < limit, name
    assert (whole[vocab_size:] == 0).all()


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


@pytest.mark.parametrize("tokens", [1, 127, 128, 129, 1023, 1024, 1025, 2049])
def test_chunks(pair, tokens):
    """Logits are made in chunks of 128 tokens here, and read in chunks of 1024: nothing changes at the boundaries."""
    check(pair, tokens=tokens, vocab_size=11, columns=12)


def test_large_logits_do_not_overflow(pair):
    check(pair, tokens=5, vocab_size=30, columns=32, scale=300.0, atol=2e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_of_16_bits(pair, dtype):
    """The arithmetic is float32; gradients come in the logits' own type."""
    check(pair, tokens=33, vocab_size=61, columns=64, dtype=dtype, atol=3e-2)


def test_16_bit_logits_are_read_exactly(one_process):
    """From the very same 16-bit logits float64 gives the same within float32's rounding."""
    from areal_like.engines.megatron.output_head import token_log_probs

    hidden, weight, labels, _ = inputs(50, 61, 64, dtype=torch.bfloat16)
    with torch.no_grad():
        values, entropy = token_log_probs(
            hidden, weight, labels, group=one_process, vocab_size=61, temperature=0.7, with_entropy=True
        )
    log_p = ((hidden @ weight.t())[:, :61].double() / 0.7).log_softmax(-1)
    assert torch.allclose(values.double(), log_p.gather(1, labels[:, None])[:, 0], atol=5e-6)
    assert torch.allclose(entropy.double(), -(log_p.exp() * log_p).sum(-1), atol=5e-6)


def test_the_temperature_is_positive(solo):
    solo.group.call("join")
    hidden, weight, labels, weights = inputs(1, 4, 4)
    for temperature in (0.0, -1.0):
        (error,) = solo.attempt("log_probs", hidden, weight, labels, weights, 4, temperature)
        assert error == ("ValueError", f"temperature must be positive, not {temperature}")


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_the_output_layer_of_two_ranks(pair, sequence_parallel, frozen):
    """Gradients arrive whole through Megatron's mappings; without labels it gives its logits as before."""
    pair.group.call("join")
    hidden, weight, labels, weights = inputs(8, 64, 64)
    results = pair.group.call("head", hidden, weight, labels, weights, sequence_parallel, frozen)
    expected = reference(hidden, weight, labels, weights, 64, 1.0)
    for gradient, _, second, shape in results:
        assert torch.allclose(gradient.double(), expected["hidden"], atol=4e-5)
        assert "have had their backward pass" in second
        assert shape == [8, 1, 32]
    if frozen:
        assert all(r[1] is None for r in results)
    else:
        assert torch.allclose(torch.cat([r[1] for r in results]).double(), expected["weight"], atol=4e-5)


class Matrices(TorchDispatchMode):
    """Storages of at least `size` elements that operations give, by data pointer."""

    def __init__(self, size):
        super().__init__()
        self.size, self.seen = size, set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and tensor.numel() >= self.size:
                self.seen.add(tensor.untyped_storage().data_ptr())
        return out


@pytest.mark.parametrize("with_entropy", [False, True])
def test_the_gradient_is_written_over_the_logits(one_process, with_entropy, monkeypatch):
    """One tensor of tokens x vocabulary in both passes together; without gradient not even one."""
    from areal_like.engines.megatron import log_probs as passes
    from areal_like.engines.megatron.output_head import token_log_probs

    tokens, columns = 2048, 24
    monkeypatch.setattr(passes, "CHUNK_BYTES", tokens * columns)  # a quarter of them in float32
    hidden, weight, labels, _ = inputs(tokens, columns, columns, width=4)
    hidden.requires_grad_(True)
    weight.requires_grad_(True)
    options = {"group": one_process, "vocab_size": columns, "with_entropy": with_entropy}
    with Matrices(tokens * columns) as matrices:
        log_probs, entropy = token_log_probs(hidden, weight, labels, **options)
        (log_probs.sum() + (entropy.sum() if with_entropy else 0.0)).backward()
    assert len(matrices.seen) == 1
    with torch.no_grad(), Matrices(tokens * columns) as matrices:
        token_log_probs(hidden, weight, labels, **options, chunk_bytes=1)
    assert matrices.seen == set()


def test_the_weight_gradient_goes_to_main_grad(one_process):
    """Megatron's gradient accumulation fusion: added to what is there, and autograd is told that it is."""
    from areal_like.engines.megatron.output_head import token_log_probs

    hidden, weight, labels, weights = inputs(9, 30, 32)
    expected = reference(hidden, weight, labels, weights, 30, 1.0)["weight"]

    def gradient(weight, fused):
        values, entropy = token_log_probs(
            hidden.clone().requires_grad_(True),
            weight,
            labels,
            group=one_process,
            vocab_size=30,
            with_entropy=True,
            accumulate_in_main_grad=fused,
        )
        (weights[0] * values + weights[1] * entropy).sum().backward()

    def parameter(**attributes):
        made = torch.nn.Parameter(weight.clone())
        made.main_grad = torch.ones_like(weight)
        for name, value in attributes.items():
            setattr(made, name, value)
        return made

    for fused, attributes in ((False, {"grad_added_to_main_grad": False}), (True, {})):
        own = parameter(**attributes)
        gradient(own, fused)
        added = own.main_grad.double() - 1.0
        assert torch.allclose(added, expected if fused else torch.zeros_like(expected), atol=4e-5)
        assert (own.grad is None) == fused
    own = parameter(grad_added_to_main_grad=False)
    gradient(own, True)
    gradient(own, True)
    assert own.grad_added_to_main_grad and own.grad.shape == own.shape
    assert torch.allclose(own.main_grad.double() - 1.0, 2 * expected, atol=8e-5)
    tied = parameter(grad_added_to_main_grad=False, zero_out_wgrad=True)
    gradient(tied, True)
    assert tied.grad_added_to_main_grad and tied.grad is None, "the embedding's gradient is to be all of it"
    unknown = torch.nn.Parameter(weight.clone())
    gradient(unknown, True)
    assert torch.allclose(unknown.grad.double(), expected, atol=4e-5), "it has no main_grad"


def test_another_output_layer_is_refused():
    from areal_like.engines.megatron.output_head import LogProbHead

    with pytest.raises(TypeError, match="the output layer is Linear, not Megatron's ColumnParallelLinear"):
        LogProbHead.become(torch.nn.Linear(2, 2), 2)


def test_chunks_are_whole_tiles():
    from areal_like.engines.megatron.output_head import chunk_tokens

    assert chunk_tokens(151936 * 2) == 1664  # 482 MiB
    assert chunk_tokens(151936) == 3456  # two ranks
    assert chunk_tokens(2**40) == 128


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
