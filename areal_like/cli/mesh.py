"""`areal-like mesh STRING`: who is where, and with whom."""

from __future__ import annotations

import argparse
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from areal_like.alloc import Diagnostic, DiagnosticError, ModelAllocation
from areal_like.cli.arguments import Commands, add_pipeline_layout, add_string

if TYPE_CHECKING:
    from areal_like.alloc.views import ModelParts, Nodes
    from areal_like.spec import ModelSpec

__all__ = ["add"]

FORMATS = ("text", "json", "svg", "html")


def add(commands: Commands) -> None:
    command = commands.add_parser(
        "mesh",
        help="draw the ranks of an allocation, their coordinates and groups",
        description="Draws who is with whom in every dimension, the experts' groups beside the attention's. With"
        " --build, Megatron-Core is initialised as one rank of the whole world, on this machine and without a GPU, and"
        " its groups and the rank's parameters are compared with the ones drawn here.",
    )
    add_string(command)
    command.add_argument("--gpus", type=int, help="GPUs to fill, for an allocation with d*")
    command.add_argument("--rank", type=int, metavar="N", help="the rank to look at")
    command.add_argument("--nodes", metavar="NxG", help="N nodes of G GPUs: 2x8 shows what crosses between them")
    command.add_argument("--model", metavar="NAME", help="a known name, a folder or its config.json: who holds what")
    add_pipeline_layout(command)
    command.add_argument("--format", choices=FORMATS, default="text", help="html: one file to explore (default: text)")
    command.add_argument("--output", type=Path, metavar="FILE", help="write to this file")
    command.add_argument(
        "--build", action="store_true", help="be this rank in Megatron-Core, and compare (needs torch)"
    )
    command.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    allocation = ModelAllocation.parse(options.text)
    if options.gpus is not None:
        allocation = allocation.resolve(options.gpus)
    spec = None if options.model is None else _spec(options.model)
    if options.build:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before torch: shapes need no GPU, and a GPU has other code paths
        from areal_like.engines.megatron.proof import prove

        proof = prove(allocation, rank=options.rank or 0, spec=spec, pipeline_layout=options.pipeline_layout)
        text = proof.to_json() if options.format == "json" else proof.render()
        return _write(text, options.output) or int(not proof.holds)
    from areal_like.alloc.views import MeshView, render

    view = MeshView(
        title=str(allocation),
        mesh=allocation.mesh(),
        nodes=None if options.nodes is None else _nodes(options.nodes),
        model=None if spec is None else _parts(options.model, spec, allocation, options.pipeline_layout),
        rank=options.rank,
    )
    return _write(render(view, options.format), options.output)


def _write(text: str, output: Path | None) -> int:
    if output is None:
        print(text)
        return 0
    try:
        output.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        print(f"cannot write {output}: {error.strerror}", file=sys.stderr)
        return 2
    return 0


def _nodes(text: str) -> Nodes:
    from areal_like.alloc.views import Nodes

    found = re.fullmatch(r"([1-9][0-9]{0,6})x([1-9][0-9]{0,3})", text)
    if found is None:
        raise _error(
            "AL109", f"--nodes {text!r} is not a number of nodes and of GPUs", "write 2x8 for 2 nodes of 8 GPUs"
        )
    return Nodes(int(found[1]), int(found[2]))


def _spec(name: str) -> ModelSpec:
    from areal_like.spec import ModelSpec, ModelSpecError

    try:
        return ModelSpec.find(name)
    except ModelSpecError as error:
        raise _error("AL311", str(error)) from None


def _parts(
    name: str, spec: ModelSpec, allocation: ModelAllocation, layout: tuple[int, ...] | None = None
) -> ModelParts:
    """What stages and expert groups hold, in the numbers that the views show."""
    from areal_like.alloc.views import ModelParts
    from areal_like.spec.shards import rank_layers
    from areal_like.spec.stages import layout_faults

    stages = allocation.pp * allocation.vpp
    if stages > spec.num_layers:
        message = f"the {spec.num_layers} layers of {name} cannot fill {stages} stages"
        raise _error("AL309", message, f"use p{spec.num_layers} or less")
    if spec.is_moe and spec.num_experts % allocation.ep:
        raise _error("AL308", f"the {spec.num_experts} experts of {name} do not divide by e{allocation.ep}")
    if not spec.is_moe and allocation.ep * allocation.etp > 1:
        raise _error(
            "AL307", f"{name} is dense: it has no experts for e{allocation.ep}", "leave the experts' letters out"
        )
    if layout is not None and (faults := layout_faults(spec, allocation, layout)):
        raise _error("AL316", f"--pipeline-layout {list(layout)}: {'; '.join(faults)}")
    held = (rank_layers(spec, allocation, stage, layout) for stage in range(allocation.pp))
    return ModelParts(
        name=name,
        layers=spec.num_layers,
        chunks=tuple(tuple((layers.start, len(layers)) for layers in chunks) for chunks in held),
        experts=spec.num_experts,
        dense_layers=spec.dense_layers if spec.is_moe else (),
    )


def _error(code: str, message: str, hint: str | None = None) -> DiagnosticError:
    return DiagnosticError([Diagnostic(code, "error", message, help=hint)])
