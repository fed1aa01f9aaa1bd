"""The best layouts of a model on some GPUs: enumerate, drop what is illegal or does not fit, rank by `step_cost`."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from areal_like.alloc import Diagnostic, ModelAllocation, get_backend
from areal_like.preflight.cost import StepCost, balanced_seconds, least_seconds, step_cost
from areal_like.preflight.enumeration import Layout, training_layouts, virtual_stages
from areal_like.preflight.hardware import GIB, Hardware
from areal_like.preflight.legality import check_layout
from areal_like.preflight.plan_memory import least_memory, peak_memory
from areal_like.preflight.rollout_plan import RolloutPlan, rollout_plans, shares
from areal_like.preflight.step_job import StepJob
from areal_like.spec import ModelSpec

__all__ = ["ENGINE_CODES", "NoPlanError", "Plan", "Request", "plan"]

ENGINE_CODES = frozenset({"AL301", "AL302"})
"""What only the engines of this version lack: an architecture, a feature of the checkpoint."""

MICRO_BATCH_TOKENS = (8192, 65536)
"""Token budgets that are tried lie between these, where sequences allow."""


FILL = 0.95
"""Part of a GPU's memory that a plan may fill: the prediction is good to a twentieth (`benchmarks/memory.py`)."""


class NoPlanError(ValueError):
    """No layout can be used; the message says what stood in the way.

    Attributes:
        codes: of the findings that every layout has at the least, where none is legal.
    """

    def __init__(self, message: str, codes: frozenset[str] = frozenset()) -> None:
        super().__init__(message)
        self.codes = codes


@dataclass(frozen=True)
class Plan:
    """One way to run the job.

    Attributes:
        allocation: of the trainer.
        job: the step, with the micro-batch budget and whether activations are recomputed.
        cost: of the training step.
        peak: predicted peak of the fullest rank in bytes.
        memory: bytes of a GPU.
        rollout: of the rollout engine on GPUs of its own; None when only training was planned.
    """

    allocation: ModelAllocation
    job: StepJob
    cost: StepCost
    peak: float
    memory: float
    rollout: RolloutPlan | None = None

    @property
    def headroom(self) -> float:
        """Bytes left on the fullest GPU of the trainer."""
        return self.memory - self.peak

    @property
    def seconds(self) -> float:
        """Of a step; generation of the next batch and training run side by side, so the slower counts."""
        return max(self.cost.seconds, self.rollout.cost.seconds) if self.rollout else self.cost.seconds


@dataclass(frozen=True)
class Request:
    """What is to be planned.

    Attributes:
        spec: the model.
        gpus: of the whole job.
        hardware: each of them.
        sequences, sequence_length, forward_passes: see `StepJob`.
        micro_tokens: see `StepJob`; None tries several.
        backend: of the trainer.
        any_engine: plan for an engine that has every architecture; else for this version's.
        rollout: backend that generates on a part of the GPUs; None plans training alone.

    Raises:
        ValueError: the step is none (`StepJob`), or there is no GPU.
    """

    spec: ModelSpec
    gpus: int
    hardware: Hardware
    sequences: int
    sequence_length: int
    micro_tokens: int | None = None
    forward_passes: int = 0
    backend: str = "megatron"
    any_engine: bool = False
    rollout: str | None = None

    def __post_init__(self) -> None:
        if self.gpus < 1:
            raise ValueError(f"gpus must be at least 1, not {self.gpus}")
        self.step(self.sequence_length if self.micro_tokens is None else self.micro_tokens)

    def step(self, micro_tokens: int) -> StepJob:
        """The step with this budget, without recompute."""
        return StepJob(self.sequences, self.sequence_length, micro_tokens, forward_passes=self.forward_passes)


class _Candidate(NamedTuple):
    """Ordered by time; of equally fast ones that with most replicas comes first.

    `seconds` is a bound from below until `cost` is known: most candidates are never looked at again. `any_v`: it stands
    for the layout with every v, until it is the best one left.
    """

    seconds: float
    order: tuple[int, ...]
    layout: Layout
    job: StepJob
    any_v: bool = False
    cost: StepCost | None = None


def plan(request: Request, top: int = 10) -> list[Plan]:
    """The fastest `top` plans, best first, each with another layout.

    Raises:
        NoPlanError: no layout is legal and fits.
        AllocationError: a backend is unknown or has the wrong role.
    """
    get_backend(request.backend).require_role("train")
    if request.rollout is None:
        return _training_plans(request, request.gpus, top)
    get_backend(request.rollout).require_role("inference")
    found: list[Plan] = []
    problems: list[str] = []
    for training, generating in shares(request.gpus, request.hardware.gpus_per_node):
        try:
            trainers = _training_plans(request, training, top)
        except NoPlanError as error:
            problems.append(f"{training} GPUs for training: {error}")
            continue
        rollouts = rollout_plans(
            request.spec,
            generating,
            request.hardware,
            backend=request.rollout,
            sequences=request.sequences,
            sequence_length=request.sequence_length,
        )
        if not rollouts:
            problems.append(f"{generating} GPUs for {request.rollout}: no layout holds weights and one sequence")
        found += [Plan(p.allocation, p.job, p.cost, p.peak, p.memory, r) for p in trainers for r in rollouts[:1]]
    if not found:
        raise NoPlanError("; ".join(problems) or f"{request.gpus} GPUs cannot be shared by trainer and rollout")
    return sorted(found, key=lambda p: (p.seconds, p.cost.seconds))[:top]


