"""The `areal-like` command. Each command imports what it needs when it runs, so that the others start at once.

Exit status: 0 when all is well, 1 when what was asked for failed, 2 for input that cannot be used.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence

from areal_like.alloc import DiagnosticError, Mesh, ModelAllocation, get_backend, to_json
from areal_like.alloc.picture import table

__all__ = ["main"]

GROUPS = ("tp", "cp", "dp", "pp", "dp-cp", "tp-cp", "tp-pp")
EXPERT_GROUPS = ("etp", "ep", "edp", "etp-ep")
RANKS_SHOWN = 64

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
    text = {"metavar": "STRING", "help": "an allocation, in quotes: 'megatron:d4t2p2'"}

    parse = commands.add_parser("parse", help="read an allocation string and print its sizes")
    parse.add_argument("text", **text)  # type: ignore[arg-type]
    parse.add_argument("--json", action="store_true", help="print JSON; for a bad string, its diagnostics")
    parse.set_defaults(run=_parse)

    mesh = commands.add_parser("mesh", help="draw the ranks of an allocation, their coordinates and groups")
    mesh.add_argument("text", **text)  # type: ignore[arg-type]
    mesh.add_argument("--gpus", type=int, help="GPUs to fill, for an allocation with d*")
    mesh.set_defaults(run=_mesh)

    trial = commands.add_parser(
        "try",
        help="train a model under a layout for real and compare it with Transformers",
        description="Starts the ranks, trains the model under the layout beside Transformers and torch Adam on the same"
        " batches, and compares logits, loss, gradient norm and weights.",
    )
    trial.add_argument("text", **text)  # type: ignore[arg-type]
    trial.add_argument(
        "--model", type=_model, default="tiny-dense", help="tiny-dense, tiny-moe or a Hugging Face folder"
    )
    trial.add_argument("--bridge", default="mbridge", help="what converts the weights (default: mbridge)")
    trial.add_argument("--dtype", default="float32", help="floating-point type to train in (default: float32)")
    trial.add_argument("--steps", type=_positive, default=3, help="optimizer steps (default: 3)")
    trial.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    trial.add_argument("--json", action="store_true", help="print JSON")
    trial.set_defaults(run=_try)
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def _model(text: str) -> str:
    if text not in ("tiny-dense", "tiny-moe") and not os.path.isdir(text):
        raise argparse.ArgumentTypeError(f"{text!r} is neither tiny-dense nor tiny-moe nor a folder")
    return text


def _parse(options: argparse.Namespace) -> int:
    allocation = ModelAllocation.parse(options.text)
    data = allocation.to_dict()
    if options.json:
        print(json.dumps(data, indent=2))
    else:
        width = max(map(len, data))
        for key, value in data.items():
            print(f"{key.ljust(width)}  {'-' if value is None else value}")
    return 0


def _mesh(options: argparse.Namespace) -> int:
    allocation = ModelAllocation.parse(options.text)
    if options.gpus is not None:
        allocation = allocation.resolve(options.gpus)
    mesh = allocation.mesh()
    print(f"{allocation}: {mesh.world_size} rank{'s' * (mesh.world_size > 1)}\n\n{mesh.render(RANKS_SHOWN)}\n")
    ranks = range(min(mesh.world_size, RANKS_SHOWN))
    dims = ("tp", "cp", "dp", "pp", "etp", "ep", "edp")
    rows = [[rank, *(getattr(mesh.coordinates(rank), dim) for dim in dims)] for rank in ranks]
    print("\n".join(table(["rank", *dims], rows)))
    if mesh.world_size > RANKS_SHOWN:
        print(f"... and {mesh.world_size - RANKS_SHOWN} more ranks")
    print()
    names = GROUPS + (EXPERT_GROUPS if mesh.ep * mesh.etp > 1 else ())
    for name in names:
        if all(mesh.size(dim) > 1 for dim in name.split("-")):
            print(f"{name:>6}  {_groups(mesh, name)}")
    return 0


def _groups(mesh: Mesh, name: str) -> str:
    """The first groups of this name, as many as have RANKS_SHOWN ranks together."""
    size = mesh.size(name)
    count = mesh.world_size // size
    shown = []
    for group, _ in zip(mesh.groups(name), range(max(1, RANKS_SHOWN // size)), strict=False):
        members = " ".join(map(str, group[:RANKS_SHOWN]))
        shown.append(f"[{members}{' ...' if size > RANKS_SHOWN else ''}]")
    more = f" ... and {count - len(shown)} more" if count > len(shown) else ""
    return " ".join(shown) + more


def _try(options: argparse.Namespace) -> int:
    """Everything that can be refused is refused before torch is imported."""
    allocation = ModelAllocation.parse(options.text)
    backend = get_backend(allocation.backend)
    backend.require_role("train", source=options.text)
    if not backend.engine:
        backend.load_engine()  # says that there is none
    _ = allocation.world_size  # says that d is '*'
    from areal_like.trainers.trial import run_trial

    report = run_trial(
        options.text,
        model=options.model,
        bridge=options.bridge,
        dtype=options.dtype,
        steps=options.steps,
        device=options.device,
    )
    print(json.dumps(report.to_dict(), indent=2) if options.json else report.render())
    return 0 if report.passed else 1


if __name__ == "__main__":
    sys.exit(main())
