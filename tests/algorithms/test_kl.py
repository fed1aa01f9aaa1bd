"""The estimators by hand, and their expectation against the exact divergence of two categorical distributions."""

from __future__ import annotations

import math

import pytest
import torch

from areal_like.algorithms.kl import approximate_kl


def test_by_hand():
    p, q = torch.tensor([-1.0]), torch.tensor([-1.5])  # log r = -0.5
    assert approximate_kl(p, q, "k1").item() == pytest.approx(0.5)
    assert approximate_kl(p, q, "k2").item() == pytest.approx(0.125)
    assert approximate_kl(p, q, "k3").item() == pytest.approx(math.exp(-0.5) - 1 + 0.5)


def categorical() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    p = torch.randn(12, generator=generator, dtype=torch.float64).log_softmax(0)
    q = torch.randn(12, generator=generator, dtype=torch.float64).log_softmax(0)
    return p, q


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_unbiased(estimator):
    p, q = categorical()
    exact = (p.exp() * (p - q)).sum()  # the definition of KL(p || q)
    assert (p.exp() * approximate_kl(p, q, estimator)).sum().item() == pytest.approx(exact.item(), rel=1e-12)


def test_expected_gradients_are_as_documented():
    logits = torch.randn(9, generator=torch.Generator().manual_seed(1), dtype=torch.float64, requires_grad=True)
    q = torch.randn(9, generator=torch.Generator().manual_seed(2), dtype=torch.float64).log_softmax(0)
    p = logits.log_softmax(0)
    (true,) = torch.autograd.grad((p.exp() * (p - q)).sum(), logits, retain_graph=True)

    def expected(estimator: str) -> torch.Tensor:  # tokens drawn from p, the draw itself without gradient
        (g,) = torch.autograd.grad(
            (p.detach().exp() * approximate_kl(p, q, estimator)).sum(), logits, retain_graph=True
        )
        return g

    assert torch.allclose(expected("k2"), true)
    assert torch.allclose(expected("k1"), torch.zeros_like(true), atol=1e-12)
    assert not torch.allclose(expected("k3"), true, atol=1e-3)


def test_k3_keeps_its_digits_near_zero_in_float32():
    p, q = torch.tensor([-1.0]), torch.tensor([-1.0 + 2**-12])
    exact = math.expm1(2**-12) - 2**-12
    assert approximate_kl(p, q, "k3").item() == pytest.approx(exact, rel=1e-3)
    assert approximate_kl(p, p, "k3").item() == 0.0


def test_unknown_estimator():
    with pytest.raises(ValueError, match="'abs' is unknown; it is one of k1, k2, k3"):
        approximate_kl(torch.zeros(1), torch.zeros(1), "abs")
