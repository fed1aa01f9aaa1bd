"""Values as a person would write them in YAML."""

from __future__ import annotations

from typing import Any

LONGEST = 60
"""Characters of a value that a message shows."""


def shown(value: Any) -> str:
    """A value as YAML writes it, printable and shortened."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    try:
        text = value if isinstance(value, str) else str(value)
    except ValueError:  # Python refuses to print whole numbers of more than 4300 digits
        return "a huge number"
    text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text[: LONGEST + 1])
    return text if len(text) <= LONGEST else text[:LONGEST] + "..."
