"""Our linear layers against torch's in float64, and where their weight gradients go."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from areal_like.engines.megatron.linear import _Product

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def drawn(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype).requires_grad_()


def expected(x: Tensor, weight: Tensor, bias: Tensor | None, dy: Tensor) -> tuple[Tensor, ...]:
    x, weight = x.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    b = None if bias is None else bias.detach().double().requires_grad_()
    y = F.linear(x, weight, b)
    y.backward(dy.double())
    return y, x.grad, weight.grad, None if b is None else b.grad  # type: ignore[return-value]


def assert_close(actual: Tensor, wanted: Tensor, dtype: torch.dtype) -> None:
    tolerance = 1e-5 if dtype is torch.float32 else 1.6e-2
    assert (actual.double() - wanted).abs().max() < tolerance * wanted.abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("biased", [False, True])
def test_product(dtype, biased):
    x, weight, dy = (
        drawn(5, 1, 8, dtype=dtype, seed=0),
        drawn(6, 8, dtype=dtype, seed=1),
        drawn(5, 1, 6, dtype=dtype, seed=2),
    )
    bias = drawn(6, dtype=dtype, seed=3) if biased else None
    y = _Product.apply(x, weight, bias, True)  # without main_grad there is nothing to accumulate in
    y.backward(dy)
    wanted = expected(x, weight, bias, dy)
    for actual, value in zip((y, x.grad, weight.grad, None if bias is None else bias.grad), wanted, strict=True):
        if value is not None:
            assert actual.shape == value.shape
            assert_close(actual, value, dtype)


@pytest.mark.parametrize("main", [torch.float32, torch.bfloat16], ids=str)
def test_two_micro_batches_add_up_in_the_gradient_buffer(main):
    weight = drawn(6, 8, dtype=torch.bfloat16, seed=1)
    weight.main_grad = torch.zeros(6, 8, dtype=main, device=DEVICE)
    weight.grad_added_to_main_grad = False
    total = torch.zeros(6, 8, dtype=torch.float64, device=DEVICE)
    for seed in (2, 4):
        x, dy = drawn(5, 1, 8, dtype=torch.bfloat16, seed=seed), drawn(5, 1, 6, dtype=torch.bfloat16, seed=seed + 1)
        _Product.apply(x, weight, None, True).backward(dy)
        assert weight.grad_added_to_main_grad and weight.grad is not None  # which the hook of data parallelism drops
        weight.grad = None
        total += expected(x, weight, None, dy)[2]
    assert_close(weight.main_grad, total, torch.bfloat16)


def test_frozen_weights_get_no_gradient():
    x, weight = drawn(5, 8, dtype=torch.float32, seed=0), drawn(6, 8, dtype=torch.float32, seed=1).requires_grad_(False)
    _Product.apply(x, weight, None, True).sum().backward()
    assert weight.grad is None
    assert_close(x.grad, weight.double().sum(dim=0).expand(5, 8), torch.float32)
