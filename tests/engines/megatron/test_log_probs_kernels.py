"""The Triton kernels of the log-probabilities against torch in float64: on a GPU, and in Triton's interpreter here."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from kernel_hosts import CASES, compare, whole

from areal_like.runtime.local import WorkerGroup


@pytest.fixture(scope="module")
def interpreter():
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed")
    environment = {"TRITON_INTERPRET": "1"}
    with WorkerGroup.start("kernels", "kernel_hosts:KernelHost", {}, 1, environment=environment) as group:
        yield group


def limits(case):
    """What log-probabilities, entropies and gradients may differ by: float32's rounding; a gradient also by its own."""
    gradient = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1e-2}[case["dtype"]]
    return 2e-5, 2e-5, gradient


@pytest.mark.parametrize("name", [n for n, case in CASES.items() if case["tokens"] < 10])
def test_in_the_interpreter(interpreter, name):
    (found,) = interpreter.call("compare", CASES[name], "cpu")
    assert all(f <= limit for f, limit in zip(found, limits(CASES[name]), strict=True)), found


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_on_a_gpu(name):
    found = compare(CASES[name], "cuda")
    assert all(f <= limit for f, limit in zip(found, limits(CASES[name]), strict=True)), found


@pytest.mark.gpu
def test_more_than_2_31_logits():
    """The last rows lie behind 2^31 elements; all rows are the same, and so are their results (5 GiB)."""
    free = torch.cuda.mem_get_info()[0]
    if free < 8 * 2**30:
        pytest.skip(f"{free / 2**30:.1f} GiB are free")
    rows, columns = 16384, 151936
    row = torch.randn(columns, dtype=torch.float32).to(torch.bfloat16).cuda()
    logits = torch.empty(rows, columns, dtype=torch.bfloat16, device="cuda")
    logits[:] = row
    labels = torch.full((rows,), columns - 1, device="cuda")
    log_probs, entropy = whole(logits, labels, columns, 1.0, torch.ones(2, rows, device="cuda"))
    log_p = row.double().log_softmax(-1)
    p = log_p.exp()
    expected = -(p * (1 - (p * log_p).sum() + log_p))
    expected[-1] += 1
    assert torch.allclose(log_probs.double(), log_p[-1].expand(rows), atol=2e-5)
    assert torch.allclose(entropy.double(), -(p * log_p).sum().expand(rows), atol=2e-5)
    for chosen in (0, rows // 2, rows - 1):
        found = logits[chosen].double()
        assert float((found - expected)[:-1].abs().max()) < 1e-2 * float(expected[:-1].abs().max())
        assert float(found[-1]) == pytest.approx(float(expected[-1]), rel=2**-8)  # the label's


@pytest.mark.gpu
def test_the_same_rows_give_the_same_bits():
    logits = torch.randn(1500, 5000, device="cuda").to(torch.bfloat16)
    labels = torch.randint(0, 5000, (1500,), device="cuda")
    coefficients = torch.randn(2, 1500, device="cuda")
    first, second = logits.clone(), logits.clone()
    one, two = (whole(x, labels, 4999, 0.9, coefficients) for x in (first, second))
    assert torch.equal(one[0], two[0]) and torch.equal(one[1], two[1]) and torch.equal(first, second)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_head_on_a_gpu(tmp_path, dtype):
    """Hidden states and weight in, gradients out, beside float64; the weight's also straight into `main_grad`."""
    import torch.distributed as dist

    from areal_like.engines.megatron.output_head import token_log_probs

    dist.init_process_group("gloo", init_method=(tmp_path / "file").as_uri(), rank=0, world_size=1)
    try:
        tokens, width, rows, vocabulary = 300, 64, 5008, 5001
        hidden = torch.randn(tokens, width, device="cuda").to(dtype)
        weight = torch.nn.Parameter((torch.randn(rows, width, device="cuda") / 8).to(dtype))
        weight.main_grad = torch.ones(rows, width, device="cuda")
        labels = torch.randint(0, vocabulary, (tokens,), device="cuda")
        options = {"group": dist.group.WORLD, "vocab_size": vocabulary, "temperature": 0.9, "with_entropy": True}
        gradients = []
        for fused in (False, True) if importlib.util.find_spec("transformer_engine") else (False,):
            leaf = hidden.clone().requires_grad_(True)
            values, entropy = token_log_probs(leaf, weight, labels, **options, accumulate_in_main_grad=fused)
            (values.sum() + 0.1 * entropy.sum()).backward()
            gradients.append((leaf.grad, weight.main_grad - 1 if fused else weight.grad))
            assert torch.equal(weight.main_grad, torch.ones_like(weight.main_grad)) != fused
        with torch.no_grad():
            chunked = token_log_probs(hidden, weight, labels, **options, chunk_bytes=1)
        leaf, leaf_weight = hidden.double().requires_grad_(True), weight.detach().double().requires_grad_(True)
        logits = leaf @ leaf_weight[:vocabulary].t()
        logits = logits + (logits.detach().to(dtype).double() - logits.detach())
        log_p = (logits / 0.9).log_softmax(-1)
        expected, expected_entropy = log_p.gather(1, labels[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)
        (expected.sum() + 0.1 * expected_entropy.sum()).backward()
        atol = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 6e-2}[dtype]
        for ours in (values, chunked[0]):
            assert torch.allclose(ours.double(), expected, atol=atol)
        for ours in (entropy, chunked[1]):
            assert torch.allclose(ours.double(), expected_entropy, atol=atol)
        for grad_hidden, grad_weight in gradients:
            for ours, theirs in ((grad_hidden, leaf.grad), (grad_weight, leaf_weight.grad)):
                assert float((ours.double() - theirs).abs().max() / theirs.abs().max()) < atol
    finally:
        dist.destroy_process_group()
