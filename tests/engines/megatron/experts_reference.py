"""Experts one by one in float64, and `GroupedExperts` outside an engine to compare with them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from areal_like.engines.megatron.experts import GroupedExperts

HIDDEN, WIDTH = 64, 32


class Alone:
    """A process group of one rank."""

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


def grouped_experts(experts: int, device: str, dtype: torch.dtype, *, hidden: int = HIDDEN, width: int = WIDTH) -> Any:
    """Random ones, whose products stay of the size of their inputs."""
    config = TransformerConfig(
        num_layers=1,
        hidden_size=hidden,
        num_attention_heads=4,
        num_moe_experts=experts,
        moe_ffn_hidden_size=width,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        params_dtype=dtype,
        use_cpu_initialization=device == "cpu",
        perform_initialization=False,
    )
    groups: Any = SimpleNamespace(tp=Alone(), ep=Alone(), expt_tp=Alone(), expt_dp=Alone())
    module = GroupedExperts(experts, config, pg_collection=groups)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            values = torch.randn(parameter.shape, generator=generator) / parameter.shape[-1] ** 0.5
            parameter.copy_(values)
    return module


def inputs(counts: list[int], device: str, dtype: torch.dtype, seed: int = 1) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rows, counts of each expert, router probabilities, and the gradient of the output."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(sum(counts), HIDDEN, generator=generator).to(device, dtype).requires_grad_()
    probs = torch.rand(sum(counts), generator=generator).to(device).requires_grad_()
    grad = torch.randn(sum(counts), HIDDEN, generator=generator).to(device, dtype)
    return rows, torch.tensor(counts, device=device), probs, grad


def one_by_one(module: Any, rows: Tensor, counts: Tensor, probs: Tensor, grad: Tensor) -> dict[str, Tensor]:
    """Output and gradients in float64 of a loop over the experts that have rows; on the CPU."""

    def leaf(tensor: Tensor) -> Tensor:
        return tensor.detach().cpu().double().requires_grad_()

    fc1, fc2, rows, probs = leaf(module.linear_fc1.weight), leaf(module.linear_fc2.weight), leaf(rows), leaf(probs)
    outputs, start = [], 0
    for expert, count in enumerate(counts.tolist()):
        mine, start = slice(start, start + count), start + count
        gate, up = (rows[mine] @ fc1[expert].T).chunk(2, dim=-1)
        outputs.append((F.silu(gate) * up * probs[mine, None]) @ fc2[expert].T)
    output = torch.cat(outputs)
    output.backward(grad.cpu().double())
    gradients = {"rows": rows.grad, "probs": probs.grad, "fc1": fc1.grad, "fc2": fc2.grad}
    return {"output": output.detach()} | {n: g for n, g in gradients.items() if g is not None}


def largest_difference(found: Tensor, expected: Tensor) -> float:
    """Relative to the largest value that was expected; 0 where there is none."""
    assert found.shape == expected.shape, (found.shape, expected.shape)
    if not expected.numel():
        return 0.0
    return float((found.detach().cpu().double() - expected).abs().max() / expected.abs().max().clamp(min=1e-30))
