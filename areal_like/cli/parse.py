"""`areal-like parse STRING`: the sizes of an allocation."""

from __future__ import annotations

import argparse
import json

from areal_like.alloc import ModelAllocation
from areal_like.cli.arguments import Commands, add_string

__all__ = ["add"]


def add(commands: Commands) -> None:
    command = commands.add_parser("parse", help="read an allocation string and print its sizes")
    add_string(command)
    command.add_argument("--json", action="store_true", help="print JSON; for a bad string, its diagnostics")
    command.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    allocation = ModelAllocation.parse(options.text)
    data = allocation.to_dict()
    if options.json:
        print(json.dumps(data, indent=2))
    else:
        width = max(map(len, data))
        for key, value in data.items():
            print(f"{key.ljust(width)}  {'-' if value is None else value}")
    return 0
