"""`areal-like plan`: the best layouts of a model on some GPUs."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING, Any

from areal_like.cli.arguments import Commands, positive

if TYPE_CHECKING:
    from areal_like.preflight.hardware import Hardware
    from areal_like.preflight.planner import Plan, Request

__all__ = ["add"]

GIB = 2**30
DESCRIPTION = """\
Tries every layout of the model on the GPUs, drops what breaks a rule or does not fit, and ranks the rest by a cost
model of one step: compute, pipeline bubble, collectives over the links, optimizer. No GPU is needed.
"""


def add(commands: Commands) -> None:
    command = commands.add_parser(
        "plan", help="find the best layouts of a model on a number of GPUs", description=DESCRIPTION
    )
    job = command.add_argument_group("the job")
    job.add_argument("--model", required=True, help="a well-known model's name, a Hugging Face folder or config.json")
    job.add_argument("--gpus", required=True, type=positive, help="GPUs of the whole job")
    job.add_argument("--seq", required=True, type=positive, help="tokens of the longest sequence, prompt and answer")
    job.add_argument("--batch", required=True, type=positive, help="sequences of one optimizer update")
    job.add_argument("--micro-tokens", type=positive, help="tokens of a micro-batch (default: several are tried)")
    job.add_argument("--backend", default="megatron", help="the trainer's backend (default: megatron)")
    job.add_argument("--rollout", metavar="BACKEND", help="share the GPUs with this rollout engine: sglang, vllm, ...")
    job.add_argument(
        "--forward-passes",
        type=int,
        choices=range(5),
        default=0,
        help="passes besides the update: 1 for recompute_logprob, one more for a reference (default: 0)",
    )
    job.add_argument(
        "--engine",
        choices=("this", "any"),
        default="this",
        help="this: what this version's engines can do; any: every architecture (default: this)",
    )
    machine = command.add_argument_group("the machines")
    machine.add_argument("--gpu", default="H100", help="A100, H100, H200 or B200 (default: H100)")
    machine.add_argument("--gpu-memory", metavar="SIZE", help="of one GPU, as 80GiB (default: that of --gpu)")
    machine.add_argument("--gpus-per-node", type=positive, default=8, help="GPUs of a node (default: 8)")
    machine.add_argument("--tflops", type=_number, help="dense bf16 peak of a GPU in TFLOP/s")
    machine.add_argument("--nvlink", type=_number, metavar="GB/s", help="a GPU sends to its node, one direction")
    machine.add_argument("--network", type=_number, metavar="GB/s", help="a GPU sends to other nodes, one direction")
    output = command.add_argument_group("output").add_mutually_exclusive_group()
    output.add_argument("--yaml", action="store_true", help="print the best plan as YAML to paste")
    output.add_argument("--json", action="store_true", help="print JSON")
    command.add_argument("--top", type=positive, default=10, help="layouts to print (default: 10)")
    command.set_defaults(run=run)


def _number(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError("must be positive")
    return value


def run(options: argparse.Namespace) -> int:
    from areal_like.preflight.hardware import HardwareError
    from areal_like.preflight.planner import ENGINE_CODES, NoPlanError, Request, plan
    from areal_like.spec import ModelSpec, ModelSpecError

    try:
        hardware = _hardware(options)
        spec = ModelSpec.find(options.model)
        request = Request(
            spec=spec,
            gpus=options.gpus,
            hardware=hardware,
            sequences=options.batch,
            sequence_length=options.seq,
            micro_tokens=options.micro_tokens,
            forward_passes=options.forward_passes,
            backend=options.backend,
            any_engine=options.engine == "any",
            rollout=options.rollout,
        )
    except (HardwareError, ModelSpecError, ValueError) as error:
        print(f"areal-like plan: {error}", file=sys.stderr)
        return 2
    try:
        plans = plan(request, top=options.top)
    except NoPlanError as error:
        print(f"areal-like plan: {error}", file=sys.stderr)
        if error.codes & ENGINE_CODES:
            print("  = help: --engine any plans for an engine that can", file=sys.stderr)
        return 1
    model = spec.published_name or options.model
    if options.json:
        print(json.dumps([_to_dict(p) for p in plans], indent=2))
    elif options.yaml:
        print(_yaml(plans[0], request, model), end="")
    else:
        print(_text(plans, request, model))
    return 0


def _hardware(options: argparse.Namespace) -> Hardware:
    from areal_like.preflight.hardware import Hardware, parse_memory

    return Hardware.find(options.gpu).override(
        memory=None if options.gpu_memory is None else parse_memory(options.gpu_memory),
        flops=None if options.tflops is None else options.tflops * 1e12,
        node_bandwidth=None if options.nvlink is None else options.nvlink * 1e9,
        network_bandwidth=None if options.network is None else options.network * 1e9,
        gpus_per_node=options.gpus_per_node,
    )


def _to_dict(plan: Plan) -> dict[str, Any]:
    """One plan as plain data; seconds and GiB."""
    rollout = plan.rollout
    return {
        "backend": str(plan.allocation),
        "rollout": None if rollout is None else str(rollout.allocation),
        "seconds": plan.seconds,
        "training_seconds": plan.cost.seconds,
        "rollout_seconds": None if rollout is None else rollout.cost.seconds,
        "share": plan.cost.shares,
        "tflops": plan.cost.flops_per_second / 1e12,
        "micro_tokens": plan.job.micro_tokens,
        "micro_batches": plan.cost.micro_batches,
        "recompute": plan.job.recompute,
        "peak_gib": plan.peak / GIB,
        "headroom_gib": plan.headroom / GIB,
    }


def _yaml(plan: Plan, request: Request, model: str) -> str:
    import yaml

    node = request.hardware.gpus_per_node
    actor: dict[str, Any] = {"backend": str(plan.allocation), "path": model}
    actor["gradient_checkpointing"] = plan.job.recompute
    actor["mb_spec"] = {"max_tokens_per_mb": plan.job.micro_tokens}
    block: dict[str, Any] = {"cluster": {"n_gpus_per_node": min(node, request.gpus)}, "actor": actor}
    if plan.rollout is not None:
        block["rollout"] = {"backend": str(plan.rollout.allocation)}
    nodes = -(-request.gpus // node)
    head = (
        f"# {request.gpus} {request.hardware.name} on {nodes} node{'s' * (nodes > 1)}: a step of {plan.seconds:.3g} s,"
        f" {plan.peak / GIB:.1f} of {plan.memory / GIB:.1f} GiB\n"
    )
    if nodes > 1:  # a value other than 1 does not load in this version
        head += f"# cluster.n_nodes is {nodes}: this version starts processes on one machine only\n"
    return head + yaml.safe_dump(block, sort_keys=False)


def _text(plans: list[Plan], request: Request, model: str) -> str:
    from areal_like.alloc.picture import table

    causes = [cause for cause in plans[0].cost.causes if any(p.cost.causes[cause] > 0 for p in plans)]
    rollout = ["rollout", "rollout s", "training s"] if request.rollout else ["step s"]
    header = ["", "backend", *rollout, "TFLOP/s", *(f"{c} %" for c in causes)]
    header += ["peak GiB", "free GiB", "micro tokens", "recompute"]
    rows = []
    for rank, p in enumerate(plans, start=1):
        generation = [p.rollout.allocation, f"{p.rollout.cost.seconds:.4g}"] if p.rollout else []
        shares = p.cost.shares
        rows.append(
            [
                rank,
                p.allocation,
                *generation,
                f"{p.cost.seconds:.4g}",
                f"{p.cost.flops_per_second / 1e12:.0f}",
                *(f"{100 * shares[cause]:.1f}" for cause in causes),
                f"{p.peak / GIB:.1f}",
                f"{p.headroom / GIB:.1f}",
                p.job.micro_tokens,
                "full" if p.job.recompute else "no",
            ]
        )
    hardware = request.hardware
    title = (
        f"{model} on {request.gpus} {hardware.name} ({hardware.memory / GIB:.1f} GiB,"
        f" {hardware.gpus_per_node} a node): {request.sequences} sequences of {request.sequence_length} tokens"
    )
    return "\n".join([title, "", *table(header, rows)])