def _training_plans(request: Request, gpus: int, top: int) -> list[Plan]:
    """Best first: what does not fit comes back with recompute, which is slower by itself, at its new place."""
    spec, hardware, letters = request.spec, request.hardware, get_backend(request.backend).letters
    room = hardware.memory * FILL
    heap = list(_candidates(request, gpus))
    heapq.heapify(heap)
    found: dict[Layout, Plan] = {}
    refused: dict[Layout, list[Diagnostic]] = {}
    leanest: tuple[float, Layout] | None = None
    while heap and len(found) < top:
        candidate = heapq.heappop(heap)
        layout, job = candidate.layout, candidate.job
        if candidate.any_v:
            for v in virtual_stages(spec.num_layers, layout.pp, letters):
                heapq.heappush(heap, _candidate(request, layout._replace(vpp=v), job))
            continue
        if layout in found or layout in refused:
            continue
        if candidate.cost is None:
            cost = step_cost(spec, layout, hardware, job)
            heapq.heappush(heap, candidate._replace(seconds=round(cost.seconds, 9), cost=cost))
            continue
        peak = least_memory(spec, layout, job)
        if peak <= room or leanest is None or peak < leanest[0]:
            allocation = layout.allocation(request.backend)
            problems = _problems(allocation, request)
            if problems:
                refused[layout] = problems
                continue
            peak = max(peak, peak_memory(spec, allocation, job, hardware))
            if peak <= room:
                found[layout] = Plan(allocation, job, candidate.cost, peak, hardware.memory)
                continue
            leanest = min(leanest or (peak, layout), (peak, layout))
        if not job.recompute:
            heapq.heappush(heap, _candidate(request, layout, replace(job, recompute=True)))
    if not found:
        raise _why(request, gpus, refused, leanest)
    return list(found.values())


def _candidates(request: Request, gpus: int) -> Iterator[_Candidate]:
    """Every layout with every token budget, without recompute; v is left open."""
    letters = get_backend(request.backend).letters.replace("v", "")
    for layout in training_layouts(
        request.spec,
        gpus,
        letters=letters,
        sequences=request.sequences,
        sequence_length=request.sequence_length,
        gpus_per_node=request.hardware.gpus_per_node,
    ):
        for micro_tokens in _budgets(request, layout):
            yield _candidate(request, layout, request.step(micro_tokens), any_v=True)


def _candidate(request: Request, layout: Layout, job: StepJob, *, any_v: bool = False) -> _Candidate:
    order = (-layout.dp, *layout[1:], job.micro_tokens, job.recompute)
    bound = balanced_seconds if any_v else least_seconds
    return _Candidate(bound(request.spec, layout, request.hardware, job) - 1e-9, order, layout, job, any_v)


def _budgets(request: Request, layout: Layout) -> list[int]:
    """Token budgets of a micro-batch: as given, or powers of two times a sequence."""
    if request.micro_tokens is not None:
        return [request.micro_tokens]
    low, high = MICRO_BATCH_TOKENS
    each = -(-request.sequences // layout.dp)  # sequences of a replica: a larger budget changes nothing
    found = []
    count = 1
    while True:
        tokens = count * request.sequence_length
        if tokens >= low or 2 * tokens > high or count >= each:
            found.append(tokens)
        count *= 2
        if count * request.sequence_length > high or count >= 2 * each:
            return found


def _problems(allocation: ModelAllocation, request: Request) -> list[Diagnostic]:
    """Errors of the check; what only this version's engines lack is left out when any engine will do."""
    found = [d for d in check_layout(allocation, request.spec) if d.severity == "error"]
    return [d for d in found if not (request.any_engine and d.code in ENGINE_CODES)]


def _why(
    request: Request, gpus: int, refused: dict[Layout, list[Diagnostic]], leanest: tuple[float, Layout] | None
) -> NoPlanError:
    """What stood in the way of every layout."""
    if leanest is not None:
        peak, layout = leanest
        text = layout.allocation(request.backend)
        memory = f"{FILL:.0%} of {request.hardware.memory / GIB:.1f} GiB may be used"
        return NoPlanError(f"nothing fits: {text}, the leanest, needs {peak / GIB:.1f} GiB a GPU; {memory}")
    if refused:
        fewest = min(refused.values(), key=len)
        message = "no layout is legal: " + "; ".join(d.message for d in fewest)
        return NoPlanError(message, frozenset(d.code for d in fewest))
    rule = "t divides the attention heads, p is at most the layers, d at most the sequences"
    return NoPlanError(f"no layout has {gpus} ranks: {rule}")
