"""Arguments that several commands take."""

from __future__ import annotations

import argparse
from typing import Any

__all__ = ["Commands", "add_string", "positive"]

Commands = Any
"""What `ArgumentParser.add_subparsers` returns; its class is private to argparse."""


def add_string(command: argparse.ArgumentParser) -> None:
    """The allocation string, as `options.text`."""
    command.add_argument("text", metavar="STRING", help="an allocation, in quotes: 'megatron:d4t2p2'")


def positive(text: str) -> int:
    """A whole number of at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value
