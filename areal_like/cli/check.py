"""`areal-like check FILE ... [key=value ...]`: everything that would go wrong, before anything starts."""

from __future__ import annotations

import argparse
import re
import sys
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from areal_like.cli.arguments import Commands

if TYPE_CHECKING:
    from areal_like.alloc import Diagnostic
    from areal_like.spec import ModelSpec

__all__ = ["add"]

STDIN = "<standard input>"


class _Intermixed(argparse.ArgumentParser):
    """Takes files and overrides before, between and behind options."""

    _nested = False

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        if self._nested:
            return super().parse_known_args(args, namespace)
        self._nested = True
        try:
            return self.parse_known_intermixed_args(args, namespace)
        finally:
            self._nested = False


def add(commands: Commands) -> None:
    command = commands.add_parser(
        "check",
        help="find everything that would go wrong with a configuration, without a GPU and without starting anything",
        description="Loads each file as a run does, runs every rule, and prints all findings with their place and the"
        " nearest layouts that work. Exits with 0 when nothing is found that stops a run, 1 when something is, and 2"
        " when the input cannot be read.",
    )
    command.add_argument(
        "inputs", nargs="+", metavar="FILE|key=value", help="files, globs, - for standard input; overrides"
    )
    command.add_argument("--format", choices=("text", "json", "sarif", "github"), default="text", help="default: text")
    command.add_argument("--model", metavar="NAME|FOLDER|FILE", help="numbers to take for every model of the files")
    command.add_argument("--cluster", metavar="nodes=4,gpus=8,memory=80GiB", help="instead of the section `cluster`")
    command.add_argument("--strict", action="store_true", help="warnings fail too")
    command.add_argument("--select", type=codes, default=(), metavar="AL3,AL513", help="only these codes or families")
    command.add_argument("--ignore", type=codes, default=(), metavar="AL7", help="not these codes or families")
    command.set_defaults(run=run)
    command.__class__ = _Intermixed  # subparsers are of the class of their parent


def codes(text: str) -> tuple[str, ...]:
    """A list of codes or of their beginnings."""
    found = tuple(part.strip() for part in text.split(",") if part.strip())
    for part in found:
        if not re.fullmatch(r"AL[0-9]{0,3}", part):
            raise argparse.ArgumentTypeError(f"{part!r} is no code: write AL513, or AL5 for a family")
    return found


def run(options: argparse.Namespace) -> int:
    from areal_like.preflight.files import UNREADABLE, check_file, check_text, selected
    from areal_like.spec import ModelSpecError

    overrides = [text for text in options.inputs if _is_override(text)]
    files = [file for text in options.inputs if not _is_override(text) for file in _expand(text)]
    try:
        spec = None if options.model is None else _model(options.model)
        if not files:
            raise ValueError("give a file to check, or - for standard input")
        found: dict[str, list[Diagnostic]] = {}
        for file in files:
            if file == "-":
                text = sys.stdin.buffer.read().decode("utf-8-sig", "replace")
                every = check_text(text, STDIN, overrides, spec=spec, cluster=options.cluster)
            else:
                every = check_file(file, overrides, spec=spec, cluster=options.cluster)
            found[STDIN if file == "-" else file] = selected(every, options.select, options.ignore)
    except (ValueError, ModelSpecError) as error:
        print(error, file=sys.stderr)
        return 2
    _print(found, options.format)
    everything = [d for diagnostics in found.values() for d in diagnostics]
    failing = ("error", "warning") if options.strict else ("error",)
    if any(d.code in UNREADABLE for d in everything):
        return 2
    return 1 if any(d.severity in failing for d in everything) else 0


def _is_override(text: str) -> bool:
    """`key=value` is an override, unless a file is called so."""
    from pathlib import Path

    return re.match(r"\+{0,2}[A-Za-z_][\w.\[\]]*=", text) is not None and not Path(text).exists()


def _expand(text: str) -> Iterator[str]:
    """The files of a pattern; a name without a match stays, and is reported as missing."""
    if not re.search(r"[*?\[]", text):
        yield text
        return
    from glob import glob

    yield from sorted(glob(text, recursive=True)) or [text]


def _model(text: str) -> ModelSpec:
    from areal_like.spec import ModelSpec

    return ModelSpec.find(text)


def _print(found: dict[str, list[Diagnostic]], form: str) -> None:
    from areal_like.alloc import to_github, to_json, to_sarif

    everything = [d for diagnostics in found.values() for d in diagnostics]
    if form != "text":
        text = {"json": to_json, "sarif": to_sarif, "github": to_github}[form](everything)
        if text:
            print(text)
        return
    for file, diagnostics in found.items():
        for diagnostic in diagnostics:
            print(diagnostic.render() + "\n")
        print(f"{file}: {_summary(diagnostics)}")


def _summary(diagnostics: list[Diagnostic]) -> str:
    counts = Counter(d.severity for d in diagnostics)
    parts = [
        f"{n} {name}{'s' if n > 1 and name != 'info' else ''}"
        for name in ("error", "warning", "info")
        if (n := counts[name])
    ]
    return ", ".join(parts) or "nothing found"
