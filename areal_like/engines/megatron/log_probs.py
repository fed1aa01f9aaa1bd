"""Log-probabilities and entropy of rows of logits whose columns are split over tensor-parallel ranks.

With z the logits divided by the temperature, m their maximum,
s = sum_j exp(z_j - m) and w = sum_j exp(z_j - m) (z_j - m):

    log p_y = (z_y - m) - log s             d/dz_j = [j = y] - p_j
    H       = log s - w / s                 d/dz_j = -p_j (log p_j + H)

A rank reads its own columns once (`row_statistics`: m, s, w and z_y of these columns), `combine` puts the ranks
together, and `write_gradient` writes the gradient over the logits. On CUDA the first and the last are Triton kernels,
elsewhere torch on chunks of rows; the arithmetic is float32 in both.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["LOWEST", "VocabShard", "combine", "rescaled", "row_statistics", "write_gradient"]

CHUNK_BYTES = 4 * 2**20
"""Of the rows of which torch holds a float32 copy at once, so that they stay in the cache between the passes over them.
(On CUDA there is no copy.)"""
LOWEST = -1e30
"""The maximum of no columns: finite, so that differences are."""


@dataclass(frozen=True)
class VocabShard:
    """The columns of the vocabulary that a tensor-parallel rank holds.

    Attributes:
        group: the tensor-parallel group.
        columns: of this rank's logits, padding included.
        vocab_size: of the whole vocabulary, without padding.
    """

    group: dist.ProcessGroup
    columns: int
    vocab_size: int

    @property
    def first(self) -> int:
        """Id of the first column."""
        return self.group.rank() * self.columns

    @property
    def valid(self) -> int:
        """How many columns are no padding; they come first."""
        return min(max(self.vocab_size - self.first, 0), self.columns)


def row_statistics(
    logits: Tensor, labels: Tensor, shard: VocabShard, *, temperature: float, with_entropy: bool, out: Tensor
) -> None:
    """m, s, w and z_y of this rank's columns.

    Args:
        logits: `[tokens, vocab / tp]`, rows laid out one after another.
        labels: `[tokens]`, ids in the whole vocabulary.
        with_entropy: fill w too.
        out: float32 `[4, tokens]`; z_y is 0 where the label is another rank's, w where it was not asked for.
    """
    if logits.is_cuda:
        from areal_like.engines.megatron.kernels import log_probs as kernels

        kernels.row_statistics(
            logits, labels, shard.first, shard.valid, temperature=temperature, with_entropy=with_entropy, out=out
        )
        return
    out[0], out[1:] = LOWEST, 0.0
    if not shard.valid:
        return
    for part, z, local, mine in _chunks(logits, labels, shard, temperature):
        out[3, part] = z.gather(1, local)[:, 0].masked_fill(~mine, 0.0)
        out[0, part] = maximum = z.amax(dim=-1)
        z -= maximum[:, None]
        powers = z.exp()
        out[1, part] = powers.sum(dim=-1)
        if with_entropy:
            out[2, part] = powers.mul_(z).sum(dim=-1)


def combine(local: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities, log-sum-exps and entropies of whole rows, float32 `[tokens]` each, the same on every rank.

    Args:
        local: what `row_statistics` found on this rank.
    """
    maximum, total, weighted, label = local
    if group.size() > 1:
        maximum = maximum.clone()
        dist.all_reduce(maximum, op=dist.ReduceOp.MAX, group=group)
        sums = rescaled(local, maximum)
        dist.all_reduce(sums, group=group)
        total, weighted, label = sums
    log_total = total.log()
    return (label - maximum) - log_total, maximum + log_total, log_total - weighted / total


def rescaled(parts: Tensor, maximum: Tensor) -> Tensor:
    """s, w and z_y `[..., 3, tokens]` relative to another maximum, ready to be added to those of other columns.

    Args:
        parts: `[..., 4, tokens]`, as `row_statistics` gives them.
        maximum: `[tokens]`, of all columns.
    """
    shift = parts[..., 0, :] - maximum
    scale, total = shift.exp(), parts[..., 1, :]
    return torch.stack([total * scale, (parts[..., 2, :] + total * shift) * scale, parts[..., 3, :]], dim=-2)


def write_gradient(
    logits: Tensor,
    labels: Tensor,
    shard: VocabShard,
    *,
    temperature: float,
    log_z: Tensor,
    entropy: Tensor,
    grad_log_probs: Tensor | None,
    grad_entropy: Tensor | None,
) -> None:
    """Overwrite logits with the gradient of a loss with respect to them, in their dtype; 0 at padding.

    Args:
        logits, labels: as in `row_statistics`.
        log_z, entropy: what `combine` gave.
        grad_log_probs, grad_entropy: `[tokens]`, the gradient of the loss with respect to each; None for none.
    """
    if logits.is_cuda:
        from areal_like.engines.megatron.kernels import log_probs as kernels

        kernels.write_gradient(
            logits,
            labels,
            shard.first,
            shard.valid,
            temperature=temperature,
            log_z=log_z,
            entropy=entropy,
            grad_log_probs=grad_log_probs,
            grad_entropy=grad_entropy,
        )
        return
    logits[:, shard.valid :] = 0
    if not shard.valid:
        return
    for part, z, local, mine in _chunks(logits, labels, shard, temperature):
        z -= log_z[part, None]
        out = z.exp()
        if grad_entropy is not None:
            z.add_(entropy[part, None]).mul_(grad_entropy[part, None])
            out.mul_(z if grad_log_probs is None else z.add_(grad_log_probs[part, None])).neg_()
        elif grad_log_probs is not None:
            out.mul_(-grad_log_probs[part, None])
        else:
            out.zero_()
        if grad_log_probs is not None:
            out.scatter_add_(1, local, torch.where(mine, grad_log_probs[part], 0.0)[:, None])
        logits[part, : shard.valid] = out if temperature == 1.0 else out.div_(temperature)


def _chunks(
    logits: Tensor, labels: Tensor, shard: VocabShard, temperature: float
) -> Iterator[tuple[slice, Tensor, Tensor, Tensor]]:
    """Rows, their z in float32 (a copy), the columns of their labels `[rows, 1]`, and whether these are this rank's."""
    rows = max(1, CHUNK_BYTES // (4 * shard.valid))
    for start in range(0, logits.shape[0], rows):
        part = slice(start, start + rows)
        z = logits[part, : shard.valid].to(torch.float32, copy=True)
        if temperature != 1.0:
            z /= temperature
        local = labels[part] - shard.first
        mine = (local >= 0) & (local < shard.valid)
        yield part, z, local.clamp(0, shard.valid - 1)[:, None], mine
