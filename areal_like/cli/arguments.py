"""Arguments that several commands take."""

from __future__ import annotations

import argparse
from typing import Any

__all__ = ["Commands", "add_pipeline_layout", "add_string", "positive"]

Commands = Any
"""What `ArgumentParser.add_subparsers` returns; its class is private to argparse."""


def add_string(command: argparse.ArgumentParser) -> None:
    """The allocation string, as `options.text`."""
    command.add_argument("text", metavar="STRING", help="an allocation, in quotes: 'megatron:d4t2p2'")


def add_pipeline_layout(command: argparse.ArgumentParser) -> None:
    """`megatron.pipeline_layout`, as `options.pipeline_layout`."""
    command.add_argument(
        "--pipeline-layout",
        type=_layers,
        metavar="8,8,8,4",
        help="layers of each pipeline stage, virtual ones included (default: compute is balanced)",
    )


def _layers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.strip("[]").split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of layers: write for example 8,8,8,4") from None


def positive(text: str) -> int:
    """A whole number of at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value
