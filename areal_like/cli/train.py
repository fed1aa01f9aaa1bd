"""`areal-like train FILE [key=value ...]`: check, then train."""

from __future__ import annotations

import argparse

from areal_like.cli.arguments import Commands

__all__ = ["add"]


def add(commands: Commands) -> None:
    command = commands.add_parser("train", help="train as a YAML file says, after the check")
    command.add_argument("config", metavar="FILE", help="YAML file")
    command.add_argument("overrides", nargs="*", metavar="key=value", help="values that replace those of the file")
    command.add_argument("--skip-check", action="append", default=[], metavar="CODE", help="start in spite of an error")
    command.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    from areal_like.trainers.launch import run as launch

    return launch(options.config, options.overrides, skip_checks=options.skip_check)
