"""Text to `Draft`: the parts of an allocation string with their places, sizes not yet read.

The Lark parser is built once a process, at the first parse.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from areal_like.alloc.diagnostics import Span
from areal_like.alloc.faults import Fault

if TYPE_CHECKING:
    from lark import Lark, Token

__all__ = ["DIM", "WHITE", "Dim", "Draft", "Part", "draft_of", "split_dim"]

WHITE = " \t\r\n\f"
GRAMMAR = Path(__file__).with_name("grammar.lark")
DIM = re.compile(r"([A-Za-z]*)[ \t\r\n\f]*([^ \t\r\n\f:()\[\]|+A-Za-z]*)")
"""Letters and size of one DIM token of the grammar."""


class Dim(NamedTuple):
    """Letters and size as written, and their columns: letters from `start`, size from `middle` to `end`."""

    letters: str
    size: str
    start: int
    middle: int
    end: int

    @property
    def span(self) -> Span:
        return Span(self.start, self.end)

    def __str__(self) -> str:
        return self.letters + self.size


class Part(NamedTuple):
    """A piece of text and where it starts."""

    text: str
    start: int

    @property
    def span(self) -> Span:
        return Span(self.start, self.start + len(self.text))


class Draft(NamedTuple):
    """An allocation string taken apart.

    Attributes:
        source: the string.
        backend, name: as written; backend is None only in a draft recovered from a broken string.
        attn: the dimensions of the flat form, or of the attention part of the folded one.
        ffn: the dimensions of the feed-forward part; None in the flat form.
        complete: False when a part could not be recovered, so that the sizes say nothing about the whole.
        stopped: the column where the grammar gave up; None for a string that it accepts.
    """

    source: str
    backend: Part | None
    name: Part | None
    attn: list[Dim]
    ffn: list[Dim] | None
    complete: bool = True
    stopped: int | None = None


def draft_of(text: str) -> tuple[Draft, list[Fault]]:
    """Take a string apart; a string of broken structure comes back as far as it can be read, with its faults."""
    from lark.exceptions import UnexpectedInput

    try:
        parts: Any = _parser().parse(text)
    except UnexpectedInput as error:
        from areal_like.alloc.recovery import recover

        column = getattr(error, "pos_in_stream", None)
        return recover(text, len(text) if column is None or column < 0 else column)
    backend, name, (attn, ffn) = parts
    return Draft(text, Part(str(backend), backend.start_pos), name, attn, ffn), []


def split_dim(text: str, start: int) -> Dim:
    """A DIM token into letters and size."""
    match = DIM.match(text)
    assert match is not None  # both groups may be empty
    return Dim(match[1], match[2], start, start + match.start(2), start + match.end())


class _Callbacks:
    """What Lark calls for each rule as it reduces: no tree is built."""

    def start(self, children: list[object]) -> tuple[object, object, object]:
        return children[0], children[1] if len(children) == 3 else None, children[-1]

    def name(self, children: list[Token]) -> Part:
        return Part(str(children[0]), children[0].start_pos or 0)

    def attn(self, children: list[Token]) -> list[Dim]:
        return [split_dim(token, token.start_pos or 0) for token in children]

    ffn = attn

    def flat(self, children: list[Token]) -> tuple[list[Dim], None]:
        return self.attn(children), None

    def folded(self, children: list[list[Dim]]) -> tuple[list[Dim], list[Dim]]:
        return children[0], children[1]


@cache
def _parser() -> Lark:
    from lark import Lark

    return Lark(GRAMMAR.read_text(encoding="utf-8"), parser="lalr", transformer=_Callbacks(), maybe_placeholders=False)
