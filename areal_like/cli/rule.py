"""`areal-like rule [CODE]`: what a code means, why it matters, and an example."""

from __future__ import annotations

import argparse
import re
import sys

from areal_like.cli.arguments import Commands

__all__ = ["add"]

WHILE_FETCHING = {"AL39": "a model", "AL56": "a data set or a tokenizer"}
"""Families of codes that no check of a file can find."""


def add(commands: Commands) -> None:
    command = commands.add_parser("rule", help="explain a code of the check, or list all of them")
    command.add_argument("code", nargs="?", help="for example AL303; all codes when left out")
    command.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    from areal_like.alloc.diagnostics import closest
    from areal_like.preflight.pages import page, summaries

    known = summaries()
    if options.code is None:
        print("\n".join(f"{code}  {severity:<7}  {summary}" for code, (severity, summary) in known.items()))
        return 0
    code = options.code.upper()
    for family, what in WHILE_FETCHING.items():
        if re.fullmatch(family + "[0-9]", code):
            print(f"{code} (error): {what} cannot be found or read; a run says so when it fetches it")
            return 0
    if code not in known:
        near = closest(code, known)
        hint = f"did you mean {near}? " if near else ""
        print(f"there is no rule {options.code!r}: {hint}`areal-like rule` lists all", file=sys.stderr)
        return 2
    print(page(code))
    return 0
