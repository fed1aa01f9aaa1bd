"""Writes the reference of the rules: `python -m areal_like.preflight.docs > docs/rules.md`."""

from __future__ import annotations

import sys
from itertools import groupby

from areal_like.preflight.examples import BASE_JOB
from areal_like.preflight.pages import examples_of, said, shown, summaries, why

FAMILIES = {
    "AL0": "what is written in an allocation string",
    "AL1": "the sizes of an allocation together",
    "AL2": "what the backend and its engine can do",
    "AL3": "the layout and the numbers of the model",
    "AL4": "the roles and the machines",
    "AL5": "batches, sequences, lag, precision",
    "AL6": "memory",
    "AL7": "advice",
    "AL8": "keys of the file",
}
_HEAD = """\
# Rules

<!-- Written by `python -m areal_like.preflight.docs > docs/rules.md`; edit the rules instead. -->

What [`areal-like check`](check.md) looks for. `areal-like rule CODE` prints one of these pages. Codes of a family begin
alike, so `--select AL3` and `# areal-like: ignore AL7` name all of them. Of errors, AL212, AL301, AL302, AL811
and AL815 say what this version cannot do; the others say what cannot be done.

Each example changes this job, about which no rule has anything to say:

```text
{job}```

`{{examples}}` in an example is a folder with runs that were interrupted.

Codes AL39 and AL56 stand for models and data that cannot be fetched or read; they are found when a run fetches them.
"""


def markdown() -> str:
    """The whole page."""
    known = summaries()
    parts = [_HEAD.format(job=BASE_JOB)]
    for family, codes in groupby(known, key=lambda code: code[:3]):
        listed = list(codes)
        parts.append(f"## {family}: {FAMILIES[family]}\n")
        rows = "\n".join(
            f"| {code} | {known[code][0]} | {known[code][1].replace('|', chr(92) + '|')} |" for code in listed
        )
        parts.append(f"| code | severity | finding |\n|------|----------|---------|\n{rows}\n")
        parts += [_section(code, *known[code]) for code in listed if examples_of(code) is not None]
    return "\n".join(parts)


def _section(code: str, severity: str, summary: str) -> str:
    examples = examples_of(code)
    assert examples is not None
    bad, good = examples
    text = f"### {code}\n\n**{summary}** ({severity}). {why(code)}\n\nBad: {_code(shown(bad))}\n\n"
    return text + f"```text\n{said(code, bad)}\n```\n\nGood: {_code(shown(good))}\n"


def _code(text: str) -> str:
    return text if text == "the job as it is" else f"`{text}`"


if __name__ == "__main__":
    sys.stdout.write(markdown())
