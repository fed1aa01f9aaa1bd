"""`areal-like mesh STRING`: who is where, and with whom."""

from __future__ import annotations

import argparse

from areal_like.alloc import Mesh, ModelAllocation
from areal_like.alloc.picture import table
from areal_like.cli.arguments import Commands, add_string

__all__ = ["add"]

GROUPS = ("tp", "cp", "dp", "pp", "dp-cp", "tp-cp", "tp-pp")
EXPERT_GROUPS = ("etp", "ep", "edp", "etp-ep")
RANKS_SHOWN = 64


def add(commands: Commands) -> None:
    command = commands.add_parser("mesh", help="draw the ranks of an allocation, their coordinates and groups")
    add_string(command)
    command.add_argument("--gpus", type=int, help="GPUs to fill, for an allocation with d*")
    command.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
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
