"""`areal-like convert --from verl FILE`: configurations of other systems, and ours in their words."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from pathlib import Path

from areal_like.alloc import Diagnostic
from areal_like.cli.arguments import Commands

__all__ = ["add"]

_EPILOG = """\
examples:
  areal-like convert --from allocation_mode 'sglang:d4+megatron:d4'
  areal-like convert --from verl run.yaml trainer.nnodes=2 > ours.yaml
  areal-like convert --from nemo-rl grpo.yaml
  areal-like convert --from megatron-lm '--tensor-model-parallel-size 4 --nnodes 2 --nproc-per-node 8'
  areal-like convert --to verl ours.yaml
"""


def add(commands: Commands) -> None:
    command = commands.add_parser(
        "convert",
        help="write a configuration in the words of another system",
        description="Reads verl's or NeMo-RL's YAML, Megatron-LM's flags, AReaL's allocation_mode or our own YAML,"
        " and writes another of them. What has no counterpart, had to be assumed or means something else is said on"
        " stderr; values that contradict each other are errors (exit status 2).",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument(
        "--from",
        dest="source",
        choices=("verl", "megatron-lm", "nemo-rl", "allocation_mode", "ours"),
        default="ours",
        help="what is read (default: ours)",
    )
    command.add_argument(
        "--to",
        dest="target",
        choices=("ours", "verl", "megatron-lm", "nemo-rl"),
        default="ours",
        help="what is written (default: ours)",
    )
    command.add_argument(
        "input",
        nargs="+",
        metavar="INPUT",
        help="a YAML file and key=value overrides of it; or flags; or an expression; `-` reads standard input",
    )
    command.add_argument("--fragment", action="store_true", help="write only keys that follow from the input")
    command.add_argument("--json", action="store_true", help="print JSON: the text and the findings")
    command.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    from areal_like.config.convert import convert, read_input

    overrides: list[str] = []
    file, beside = "<standard input>", None
    if options.source in ("megatron-lm", "allocation_mode"):
        text = sys.stdin.read() if options.input == ["-"] else " ".join(options.input)
    else:
        names = [word for word in options.input if word == "-" or "=" not in word]
        overrides = [word for word in options.input if word not in names]
        if len(names) > 1:
            print(f"areal-like convert: one file at a time, not {' and '.join(names)}", file=sys.stderr)
            return 2
        text = ""
        if names == ["-"]:
            text = sys.stdin.read()
        elif names:
            file, beside = names[0], Path(names[0]).parent
            text = read_input(file)
    found = convert(
        options.source,
        options.target,
        text,
        file=file,
        overrides=overrides,
        fragment=options.fragment,
        beside=beside,
    )
    if options.json:
        findings = [diagnostic.to_dict() for diagnostic in found.diagnostics]
        print(json.dumps({"text": found.text, "diagnostics": findings}, indent=2, ensure_ascii=False))
        return 0
    sys.stdout.write(found.text)
    sys.stdout.flush()
    for line in _lines(found.diagnostics):
        print(line, file=sys.stderr)
    return 0


def _lines(diagnostics: Iterable[Diagnostic]) -> list[str]:
    """The findings, those with one and the same reason together."""
    by_reason: dict[str, list[Diagnostic]] = {}
    for found in diagnostics:
        reason = found.message.partition(" is left out: ")[2]
        by_reason.setdefault(reason or found.message, []).append(found)
    lines = []
    for reason, group in by_reason.items():
        head = f"{group[0].severity}[{group[0].code}]: "
        if len(group) == 1:
            lines.append(head + group[0].message)
        else:
            lines.append(f"{head}left out, {len(group)} keys: {reason}")
            lines += ["    " + found.message.partition(" is left out: ")[0] for found in group]
    return lines
