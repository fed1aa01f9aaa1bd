"""What a trial found, and whether it is within tolerance."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any

__all__ = ["RESUME_AFTER", "StepDifferences", "Tolerance", "TrialReport"]

RESUME_AFTER = 2
"""Steps before the layout of a trial changes."""


@dataclass(frozen=True)
class Tolerance:
    """Largest differences that pass: absolute for logits and weights, relative for the loss and the gradient norm."""

    logits: float
    loss: float
    grad_norm: float
    weights: float


TOLERANCES = {
    "float32": Tolerance(logits=1e-4, loss=1e-4, grad_norm=1e-4, weights=1e-4),
    # bfloat16 has 8 significant bits. The reference runs in bfloat16 too and sums in another order: a logit of size 4
    # differs by a few units in its last place (2**-6), and a weight of size 0.3 by one or two (2**-9) after a step.
    # With experts, a token whose router scores nearly tie goes to another one: single logits differ much.
    "bfloat16": Tolerance(logits=1.0, loss=2e-3, grad_norm=2e-2, weights=1e-2),
    # FP8 beside a bfloat16 reference. e4m3 has 4 significant bits: every operand of a product is off by up to 2**-4 of
    # itself, at random, so a sum of n products of one sign by about 2**-4 / sqrt(n), and logits, whose summands cancel,
    # by more: measured up to 1.1 on logits of size 5 (H200, every recipe), 3e-3 of the loss, 2.4e-2 of the norm. Adam
    # bounds a weight: each of three steps moves it by at most lr = 5e-4 either way, then it is rounded to bfloat16.
    "fp8": Tolerance(logits=2.0, loss=1e-2, grad_norm=5e-2, weights=1e-2),
    # float16 has 11 significant bits, an eighth of bfloat16's rounding; nearly tied routers differ as much again.
    "float16": Tolerance(logits=0.5, loss=5e-4, grad_norm=5e-3, weights=2e-3),
}


@dataclass(frozen=True)
class StepDifferences:
    """One optimizer step: values of the engine, and how far they are from the reference; `digest` is of its weights."""

    step: int
    loss: float
    grad_norm: float
    logits: float
    loss_difference: float
    grad_norm_difference: float
    weights: float
    micro_batches: int
    tokens_per_second: float
    digest: str = ""


@dataclass
class TrialReport:
    """What a trial found."""

    allocation: str
    model: str
    bridge: str
    dtype: str
    device: str
    world_size: int
    fp8: str | None = None
    lora_rank: int | None = None
    start_seconds: float = 0.0
    exported_tensors: int = 0
    export_differs: list[str] = field(default_factory=list)
    steps: list[StepDifferences] = field(default_factory=list)
    repeats: list[str] | None = None
    resumed_as: str | None = None
    adapter_tensors: int = 0
    adapter_folder_logits: float | None = None

    @property
    def tolerance(self) -> Tolerance:
        return TOLERANCES[self.dtype if self.fp8 is None else "fp8"]

    @property
    def failures(self) -> list[str]:
        """What is out of tolerance, in words; empty when the trial passed."""
        found, limits = [], self.tolerance
        if self.export_differs:
            found.append(f"exported weights are not bit-equal: {', '.join(self.export_differs[:3])}")
        for s in self.steps:
            for name, value, limit in (
                ("logits", s.logits, limits.logits),
                ("loss", s.loss_difference, limits.loss),
                ("gradient norm", s.grad_norm_difference, limits.grad_norm),
                ("weights", s.weights, limits.weights),
            ):
                if not value <= limit:  # a NaN fails too
                    found.append(f"step {s.step}: {name} differ by {value:.2g}, more than {limit:.2g}")
        if self.lora_rank is not None:
            difference = math.nan if self.adapter_folder_logits is None else self.adapter_folder_logits
            if not difference <= limits.logits:
                found.append(
                    f"logits of PEFT with the saved adapters differ by {difference:.2g}, more than {limits.logits:.2g}"
                )
        if not self.steps:
            found.append("no step was run")
        return found + (self.repeats or [])

    @property
    def passed(self) -> bool:
        return not self.failures

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "tolerance": asdict(self.tolerance), "passed": self.passed, "failures": self.failures}

    def render(self) -> str:
        numbers = self.dtype if self.fp8 is None else f"{self.dtype} and FP8 {self.fp8}"
        lines = [
            f"{self.allocation}  {self.model}  {numbers} on {self.device}, {self.world_size} "
            f"rank{'s' if self.world_size > 1 else ''} through {self.bridge}, started in {self.start_seconds:.1f} s",
            f"export: {self.exported_tensors} tensors, "
            + ("bit-equal" if not self.export_differs else f"{len(self.export_differs)} differ"),
            "step       loss   |dloss|/loss   grad norm   |dnorm|/norm   |dlogits|   |dweights|   micro   tokens/s",
        ]
        rows = [
            f"{s.step:>4} {s.loss:>10.6f} {s.loss_difference:>14.1e} {s.grad_norm:>11.5f} "
            f"{s.grad_norm_difference:>14.1e} {s.logits:>11.1e} "
            f"{s.weights:>12.1e} {s.micro_batches:>7} {s.tokens_per_second:>10.0f}"
            for s in self.steps
        ]
        if self.resumed_as is not None:
            rows.insert(RESUME_AFTER, f"     saved, processes ended, loaded as {self.resumed_as}")
        lines += rows
        if self.repeats == []:
            lines.append(f"second run: loss, gradient norm and weights of {len(self.steps)} steps are bit-equal")
        if self.adapter_folder_logits is not None:
            lines.append(
                f"adapters of rank {self.lora_rank}: {self.adapter_tensors} tensors; PEFT with the saved folder: "
                f"|dlogits| {self.adapter_folder_logits:.1e}"
            )
        reference = "Transformers" if self.lora_rank is None else "PEFT, Transformers"
        lines += [f"FAIL {failure}" for failure in self.failures] or [f"PASS within tolerance of {reference} and AdamW"]
        return "\n".join(lines)
