"""Reads the dimensions of a draft: every letter known, there once, with a size from 1 to 2^20."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from areal_like.alloc.backends import LETTERS
from areal_like.alloc.diagnostics import Span, clip, closest
from areal_like.alloc.faults import Edit, Fault
from areal_like.alloc.syntax import Dim

__all__ = ["LARGEST", "ReadSizes", "Size", "read_sizes"]

LARGEST = 2**20
"""The largest size, and the largest world."""

KNOWN = ", ".join(f"{letter} {meaning}" for letter, meaning in LETTERS.items())
SPELLED = {
    "dp": "d", "data": "d", "tp": "t", "tensor": "t", "mp": "t", "pp": "p", "pipe": "p", "pipeline": "p", "cp": "c",
    "context": "c", "sp": "t", "ep": "e", "expert": "e", "vp": "v", "vpp": "v", "virtual": "v", "etp": "t", "edp": "d",
}  # fmt: skip
"""What people write for a letter elsewhere."""


class Size(NamedTuple):
    """A size that was read; value None is `*`."""

    value: int | None
    dim: Dim


class ReadSizes(NamedTuple):
    """Sizes by letter; `unread` are letters whose size is faulty, `sound` says that there was no fault at all."""

    sizes: dict[str, Size]
    unread: set[str]
    sound: bool


def read_sizes(dims: Iterable[Dim], faults: list[Fault]) -> ReadSizes:
    """Sizes of one part; what is wrong is appended to `faults`."""
    before = len(faults)
    sizes: dict[str, Size] = {}
    seen: dict[str, Dim] = {}
    unread: set[str] = set()
    for dim in dims:
        letter, digits = dim.letters, dim.size
        if letter not in LETTERS:
            faults.append(_unknown_letter(dim))
            continue
        if letter in seen:
            faults.append(_repeated(seen[letter], dim))
            continue
        seen[letter] = dim
        if digits.isdigit() and digits.isascii() and digits[0] != "0" and len(digits) < 8 and int(digits) <= LARGEST:
            sizes[letter] = Size(int(digits), dim)
        elif digits == "*" and letter == "d":
            sizes[letter] = Size(None, dim)
        else:
            faults.append(_bad_size(dim))
            unread.add(letter)
    return ReadSizes(sizes, unread, len(faults) == before)


def _unknown_letter(dim: Dim) -> Fault:
    letters, size = dim.letters, dim.size
    span = Span(dim.start, dim.start + len(letters))
    if not letters:
        return _stray(dim)
    if letters not in SPELLED and len(letters) > 1 and all(letter in LETTERS for letter in letters):
        message = f"{letters[0]} has no size in {clip(str(dim))}"
        return Fault("AL011", message, Span(dim.start, dim.start + 1), "every letter is followed by its size: d4t2")
    near = SPELLED.get(letters.lower()) or closest(letters, LETTERS)
    if near is None and (word := closest(letters, SPELLED)):
        near = SPELLED[word]
    known = f"the letters are {KNOWN}"
    message = f"unknown letter {clip(letters)}" + (f" in {clip(letters + size)}" if size else "")
    if near is None:
        return Fault("AL010", message, span, known)
    return Fault("AL010", message, span, f"did you mean {near}{size}? {known}", (Edit(*span, near),))


def _stray(dim: Dim) -> Fault:
    if re.match(r"\d", dim.size):
        return Fault("AL019", f"{clip(dim.size)} has no letter before it", dim.span, "write the letter first: d4t2")
    hint = "dimensions follow one another without a separator: d4t2"
    return Fault("AL019", f"unexpected {clip(dim.size)}", dim.span, hint, (Edit(*dim.span, ""),))


def _repeated(first: Dim, again: Dim) -> Fault:
    message = f"{again.letters} is repeated: {clip(str(first))} and {clip(str(again))}"
    fixes = (Edit(*again.span, ""), Edit(*first.span, ""))
    return Fault("AL017", message, again.span, "each letter stands once; keep one of the two", fixes)


def _bad_size(dim: Dim) -> Fault:
    """Why the size of a known letter cannot be read."""
    letter, size = dim.letters, dim.size
    span, whole = Span(dim.middle, dim.end), dim.span
    written = clip(letter + size)
    if not size:
        return Fault("AL011", f"{letter} has no size", whole, f"write its size after it, for example {letter}2")
    if size == "*":
        hint = "only d can be '*' (as many replicas as the GPUs allow)"
        return Fault("AL018", f"{letter}* is not possible", whole, hint)
    if not size.isascii() and any(c.isnumeric() and not c.isascii() for c in size):
        plain = "".join(_ascii_digit(c) for c in size)
        fixes = (Edit(*span, plain),) if plain.isascii() and plain.isdigit() else ()
        return Fault(
            "AL014", f"{written} has digits that are not ASCII", span, "write sizes with the digits 0 to 9", fixes
        )
    if size.isascii() and size.isdigit():
        plain = size.lstrip("0")
        if not plain:
            hint = f"a size is at least 1; {letter}1 is the same as leaving {letter} out"
            return Fault("AL012", f"{written}: a size cannot be zero", whole, hint, (Edit(*span, "1"),))
        if len(plain) < len(size):
            hint = f"write {letter}{plain[:8]}"
            return Fault("AL013", f"{written} has a leading zero", whole, hint, (Edit(*span, plain),))
        return Fault("AL016", f"{written} is too large", whole, f"a size is at most {LARGEST} (2^20)")
    if re.fullmatch(r"[-+]?[0-9]*[.,]?[0-9]+", size):
        return Fault("AL015", f"{written}: {clip(size)} is not a whole number from 1", whole, f"for example {letter}2")
    if digits := re.match(r"[1-9][0-9]*", size):
        rest = Span(dim.middle + digits.end(), dim.end)
        hint = "dimensions follow one another without a separator: d4t2"
        return Fault(
            "AL019",
            f"unexpected {clip(size[digits.end() :])} after {letter}{clip(digits[0])[1:-1]}",
            rest,
            hint,
            (Edit(*rest, ""),),
        )
    return Fault(
        "AL015",
        f"{written}: {clip(size)} is not a size",
        whole,
        f"a size is a whole number from 1, for example {letter}2",
    )


def _ascii_digit(character: str) -> str:
    import unicodedata

    value = unicodedata.digit(character, None)
    return character if value is None else str(value)
