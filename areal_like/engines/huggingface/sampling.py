"""From logits to one token a sequence, each by its own parameters and its own draws."""

from __future__ import annotations

import collections
from collections.abc import Sequence as Rows

import torch
from torch import Tensor
from transformers import TopKLogitsWarper, TopPLogitsWarper

from areal_like.engines.huggingface.sequences import Sequence


def sample(logits: Tensor, rows: Rows[Sequence]) -> tuple[list[int], list[float]]:
    """Draw the next token of each row.

    Args:
        logits: `[rows, vocab]`.
        rows: whose parameters and draws count.

    Returns:
        Token ids, and the log-probability of each under softmax(logits / temperature), float32, before end tokens are
        held back (`min_new_tokens`) and before top-k and top-p. Of a row at temperature 0: at temperature 1.

    Raises:
        FloatingPointError: logits that are not finite.
    """
    temperatures = torch.tensor([row.temperature for row in rows], device=logits.device)
    scaled = logits.float() / temperatures[:, None]
    normaliser = scaled.logsumexp(-1)
    if not bool(normaliser.isfinite().all()):
        raise FloatingPointError("the model's logits are not finite: its weights hold NaN or infinity")
    allowed = _truncate(_hold_back_ends(scaled, rows), rows)
    tokens = allowed.argmax(-1)
    drawn = [i for i, row in enumerate(rows) if not row.greedy]
    if drawn:
        uniform = torch.tensor([rows[i].draw() for i in drawn], dtype=torch.float64, device=logits.device)
        tokens[drawn] = _invert(allowed if len(drawn) == len(rows) else allowed[drawn], uniform)
    log_probs = scaled.gather(-1, tokens[:, None])[:, 0] - normaliser
    return tokens.tolist(), log_probs.tolist()


def _hold_back_ends(scaled: Tensor, rows: Rows[Sequence]) -> Tensor:
    held = [(i, token) for i, row in enumerate(rows) if not row.may_end for token in row.end_ids]
    if not held:
        return scaled
    scaled = scaled.clone()
    scaled[[i for i, _ in held], [token for _, token in held]] = -torch.inf
    return scaled


def _truncate(scaled: Tensor, rows: Rows[Sequence]) -> Tensor:
    """Transformers' top-k, then top-p, on the rows that want them; rows of equal parameters go together."""
    wanted: dict[tuple[int, float], list[int]] = collections.defaultdict(list)
    for i, row in enumerate(rows):
        limits = (min(row.sampling.top_k, scaled.shape[-1]), row.sampling.top_p)
        if limits != (0, 1.0) and not row.greedy:
            wanted[limits].append(i)
    if not wanted:
        return scaled
    scaled = scaled.clone()
    for (top_k, top_p), members in wanted.items():
        part = scaled[members]
        if top_k:
            part = TopKLogitsWarper(top_k)(None, part)
        if top_p < 1:
            part = TopPLogitsWarper(top_p)(None, part)
        scaled[members] = part
    return scaled


def _invert(scores: Tensor, uniform: Tensor) -> Tensor:
    """Draw by inverting the cumulative distribution: one number a row decides, whatever stands in the other rows.

    float64, because the sums over a vocabulary would lose unlikely tokens in float32.
    """
    weights = (scores - scores.amax(-1, keepdim=True)).exp()
    cumulative = weights.cumsum(-1, dtype=torch.float64)
    total = cumulative[:, -1]
    target = torch.minimum(uniform * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, target[:, None], right=True)[:, 0]
