"""A group as bytes, and back.

    payload    tokens [int32], log-probabilities [float32 or float16], then JSON: the row, and of each member its turns
               (text, finish reason, lengths, versions as runs), failure and figures
    entry      a line of the index: key, place and lengths of the payload, its check, rewards, versions

What a turn saw is mostly what the turn before saw and drew, and the first turns of a group saw the same: of a prompt
only what follows the shared beginning is kept. There are no masks: which tokens were drawn follows from the lengths.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from areal_like.data.rows import Row
from areal_like.rollout.bank.lines import check
from areal_like.rollout.bank.values import dumps, loads, pack, unpack
from areal_like.rollout.trajectories import Rollout, RolloutGroup, TokenRollout, Turn

__all__ = ["Encoded", "Entry", "LogProbWidth", "decode", "encode", "group_name"]

type LogProbWidth = Literal["float32", "float16"]
type Encoded = tuple[Entry, bytes]
"""An entry, and the payload that it describes."""
type Tokens = NDArray[np.int32]

WIDTHS: tuple[str, ...] = get_args(LogProbWidth.__value__)
_LITTLE = {"float32": "<f4", "float16": "<f2"}


@dataclass(frozen=True)
class Entry:
    """What the index says about a group.

    Attributes:
        environment, index: the key.
        offset: of the payload, in bytes.
        tokens, log_probs: how many of each the payload has.
        width: of a log-probability.
        text: bytes of JSON at the end of the payload.
        check: of the payload.
        rewards: of the members; None for one that failed.
        versions: the oldest and the newest policy that drew a token; None when that is not known.
    """

    environment: str
    index: int
    offset: int
    tokens: int
    log_probs: int
    width: LogProbWidth
    text: int
    check: str
    rewards: tuple[float | None, ...]
    versions: tuple[int, int] | None

    @property
    def key(self) -> tuple[str, int]:
        return self.environment, self.index

    @property
    def name(self) -> str:
        return group_name(self.key)

    @property
    def size(self) -> int:
        """Of the payload, in bytes."""
        return 4 * self.tokens + np.dtype(self.width).itemsize * self.log_probs + self.text

    def at(self, offset: int) -> Entry:
        """The same payload at another place."""
        return replace(self, offset=offset)

    def to_record(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> Entry:
        versions = record["versions"]
        return cls(
            **{
                **record,
                "rewards": tuple(record["rewards"]),
                "versions": None if versions is None else (versions[0], versions[1]),
            }
        )


def group_name(key: tuple[str, int]) -> str:
    """How people call a group: `gsm8k/17`."""
    return f"{key[0]}/{key[1]}"


def encode(group: RolloutGroup, width: LogProbWidth) -> Encoded:
    """The entry (with offset 0) and the payload of a group.

    Raises:
        ValueError: it has no members, members of two kinds, or something that the bank cannot keep; all named.
    """
    name = group_name(group.key)
    if not group.members:
        raise ValueError(f"group {name} has no members")
    if len({type(member) for member in group.members}) > 1:
        raise ValueError(f"group {name} has members with tokens and members of text alone: give all of one kind")
    writer = _Writer(width)
    attempts: Sequence[TokenRollout | Rollout] = group.members
    members = [writer.member(member, f"{name}, member {i}") for i, member in enumerate(attempts)]
    tokens, log_probs = writer.arrays()
    text = dumps({"row": _row(group.row, name), "members": members})
    payload = tokens.tobytes() + log_probs.tobytes() + text
    entry = Entry(
        environment=group.environment,
        index=int(group.index),
        offset=0,
        tokens=len(tokens),
        log_probs=len(log_probs),
        width=width,
        text=len(text),
        check=check(payload),
        rewards=tuple(None if member.reward is None else float(member.reward) for member in group.members),
        versions=writer.versions,
    )
    return entry, payload


def decode(entry: Entry, payload: bytes) -> RolloutGroup:
    """The group of a payload that agrees with its check; log-probabilities as they were rounded to their width."""
    reader = _Reader(entry, payload)
    text = loads(payload[len(payload) - entry.text :])
    members = [reader.member(record, reward) for record, reward in zip(text["members"], entry.rewards, strict=True)]
    row = {**text["row"], "prompt": unpack(text["row"]["prompt"]), "metadata": unpack(text["row"]["metadata"])}
    return RolloutGroup(entry.environment, entry.index, Row(**row), members)  # type: ignore[arg-type]  # one kind


def _row(row: Row, name: str) -> dict[str, Any]:
    return {
        "prompt": pack(row.prompt, f"group {name}: row.prompt"),
        "answer": row.answer,
        "metadata": pack(dict(row.metadata), f"group {name}: row.metadata"),
        "index": row.index,
        "dataset": row.dataset,
    }


class _Shared:
    """What the prompt of a turn is likely to begin with: the same rule when writing and when reading."""

    def __init__(self) -> None:
        self._first: Tokens | None = None  # prompt of the group
        self._before: Tokens | None = None  # what the turn before saw and drew

    def begin_member(self) -> None:
        self._before = None

    def beginning(self) -> Tokens:
        known = self._before if self._before is not None else self._first
        return np.zeros(0, np.int32) if known is None else known

    def saw(self, prompt: Tokens, drawn: Tokens) -> None:
        if self._first is None:
            self._first = prompt
        self._before = np.concatenate([prompt, drawn])


class _Writer:
    """Collects the arrays of a group while its members are described."""

    def __init__(self, width: LogProbWidth) -> None:
        self._width = width
        self._shared = _Shared()
        self._tokens: list[Tokens] = []
        self._log_probs: list[NDArray[Any]] = []
        self.versions: tuple[int, int] | None = None

    def member(self, member: TokenRollout | Rollout, where: str) -> dict[str, Any]:
        figures = {str(name): float(value) for name, value in member.figures.items()}
        record: dict[str, Any] = {"failure": member.failure, "figures": figures}
        if isinstance(member, Rollout):
            return {**record, "messages": pack(list(member.messages), f"{where}: messages")}
        self._shared.begin_member()
        return {**record, "turns": [self._turn(turn, f"{where}, turn {i}") for i, turn in enumerate(member.turns)]}

    def _turn(self, turn: Turn, where: str) -> dict[str, Any]:
        for name in ("log_probs", "versions"):
            if len(getattr(turn, name)) not in (0, len(turn.token_ids)):
                raise ValueError(
                    f"{where}: {len(getattr(turn, name))} {name} for {len(turn.token_ids)} drawn tokens;"
                    " give one for each, or none"
                )
        prompt, drawn = _int32(turn.prompt_ids, f"{where}: prompt_ids"), _int32(turn.token_ids, f"{where}: token_ids")
        shared = _common(prompt, self._shared.beginning())
        self._shared.saw(prompt, drawn)
        self._tokens += [prompt[shared:], drawn]
        self._log_probs.append(_rounded(turn.log_probs, self._width))
        runs = _runs(turn.versions, f"{where}: versions")
        for version, _ in runs:
            oldest, newest = self.versions or (version, version)
            self.versions = min(oldest, version), max(newest, version)
        return {
            "shared": shared,
            "prompt": len(prompt) - shared,
            "drawn": len(drawn),
            "log_probs": len(turn.log_probs),
            "versions": runs,
            "finish_reason": turn.finish_reason,
            "text": turn.text,
        }

    def arrays(self) -> tuple[NDArray[Any], NDArray[Any]]:
        """All tokens and all log-probabilities, as they are written: least significant byte first."""
        return (
            np.concatenate([np.zeros(0, np.int32), *self._tokens]).astype("<i4"),
            np.concatenate([np.zeros(0, self._width), *self._log_probs]).astype(_LITTLE[self._width]),
        )


class _Reader:
    """Gives the arrays of a group back, piece by piece."""

    def __init__(self, entry: Entry, payload: bytes) -> None:
        self._shared = _Shared()
        self._tokens = np.frombuffer(payload, "<i4", entry.tokens)
        self._log_probs = np.frombuffer(payload, _LITTLE[entry.width], entry.log_probs, 4 * entry.tokens)

    def member(self, record: dict[str, Any], reward: float | None) -> TokenRollout | Rollout:
        if "messages" in record:
            return Rollout(unpack(record["messages"]), reward, record["failure"], record["figures"])
        self._shared.begin_member()
        turns = [self._turn(turn) for turn in record["turns"]]
        return TokenRollout(turns, reward, record["failure"], record["figures"])

    def _turn(self, record: dict[str, Any]) -> Turn:
        rest, self._tokens = _split(self._tokens, record["prompt"])
        drawn, self._tokens = _split(self._tokens, record["drawn"])
        log_probs, self._log_probs = _split(self._log_probs, record["log_probs"])
        prompt = np.concatenate([self._shared.beginning()[: record["shared"]], rest])
        self._shared.saw(prompt, drawn)
        versions = list(chain.from_iterable([version] * count for version, count in record["versions"]))
        return Turn(
            prompt.tolist(), drawn.tolist(), log_probs.tolist(), versions, record["finish_reason"], record["text"]
        )


def _split(values: NDArray[Any], count: int) -> tuple[NDArray[Any], NDArray[Any]]:
    return values[:count], values[count:]


def _int32(ids: Sequence[int], where: str) -> Tokens:
    """Token ids as int32. ValueError when they are something else, or do not fit."""
    try:
        return np.frombuffer(array("i", ids), np.intc).astype(np.int32, copy=False)  # faster than numpy on a list
    except (TypeError, OverflowError):
        raise ValueError(f"{where} are no list of whole numbers of 32 bits") from None


def _runs(versions: Sequence[int], where: str) -> list[list[int]]:
    """[version, tokens] of each run of equal versions."""
    try:
        found = np.frombuffer(array("q", versions), np.int64)
    except (TypeError, OverflowError):
        raise ValueError(f"{where} are no list of whole numbers") from None
    if not found.size:
        return []
    starts = np.concatenate([[0], np.flatnonzero(np.diff(found)) + 1])
    return [list(run) for run in zip(found[starts].tolist(), np.diff([*starts, len(found)]).tolist(), strict=True)]


def _rounded(values: Sequence[float], width: LogProbWidth) -> NDArray[Any]:
    """Log-probabilities at their width. What is finite stays finite: -70,000 is the lowest float16, not -inf."""
    found = np.frombuffer(array("d", values), np.float64)
    limits = np.finfo(np.dtype(width))
    return np.where(np.isfinite(found), found.clip(float(limits.min), float(limits.max)), found).astype(width)


def _common(prompt: Tokens, beginning: Tokens) -> int:
    """How many tokens two sequences have in common at their beginning."""
    length = min(len(prompt), len(beginning))
    different = np.flatnonzero(prompt[:length] != beginning[:length])
    return int(different[0]) if different.size else length
