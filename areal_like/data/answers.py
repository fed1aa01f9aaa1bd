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
_TAG_OPEN, _TAG_CLOSE, _BOX, _MARK = "<answer>", "</answer>", "\\boxed", "####"


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
    last, open_at = None, []  # one pass: a model that writes `\boxed{` a thousand times must not cost a thousand passes
    for i, character in enumerate(text):
        if character == "{":
            open_at.append(i)
        elif character == "}" and open_at:
            start = open_at.pop()
            if text.endswith(_BOX, 0, start) and (last is None or start > last[0]):
                last = (start, i)
    return None if last is None else text[last[0] + 1 : last[1]].strip()


def last_tagged(text: str) -> str | None:
    """The content of the last `<answer>...</answer>`, or None; one that is not closed does not count."""
    close = text.rfind(_TAG_CLOSE)
    begin = text.rfind(_TAG_OPEN, 0, close) if close >= 0 else -1
    return text[begin + len(_TAG_OPEN) : close].strip() if begin >= 0 else None


def marked_answer(text: str) -> str | None:
    """The part that the text itself calls its answer: the last `<answer>` tag, else the last `\\boxed`, else the line
    behind the last `####`, else the rest of the line behind the last "answer is" or "answer:"; None without any."""
    tagged = last_tagged(text)
    if tagged is not None:
        return tagged
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
