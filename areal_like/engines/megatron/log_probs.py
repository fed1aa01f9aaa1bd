"""Log-probabilities and entropy over a vocabulary that is split over tensor-parallel ranks.

With z the logits divided by the temperature, of which each rank holds the columns of its vocabulary shard:

    log p_y = z_y - logsumexp(z)            d/dz_j = [j = y] - p_j
    H       = logsumexp(z) - sum_j p_j z_j  d/dz_j = -p_j (z_j - sum_k p_k z_k)

The logits are read in chunks of tokens, so float32 copies exist for one chunk only; the backward pass recomputes the
probabilities from the logits and writes the gradient in the logits' own dtype.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["vocab_parallel_log_probs"]

CHUNK_TOKENS = 1024


def vocab_parallel_log_probs(
    logits: Tensor,
    labels: Tensor,
    *,
    group: dist.ProcessGroup,
    vocab_size: int,
    temperature: float = 1.0,
    with_entropy: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Log-probability of each label, and the entropy of each distribution.

    Args:
        logits: `[tokens, padded_vocab / tp]`, this rank's columns.
        labels: `[tokens]`, ids in the whole vocabulary.
        group: the tensor-parallel group.
        vocab_size: size without padding; columns beyond it take no part.
        temperature: divides the logits; positive.
        with_entropy: also return the entropy in nats.

    Returns:
        float32 `[tokens]` log-probabilities and float32 `[tokens]` entropies (None unless asked for), the same on every
        rank of the group, differentiable with respect to `logits`.
    """
    if temperature <= 0:
        raise ValueError(f"temperature must be positive, not {temperature}")
    log_probs, entropy = _VocabParallelLogProbs.apply(logits, labels, group, vocab_size, temperature, with_entropy)
    return log_probs, entropy if with_entropy else None


def _scaled(logits: Tensor, first_column: int, vocab_size: int, temperature: float) -> Tensor:
    """One chunk in float32, divided by the temperature, padding columns at -inf."""
    z = logits.float()
    if temperature != 1.0:
        z = z / temperature
    padding = first_column + z.shape[-1] - vocab_size
    if padding > 0:
        z = z.clone() if z.data_ptr() == logits.data_ptr() else z
        z[:, max(0, z.shape[-1] - padding) :] = float("-inf")
    return z


class _VocabParallelLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        logits: Tensor,
        labels: Tensor,
        group: dist.ProcessGroup,
        vocab_size: int,
        temperature: float,
        with_entropy: bool,
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)  # an entropy that is only reported has no gradient, and none is computed
        tokens, columns = logits.shape
        first = group.rank() * columns
        parallel = group.size() > 1
        log_probs = torch.empty(tokens, dtype=torch.float32, device=logits.device)
        log_z = torch.empty_like(log_probs)
        mean_z = torch.zeros_like(log_probs)
        for start in range(0, tokens, CHUNK_TOKENS):
            part = slice(start, start + CHUNK_TOKENS)
            z = _scaled(logits[part], first, vocab_size, temperature)
            maximum = z.max(dim=-1).values
            if parallel:
                dist.all_reduce(maximum, op=dist.ReduceOp.MAX, group=group)
            local = labels[part] - first
            mine = (local >= 0) & (local < columns)
            label_z = z.gather(1, local.clamp(0, columns - 1)[:, None])[:, 0].masked_fill(~mine, 0.0)
            exp_z = (z - maximum[:, None]).exp_()
            sums = torch.stack([exp_z.sum(-1), label_z])
            if with_entropy:
                sums = torch.cat([sums, (exp_z * z.masked_fill(z == float("-inf"), 0.0)).sum(-1)[None]])
            if parallel:
                dist.all_reduce(sums, group=group)
            log_z[part] = sums[0].log() + maximum
            log_probs[part] = sums[1] - log_z[part]
            if with_entropy:
                mean_z[part] = sums[2] / sums[0]
        ctx.save_for_backward(logits, labels, log_z, mean_z)
        ctx.first, ctx.vocab_size, ctx.temperature = first, vocab_size, temperature
        return log_probs, log_z - mean_z if with_entropy else mean_z

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_log_probs, grad_entropy = grads
        logits, labels, log_z, mean_z = ctx.saved_tensors
        columns = logits.shape[1]
        grad = torch.empty_like(logits)
        for start in range(0, logits.shape[0], CHUNK_TOKENS):
            part = slice(start, start + CHUNK_TOKENS)
            z = _scaled(logits[part], ctx.first, ctx.vocab_size, ctx.temperature)
            p = (z - log_z[part, None]).exp_()
            out = torch.zeros_like(p) if grad_log_probs is None else p * -grad_log_probs[part, None]
            if grad_entropy is not None:
                deviation = z.masked_fill(z == float("-inf"), 0.0) - mean_z[part, None]
                out -= p * deviation * grad_entropy[part, None]
            if grad_log_probs is not None:
                local = labels[part] - ctx.first
                mine = (local >= 0) & (local < columns)
                value = torch.where(mine, grad_log_probs[part], 0.0)
                out.scatter_add_(1, local.clamp(0, columns - 1)[:, None], value[:, None])
            grad[part] = out if ctx.temperature == 1.0 else out / ctx.temperature
        return grad, None, None, None, None, None
