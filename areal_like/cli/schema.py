"""`areal-like schema`: the JSON Schema of the YAML, for editors."""

from __future__ import annotations

import argparse
import json

from areal_like.cli.arguments import Commands

__all__ = ["add"]


def add(commands: Commands) -> None:
    command = commands.add_parser(
        "schema",
        help="print the JSON Schema of the YAML, for editors",
        description="JSON Schema (draft 2020-12) of a run's YAML with the meaning, default, choices and bounds of every"
        " key. With the language server of YAML, write it to a file and name that in the first line of the YAML:"
        " # yaml-language-server: $schema=areal-like.schema.json",
    )
    command.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    from areal_like.config.schema import schema

    print(json.dumps(schema(), indent=2, ensure_ascii=False))
    return 0
