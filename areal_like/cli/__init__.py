"""The `areal-like` command: one module a command.

Each module has `add(commands)`, which declares its arguments, and imports what it needs only when it runs, so that the
others start at once. Exit status: 0 when all is well, 1 when what was asked for failed, 2 for input that is not usable.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence

from areal_like.alloc import DiagnosticError, to_json
from areal_like.cli import bank, check, convert, explain, mesh, parse, plan, rule, schema, train, trial

__all__ = ["main"]

COMMANDS = (check, train, parse, mesh, plan, trial, explain, convert, schema, rule, bank)
"""In the order in which `areal-like --help` lists them."""

Run = Callable[[argparse.Namespace], int]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; what is wrong with the input goes to stderr, without a traceback."""
    options = _parser().parse_args(arguments)
    run: Run = options.run
    try:
        status = run(options)
        sys.stdout.flush()
        return status
    except DiagnosticError as error:
        if getattr(options, "json", False):
            print(to_json(error.diagnostics))
        else:
            print(error, file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader went away, as in `areal-like mesh ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="areal-like", description="One string per model, from a laptop to a cluster.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.add(commands)
    return parser
