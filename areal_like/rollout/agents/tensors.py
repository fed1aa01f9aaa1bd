"""AReaL's trajectory, a dict of tensors of shape [1, tokens], as turns."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from areal_like.rollout.trajectories import TokenRollout, Turn

__all__ = ["from_tensors"]

NEEDED = ("input_ids", "loss_mask", "logprobs", "versions", "rewards")
KNOWN = (*NEEDED, "attention_mask", "turn_ids")


def from_tensors(trajectory: Mapping[str, Any], recorded: Sequence[Turn], figures: dict[str, float]) -> TokenRollout:
    """The turns of a trajectory: each stretch of tokens with loss mask 1 is what one call of the model drew, and all
    before it is what the model saw.

    Args:
        trajectory: `input_ids`, `loss_mask`, `logprobs`, `versions` [1, tokens], aligned with the tokens that they are
            about; `rewards` [1] or []; `attention_mask` [1, tokens] is 0 at padding; `turn_ids` [1, tokens] tells
            stretches apart that touch.
        recorded: calls of the model in the episode. They tell why the model stopped and what it said; a stretch that is
            none of them, put together by the workflow, counts as ended.
        figures: of the episode.

    Raises:
        ValueError: something is missing, of another shape, or not known here; the message names it.
    """
    if missing := [name for name in NEEDED if trajectory.get(name) is None]:
        raise ValueError(
            f"the trajectory lacks {' and '.join(missing)}: a dict of tensors has {', '.join(NEEDED)}, [1, tokens] each"
        )
    if unknown := sorted(str(name) for name in trajectory.keys() - set(KNOWN)):
        raise ValueError(f"the trajectory has {', '.join(unknown)}, which nothing here would read: leave it out")
    columns = {name: _row(name, value) for name, value in trajectory.items() if name != "rewards" and value is not None}
    lengths = {name: len(column) for name, column in columns.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"the columns of the trajectory have different lengths: {lengths}")
    if "attention_mask" in columns:
        kept = [bool(attended) for attended in columns["attention_mask"]]
        columns = {name: [v for v, k in zip(column, kept, strict=True) if k] for name, column in columns.items()}
    ids = [int(i) for i in columns["input_ids"]]
    turns = [_turn(ids, columns, start, end, recorded) for start, end in _stretches(columns)]
    if not turns:
        raise ValueError("the trajectory has no token with loss mask 1: nothing was drawn")
    return TokenRollout(turns, _reward(trajectory["rewards"]), figures=figures)


def _turn(ids: list[int], columns: Mapping[str, list[Any]], start: int, end: int, recorded: Sequence[Turn]) -> Turn:
    if start == 0:
        raise ValueError("the first token of the trajectory has loss mask 1: it follows no prompt")
    versions = [int(version) for version in columns["versions"][start:end]]
    if min(versions) < 0:
        raise ValueError("a drawn token has version -1: each has the version of the policy that drew it")
    log_probs = [float(log_prob) for log_prob in columns["logprobs"][start:end]]
    if not all(math.isfinite(log_prob) and log_prob <= 0 for log_prob in log_probs):
        raise ValueError("a drawn token has a log-probability that is positive or not finite")
    drawn = ids[start:end]
    call = next((turn for turn in recorded if turn.token_ids == drawn), None)
    finish_reason, text = (call.finish_reason, call.text) if call is not None else ("stop", "")
    return Turn(ids[:start], drawn, log_probs, versions, finish_reason, text)


def _stretches(columns: Mapping[str, list[Any]]) -> Iterator[tuple[int, int]]:
    """Begin and end of each run of loss mask 1 within one turn."""
    mask = [bool(value) for value in columns["loss_mask"]]
    turns = columns.get("turn_ids", [0] * len(mask))
    start = None
    for i, drawn in enumerate(mask):
        if start is not None and (not drawn or turns[i] != turns[i - 1]):
            yield start, i
            start = None
        if drawn and start is None:
            start = i
    if start is not None:
        yield start, len(mask)


def _row(name: str, value: Any) -> list[Any]:
    """The one row of a [1, tokens] tensor."""
    listed = value.tolist() if hasattr(value, "tolist") else value
    if not isinstance(listed, list) or len(listed) != 1 or not isinstance(listed[0], list):
        shape = tuple(value.shape) if hasattr(value, "shape") else type(value).__name__
        raise ValueError(f"{name} of the trajectory is {shape}; one episode is one sequence, of shape [1, tokens]")
    return listed[0]


def _reward(value: Any) -> float:
    listed = value.tolist() if hasattr(value, "tolist") else value
    while isinstance(listed, list) and len(listed) == 1:
        listed = listed[0]
    if isinstance(listed, list | bool) or not math.isfinite(listed):
        raise ValueError(f"rewards of the trajectory is {listed}; an episode has one finite reward")
    return float(listed)
