"""The Triton kernels of norms and SwiGLU against torch in float64: on a GPU, or else in Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DTYPES = [torch.float32] if DEVICE == "cpu" else [torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}
needs_triton = pytest.mark.skipif(
    DEVICE == "cpu" and not INTERPRETED, reason="without a GPU these run in test_in_the_interpreter"
)


@pytest.mark.skipif(DEVICE == "cuda" or INTERPRETED, reason="the kernels run here")
def test_in_the_interpreter():
    """Triton reads the variable when it is first imported: the tests below run in a process of their own."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", __file__]
    done = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:]
    assert " passed" in done.stdout and "failed" not in done.stdout


def drawn(*shape, dtype, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype).requires_grad_()


def assert_close(actual, expected, dtype):
    scale = expected.abs().max()
    assert ((actual.double() - expected).abs().max() / scale) < TOLERANCE[dtype]


def double(*tensors):
    return [t.detach().double().requires_grad_() for t in tensors]


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows, width", [(5, 96), (1, 33), (37, 128), (700, 64), (9, 2100), (0, 64)])
def test_norm(rows, width, dtype):
    from areal_like.engines.megatron.kernels.rms_norm import FusedRMSNorm

    x, weight = drawn(rows, 1, width, dtype=dtype, seed=0), drawn(width, dtype=dtype, seed=1)
    dy, dresidual = drawn(rows, 1, width, dtype=dtype, seed=2), drawn(rows, 1, width, dtype=dtype, seed=3)
    y, residual = FusedRMSNorm.apply(x, weight, 1e-6)
    assert torch.equal(residual, x)
    torch.autograd.backward([y, residual], [dy, dresidual])
    if rows == 0:
        assert weight.grad.abs().max() == 0 and x.grad.shape == x.shape
        return
    x64, weight64 = double(x, weight)
    y64 = F.rms_norm(x64, (width,), weight64, 1e-6)
    torch.autograd.backward([y64, x64 * 1.0], [dy.double(), dresidual.double()])
    assert_close(y, y64, dtype)
    assert_close(x.grad, x64.grad, dtype)
    assert_close(weight.grad, weight64.grad, dtype)


@needs_triton
def test_norm_without_a_residual_or_with_nothing_else():
    from areal_like.engines.megatron.kernels.rms_norm import FusedRMSNorm

    x, weight = drawn(6, 40, dtype=torch.float32, seed=0), drawn(40, dtype=torch.float32, seed=1)
    dy = drawn(6, 40, dtype=torch.float32, seed=2)
    FusedRMSNorm.apply(x, weight, 1e-6)[0].backward(dy)
    x64, weight64 = double(x, weight)
    F.rms_norm(x64, (40,), weight64, 1e-6).backward(dy.double())
    assert_close(x.grad, x64.grad, torch.float32)
    x.grad = weight.grad = None
    FusedRMSNorm.apply(x, weight, 1e-6)[1].backward(dy)
    assert torch.equal(x.grad, dy) and weight.grad is None


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows, width", [(5, 96), (1, 7), (3, 1500), (0, 8)])
def test_swiglu(rows, width, dtype):
    from areal_like.engines.megatron.kernels.swiglu import FusedSwiGLU

    x, dy = drawn(rows, 1, 2 * width, dtype=dtype, seed=0), drawn(rows, 1, width, dtype=dtype, seed=1)
    y = FusedSwiGLU.apply(x)
    y.backward(dy)
    assert y.shape == dy.shape and x.grad.shape == x.shape
    if rows:
        (x64,) = double(x)
        gate, up = x64.chunk(2, dim=-1)
        y64 = F.silu(gate) * up
        y64.backward(dy.double())
        assert_close(y, y64, dtype)
        assert_close(x.grad, x64.grad, dtype)


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows, width", [(5, 96), (1, 7), (3, 1500), (0, 8)])
def test_weighted_swiglu(rows, width, dtype):
    from areal_like.engines.megatron.kernels.swiglu import WeightedSwiGLU

    x, dy = drawn(rows, 2 * width, dtype=dtype, seed=0), drawn(rows, width, dtype=dtype, seed=1)
    p = torch.rand(rows, 1, generator=torch.Generator().manual_seed(2)).to(DEVICE).requires_grad_()
    y = WeightedSwiGLU.apply(x, p)
    y.backward(dy)
    assert y.dtype is dtype and p.grad.shape == p.shape
    if rows:
        x64, p64 = double(x, p)
        gate, up = x64.chunk(2, dim=-1)
        y64 = F.silu(gate) * up * p64
        y64.backward(dy.double())
        assert_close(y, y64, dtype)
        assert_close(x.grad, x64.grad, dtype)
        assert_close(p.grad, p64.grad, dtype)
