"""The Triton kernels of the log-probabilities beside float64, on a GPU or in a process of Triton's interpreter."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

CASES: dict[str, dict[str, Any]] = {
    "one row": {"tokens": 1, "columns": 9001, "vocabulary": 9001, "dtype": "float32", "temperature": 1.0},
    "padding": {"tokens": 3, "columns": 4352, "vocabulary": 4099, "dtype": "float32", "temperature": 0.7},
    "a part of a block": {"tokens": 5, "columns": 131, "vocabulary": 131, "dtype": "bfloat16", "temperature": 1.0},
    "a second shard": {
        "tokens": 4,
        "columns": 4160,
        "vocabulary": 8200,
        "dtype": "float16",
        "temperature": 1.3,
        "rank": 1,
    },
    "a shard of padding": {
        "tokens": 2,
        "columns": 64,
        "vocabulary": 60,
        "dtype": "bfloat16",
        "temperature": 1.0,
        "rank": 1,
    },
    "one column": {"tokens": 3, "columns": 16, "vocabulary": 1, "dtype": "float32", "temperature": 1.0},
    "many rows": {"tokens": 1100, "columns": 70, "vocabulary": 61, "dtype": "bfloat16", "temperature": 0.6},
    "large": {"tokens": 2100, "columns": 40000, "vocabulary": 39999, "dtype": "bfloat16", "temperature": 0.9},
    "large, few rows": {"tokens": 40, "columns": 151936, "vocabulary": 151665, "dtype": "float32", "temperature": 1.0},
}
"""`columns` of a rank, `vocabulary` of all ranks; of two ranks `rank` is the one whose kernels run."""


def compare(case: dict[str, Any], device: str) -> tuple[float, float, float]:
    """Largest differences from float64: of log-probabilities, of entropies, and, relative, of gradients."""
    from areal_like.engines.megatron.kernels import log_probs as kernels
    from areal_like.engines.megatron.log_probs import rescaled

    tokens, columns, vocabulary = case["tokens"], case["columns"], case["vocabulary"]
    temperature, rank = case["temperature"], case.get("rank", 0)
    ranks = 1 if rank == 0 else 2
    generator = torch.Generator().manual_seed(tokens)
    logits = (3 * torch.randn(tokens, ranks * columns, generator=generator)).to(getattr(torch, case["dtype"]))
    logits[:, vocabulary:] = 50.0
    labels = torch.randint(0, vocabulary, (tokens,), generator=generator)
    labels[0], labels[-1] = 0, vocabulary - 1
    logits, labels = logits.to(device), labels.to(device)
    coefficients = torch.randn(2, tokens, generator=generator).to(device)
    leaf = logits.double().requires_grad_(True)
    log_p = (leaf[:, :vocabulary] / temperature).log_softmax(-1)
    expected, expected_entropy = log_p.gather(1, labels[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)
    differences = [0.0, 0.0, 0.0]
    for of_log_probs, of_entropy in ((True, True), (True, False), (False, True)):
        leaf.grad = None
        total = of_log_probs * (coefficients[0].double() * expected).sum()
        total = total + of_entropy * (coefficients[1].double() * expected_entropy).sum()
        total.backward(retain_graph=True)
        parts = []
        for number in range(ranks):
            own = logits[:, number * columns : (number + 1) * columns]
            first, valid = number * columns, min(max(vocabulary - number * columns, 0), columns)
            found = torch.empty(4, tokens, device=device)
            kernels.row_statistics(own, labels, first, valid, temperature=temperature, with_entropy=True, out=found)
            parts.append(found)
        together = torch.stack(parts)
        maximum = together[:, 0].amax(0)
        total_power, weighted, label = rescaled(together, maximum).sum(0)
        log_z, entropy = maximum + total_power.log(), total_power.log() - weighted / total_power
        gradient = logits[:, rank * columns : (rank + 1) * columns].clone()
        kernels.write_gradient(
            gradient,
            labels,
            first,
            valid,
            temperature=temperature,
            log_z=log_z,
            entropy=entropy,
            grad_log_probs=coefficients[0] if of_log_probs else None,
            grad_entropy=coefficients[1] if of_entropy else None,
        )
        theirs = leaf.grad[:, rank * columns : (rank + 1) * columns]
        size = leaf.grad.abs().max().clamp(min=1e-6)
        now = (
            (label - log_z - expected).abs().max(),
            (entropy - expected_entropy).abs().max(),
            (gradient.double() - theirs).abs().max() / size,
        )
        differences = [max(a, float(b)) for a, b in zip(differences, now, strict=True)]
        assert bool((gradient[:, valid:] == 0).all()), "padding has a gradient"
    return differences[0], differences[1], differences[2]


def whole(
    logits: Tensor, labels: Tensor, vocabulary: int, temperature: float, coefficients: Tensor
) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies of whole rows; the logits become their gradient."""
    from areal_like.engines.megatron.kernels import log_probs as kernels

    found = torch.empty(4, logits.shape[0], device=logits.device)
    kernels.row_statistics(logits, labels, 0, vocabulary, temperature=temperature, with_entropy=True, out=found)
    maximum, total, weighted, label = found
    log_z, entropy = maximum + total.log(), total.log() - weighted / total
    kernels.write_gradient(
        logits,
        labels,
        0,
        vocabulary,
        temperature=temperature,
        log_z=log_z,
        entropy=entropy,
        grad_log_probs=coefficients[0],
        grad_entropy=coefficients[1],
    )
    return label - log_z, entropy


class KernelHost:
    """A process whose environment says TRITON_INTERPRET=1: the kernels run on the CPU, and slowly."""

    def compare(self, case: dict[str, Any], device: str) -> tuple[float, float, float]:
        return compare(case, device)
