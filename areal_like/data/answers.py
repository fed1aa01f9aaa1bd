"""Finding the answer in what a model wrote, and comparing numbers exactly."""

from __future__ import annotations

import re
from fractions import Fraction

_NUMBER = re.compile(
    r"""(?<![\w.])            # not inside a word or another number
        (?:(?<![0-9)\]])[-+])? # a sign, unless it stands behind an operand: in 3-4 it is a minus between two numbers
        (?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?
        (?:\s?/\s?[0-9]+(?![0-9.]))?   # a fraction
    """,
    re.VERBOSE,
)
_PLAIN = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:\s?/\s?\d+)?", re.ASCII)
_ANSWER_IS = re.compile(r"\banswer\b\s*(?:is|:|=)\s*:?\s*", re.IGNORECASE)
_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL | re.IGNORECASE)
_MARK = "####"


def to_number(text: str) -> Fraction | None:
    """The exact value of a plain number ("1,200", "-3.50", "$18", "+7.", "2/3"), or None for anything else."""
    plain = text.strip().replace("\N{MINUS SIGN}", "-").replace("\\$", "").replace("$", "").strip().rstrip(".")
    plain = re.sub(r"^([-+])\s+", r"\1", plain)
    if len(plain) > 64 or not re.fullmatch(
        r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:\s?/\s?\d+)?", plain, re.ASCII
    ):
        return None
    plain = plain.replace(",", "").replace(" ", "")
    top, _, bottom = plain.partition("/")
    if bottom and int(bottom) == 0:
        return None
    return Fraction(top) / (int(bottom) if bottom else 1)


def last_number(text: str) -> str | None:
    """The last number in `text` as it is written there, or None.

    A minus is a sign where an operand may begin ("-4", "= -4") and an operator behind one ("3-4", "3 - 4").
    """
    text = text.replace("\N{MINUS SIGN}", "-")
    found = list(_NUMBER.finditer(text))
    return found[-1].group() if found else None


def last_boxed(text: str) -> str | None:
    r"""The content of the last `\boxed{...}`, nested braces included, or None; an unfinished one does not count."""
    at = text.rfind("\\boxed{")
    while at >= 0:
        depth, start = 0, at + len("\\boxed")
        for i in range(start, len(text)):
            depth += {"{": 1, "}": -1}.get(text[i], 0)
            if depth == 0:
                return text[start + 1 : i].strip()
        at = text.rfind("\\boxed{", 0, at)
    return None


def marked_answer(text: str) -> str | None:
    """The part that the text itself calls its answer: the last `<answer>` tag, else the last `\\boxed`, else the line
    behind the last `####`, else the rest of the line behind the last "answer is" or "answer:"; None without any."""
    tags = _TAG.findall(text)
    if tags:
        return str(tags[-1]).strip()
    boxed = last_boxed(text)
    if boxed is not None:
        return boxed
    behind = None
    if _MARK in text:
        behind = text.rsplit(_MARK, 1)[1]
    else:
        marks = list(_ANSWER_IS.finditer(text))
        if marks:
            behind = text[marks[-1].end() :]
    if behind is None or not behind.strip():
        return None
    return behind.strip().splitlines()[0].strip()
