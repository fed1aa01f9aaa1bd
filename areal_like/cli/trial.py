"""`areal-like try STRING`: a layout tried for real, beside Transformers."""

from __future__ import annotations

import argparse
import json
import os
import sys

from areal_like.alloc import ModelAllocation, get_backend
from areal_like.cli.arguments import Commands, add_string, positive

__all__ = ["add"]


def add(commands: Commands) -> None:
    command = commands.add_parser(
        "try",
        help="train a model under a layout for real and compare it with Transformers",
        description="Starts the ranks, trains the model under the layout beside Transformers and torch Adam on the same"
        " batches, and compares logits, loss, gradient norm and weights.",
    )
    add_string(command)
    command.add_argument(
        "--model", type=_model, default="tiny-dense", help="tiny-dense, tiny-moe or a Hugging Face folder"
    )
    command.add_argument(
        "--bridge", choices=("mbridge", "megatron-bridge"), default="mbridge", help="what converts the weights"
    )
    command.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="type to train in (default: float32; with --fp8 bfloat16)",
    )
    command.add_argument(
        "--fp8",
        nargs="?",
        const="tensorwise",
        choices=("delayed", "tensorwise", "blockwise", "mxfp8"),
        metavar="RECIPE",
        help="matrix products in FP8, on a GPU: delayed, tensorwise (default), blockwise or mxfp8",
    )
    command.add_argument(
        "--deterministic", action="store_true", help="repeatable kernels; everything runs twice and bits are compared"
    )
    command.add_argument(
        "--lora-rank",
        type=positive,
        metavar="N",
        help="train adapters of this rank alone, beside PEFT (megatron-bridge)",
    )
    command.add_argument(
        "--resume-as",
        metavar="STRING",
        help="after two steps write a recovery checkpoint, end all processes, and go on from it under this layout",
    )
    command.add_argument("--steps", type=positive, default=3, help="optimizer steps (default: 3)")
    command.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: GPUs if enough")
    command.add_argument("--json", action="store_true", help="print JSON")
    command.set_defaults(run=run)


def _model(text: str) -> str:
    if text not in ("tiny-dense", "tiny-moe") and not os.path.isdir(text):
        raise argparse.ArgumentTypeError(f"{text!r} is neither tiny-dense nor tiny-moe nor a folder")
    return text


def _require_trainer(text: str) -> None:
    allocation = ModelAllocation.parse(text)
    backend = get_backend(allocation.backend)
    backend.require_role("train", source=text)
    if not backend.engine:
        backend.load_engine()  # says that there is none
    _ = allocation.world_size  # says that d is '*'


def run(options: argparse.Namespace) -> int:
    """Everything that can be refused is refused before torch is imported."""
    for text in (options.text, options.resume_as):
        if text is not None:
            _require_trainer(text)
    if options.resume_as is not None and (options.steps < 3 or options.deterministic):
        print("--resume-as needs 3 steps or more, and goes without --deterministic", file=sys.stderr)
        return 2
    from areal_like.trainers.trial import run_trial

    report = run_trial(
        options.text,
        model=options.model,
        bridge=options.bridge,
        dtype=options.dtype or ("bfloat16" if options.fp8 else "float32"),
        steps=options.steps,
        device=options.device,
        fp8=options.fp8,
        deterministic=options.deterministic,
        lora_rank=options.lora_rank,
        resume_as=options.resume_as,
    )
    print(json.dumps(report.to_dict(), indent=2) if options.json else report.render())
    return 0 if report.passed else 1
