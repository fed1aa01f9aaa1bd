"""The split of the fused projection and rotary positions, by hand."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def angles(positions: int, rotated: int, base: float = 100.0) -> Tensor:
    """As Megatron-Core's RotaryEmbedding gives them: float32 `[positions, 1, 1, rotated]`."""
    frequencies = base ** (-torch.arange(0, rotated, 2).double() / rotated)
    half = torch.outer(torch.arange(positions).double(), frequencies).float()
    return torch.cat([half, half], dim=1)[:, None, None]


def split(mixed: Tensor, positions: Tensor, table: Tensor, groups: int, share: int) -> list[Tensor]:
    """In the type of `mixed` `[tokens, 1, groups * (share + 2) * width]`: q, k, v as `[tokens, 1, heads, width]`.

    x cos + rotate_half(x) sin over the first columns; rotate_half(x) = [-b | a].
    """
    rotated, tokens = table.shape[-1], mixed.shape[0]
    angle = table.reshape(-1, rotated).to(mixed.dtype)[positions][:, None, None]
    heads = mixed.view(tokens, 1, groups, share + 2, -1)
    queries, keys, values = heads[:, :, :, :share], heads[:, :, :, share], heads[:, :, :, share + 1]

    def rotate(x: Tensor) -> Tensor:
        turned, rest = x[..., :rotated], x[..., rotated:]
        a, b = turned.chunk(2, dim=-1)
        return torch.cat([turned * angle.cos() + torch.cat([-b, a], dim=-1) * angle.sin(), rest], dim=-1)

    return [rotate(queries.flatten(2, 3)), rotate(keys), values]


def case(lengths: list[int], groups: int, share: int, width: int, rotated: int) -> dict[str, Any]:
    """A row of documents, and gradients of its queries, keys and values; float32."""
    generator, tokens = torch.Generator().manual_seed(sum(lengths)), sum(lengths)
    mixed = torch.randn(tokens, 1, groups * (share + 2) * width, generator=generator)
    heads = [groups * share, groups, groups]
    grads = [torch.randn(tokens, 1, n, width, generator=generator) for n in heads]
    positions = torch.cat([torch.arange(n) for n in lengths])
    return {"mixed": mixed, "positions": positions, "angles": angles(max(lengths), rotated), "grads": grads}


def differences(function: Any, dtype: torch.dtype, device: str, **sizes: Any) -> list[float]:
    """Largest differences of q, k, v and the gradient of the projection to float64, relative to the largest value.

    Args:
        function: of the projection, positions, angles, groups and share.
    """
    one = case(**sizes)
    mixed = one["mixed"].to(device, dtype).requires_grad_()
    exact = mixed.detach().double().requires_grad_()
    grads = [g.to(device, dtype) for g in one["grads"]]
    positions, angle = one["positions"].to(device), one["angles"].to(device)
    groups, share = sizes["groups"], sizes["share"]
    ours = function(mixed, positions, angle, groups, share)
    theirs = split(exact, positions, angle, groups, share)
    assert all(x.dtype is dtype and x.shape == y.shape for x, y in zip(ours, theirs, strict=True))
    assert torch.equal(ours[2].double(), theirs[2]), "values are copied"
    torch.autograd.backward(list(ours), grads)
    torch.autograd.backward(theirs, [g.double() for g in grads])
    pairs = zip([*(x.detach() for x in ours), mixed.grad], [*(x.detach() for x in theirs), exact.grad], strict=True)
    return [float((a.double() - b).abs().max() / b.abs().max()) for a, b in pairs]
