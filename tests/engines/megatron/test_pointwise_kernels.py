"""Triton kernels of norms, SwiGLU, rotary positions against torch in float64: on a GPU, or in Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import rotary_reference
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


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "lengths, groups, share, width, rotated",
    [
        ([5, 1, 9, 2], 2, 6, 16, 16),
        ([7], 3, 1, 8, 8),
        ([1, 1, 3], 1, 8, 64, 64),
        ([4, 3], 2, 3, 20, 12),  # neither half is a power of two; eight columns are not rotated
        ([300, 1], 2, 1, 12, 4),
    ],
)
def test_split_with_rotation(lengths, groups, share, width, rotated, dtype):
    from areal_like.engines.megatron.kernels.qkv_rope import SplitWithRotation

    def ours(mixed, positions, angles, groups, share):
        table = torch.cat([f(angles[:, 0, 0, : rotated // 2]) for f in (torch.cos, torch.sin)], dim=1)
        return SplitWithRotation.apply(mixed, positions, table, groups, share)

    sizes = {"lengths": lengths, "groups": groups, "share": share, "width": width, "rotated": rotated}
    assert max(rotary_reference.differences(ours, dtype, DEVICE, **sizes)) < TOLERANCE[dtype]


@needs_triton
def test_split_of_no_tokens_and_gradients_with_strides():
    from areal_like.engines.megatron.kernels.qkv_rope import SplitWithRotation

    table = torch.tensor([[0.0, 1.0]], device=DEVICE)  # a quarter turn: [a | b] to [-b | a]
    none = torch.zeros(0, 1, 6, device=DEVICE, requires_grad=True)
    positions = torch.zeros(0, dtype=torch.int64, device=DEVICE)
    q, k, v = SplitWithRotation.apply(none, positions, table, 1, 1)
    assert q.shape == k.shape == v.shape == (0, 1, 1, 2)
    (q.sum() + k.sum() + v.sum()).backward()
    assert none.grad.shape == none.shape
    mixed = torch.tensor([[[1.0, 2, 3, 4, 5, 6]]], device=DEVICE, requires_grad=True)
    q, k, v = SplitWithRotation.apply(mixed, positions.new_zeros(1), table, 1, 1)
    assert torch.cat([q, k, v], dim=-1).flatten().tolist() == [-2, 1, -4, 3, 5, 6]
    wide = torch.tensor([1.0, 0, 2, 0], device=DEVICE)[::2].view(1, 1, 1, 2)
    torch.autograd.backward([q, k, v], [wide, 10 * wide, 100 * wide])
    assert mixed.grad.flatten().tolist() == [2, -1, 20, -10, 100, 200]
