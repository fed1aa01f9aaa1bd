"""`areal-like explain STRING --model ...`: memory of every rank in every phase, before anything starts."""

from __future__ import annotations

import argparse
import json
import re
import sys

from areal_like.alloc import ModelAllocation
from areal_like.cli.arguments import Commands, add_pipeline_layout, add_string, positive

__all__ = ["add"]

UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def add(commands: Commands) -> None:
    command = commands.add_parser("explain", help="predict the memory of every rank in every phase")
    add_string(command)
    command.add_argument("--model", required=True, help="name of a known model, folder, or config.json")
    command.add_argument("--gpus", type=positive, help="GPUs to fill, for an allocation with d*")
    command.add_argument("--seq", type=positive, default=4096, help="tokens of the longest sequence (4096)")
    command.add_argument("--micro-tokens", type=positive, help="most tokens of a micro-batch (as --seq)")
    command.add_argument("--micro-batches", type=positive, default=4, help="micro-batches of a step on each rank (4)")
    command.add_argument("--gpu-memory", type=memory, default="80GiB", help="of one GPU (80GiB)")
    command.add_argument("--gpus-per-node", type=positive, default=8, help="for the memory of the host (8)")
    command.add_argument("--rollout", metavar="STRING", help="allocation of the rollout engine, on GPUs of its own")
    command.add_argument("--colocated", action="store_true", help="the rollout engine is on the trainer's GPUs")
    command.add_argument("--rollout-sequences", type=positive, default=256, help="generated at once by a replica (256)")
    command.add_argument("--recompute", choices=("none", "selective", "full"), default="none")
    command.add_argument("--recompute-method", choices=("uniform", "block"), default="uniform")
    command.add_argument("--recompute-layers", type=positive, default=1, help="of a recomputed group or block (1)")
    command.add_argument("--recompute-modules", default="core_attn", metavar="PARTS", help="of selective (core_attn)")
    command.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    command.add_argument("--lora-rank", type=positive, help="train adapters of this rank, and not the model")
    command.add_argument("--lora-targets", default="all-linear", metavar="NAMES", help="matrices with one (all-linear)")
    command.add_argument(
        "--fp8", choices=("delayed", "tensorwise", "blockwise", "mxfp8"), help="recipe of FP8 products"
    )
    command.add_argument("--fp8-param", action="store_true", help="the weights themselves are FP8")
    command.add_argument("--optimizer", choices=("adam", "sgd", "none"), default="adam")
    add_pipeline_layout(command)
    command.add_argument(
        "--offload",
        nargs="?",
        const="parameters,gradients,optimizer",
        default="",
        metavar="PARTS",
        help="what waits outside the GPU while it is not needed: parameters,gradients,optimizer (all three)",
    )
    command.add_argument("--json", action="store_true", help="print JSON, in bytes")
    command.set_defaults(run=run)


def memory(text: str) -> int:
    """Bytes of a text such as 80GiB."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text)
    unit = UNITS.get(match[2].upper()) if match else None
    if match is None or unit is None or float(match[1]) <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no amount of memory; write for example 80GiB")
    return int(float(match[1]) * unit)


def run(options: argparse.Namespace) -> int:
    """0 when it fits, 1 when it does not or the model cannot be cut this way, 2 for input that cannot be read."""
    from areal_like.preflight import check_layout
    from areal_like.spec import ModelSpec, ModelSpecError
    from areal_like.spec.memory import PARTS, LoRA, MemoryJob, predict

    allocation = _allocation(options.text, options.gpus)
    rollout = None if options.rollout is None else _allocation(options.rollout, options.gpus)
    if options.colocated and rollout is None:
        print("--colocated says where the rollout engine is: give --rollout too", file=sys.stderr)
        return 2
    offload = frozenset(part for part in options.offload.split(",") if part)
    if unknown := offload - set(PARTS):
        print(f"--offload knows {', '.join(PARTS)}; not {', '.join(sorted(unknown))}", file=sys.stderr)
        return 2
    try:
        spec = ModelSpec.find(options.model)
    except ModelSpecError as error:
        print(error, file=sys.stderr)
        return 2
    problems = check_layout(allocation, spec)
    if any(p.code in ("AL303", "AL304", "AL305", "AL306", "AL307", "AL308", "AL309") for p in problems):
        print("\n".join(p.render() for p in problems), file=sys.stderr)
        return 1
    lora = None
    if options.lora_rank is not None:
        lora = LoRA(options.lora_rank, tuple(options.lora_targets.split(",")), options.dtype)
    job = MemoryJob(
        micro_tokens=options.micro_tokens or options.seq,
        seq=options.seq,
        micro_batches=options.micro_batches,
        dtype=options.dtype,
        recompute=options.recompute,
        recompute_method=options.recompute_method,
        recompute_layers=options.recompute_layers,
        recompute_modules=tuple(options.recompute_modules.split(",")),
        lora=lora,
        fp8=options.fp8,
        fp8_param=options.fp8_param,
        optimizer=None if options.optimizer == "none" else options.optimizer,
        offload=offload,
        rollout=rollout,
        colocated=options.colocated,
        rollout_sequences=options.rollout_sequences,
        gpu_memory=options.gpu_memory,
        gpus_per_node=options.gpus_per_node,
        pipeline_layout=options.pipeline_layout,
    )
    try:
        plan = predict(spec, allocation, job)
    except ValueError as error:  # of --pipeline-layout or --lora-targets
        print(error, file=sys.stderr)
        return 1
    print(json.dumps(plan.to_dict(), indent=2) if options.json else plan.render())
    return 0 if plan.fits else 1


def _allocation(text: str, gpus: int | None) -> ModelAllocation:
    allocation = ModelAllocation.parse(text)
    return allocation if gpus is None else allocation.resolve(gpus)
