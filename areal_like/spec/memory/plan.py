"""`predict`: the parts put together, for each class of ranks and each phase of a job."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from areal_like.alloc import ModelAllocation
from areal_like.spec.memory import activations, kv_cache, logits, overhead, schedule, states, transfer
from areal_like.spec.memory.activations import ChunkMemory, chunk_memory
from areal_like.spec.memory.host import host_memory
from areal_like.spec.memory.job import PARTS, MemoryJob
from areal_like.spec.memory.layers import LayerMemory, layer_kinds
from areal_like.spec.memory.megatron_formula import megatron_estimate
from areal_like.spec.memory.trained import Trained, trained
from areal_like.spec.model import ModelSpec
from areal_like.spec.shards import RankClass, rank_classes

__all__ = ["MemoryPlan", "Phase", "RankMemory", "predict"]

OUTSIDE = ("CUDA context", "communicators")
"""Parts that PyTorch's allocator does not see."""


@dataclass(frozen=True)
class Phase:
    """Bytes on one GPU at the fullest moment of a phase, by what they are for."""

    name: str
    parts: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    @property
    def allocated(self) -> int:
        """What `torch.cuda.max_memory_allocated` should say."""
        return sum(n for part, n in self.parts.items() if part not in OUTSIDE)


@dataclass(frozen=True)
class RankMemory:
    """The phases of one class of ranks."""

    ranks: RankClass | None
    phases: tuple[Phase, ...]

    @property
    def peak(self) -> Phase:
        return max(self.phases, key=lambda phase: phase.total)

    def phase(self, name: str) -> Phase:
        """
        Raises:
            KeyError: there is no such phase.
        """
        for phase in self.phases:
            if phase.name == name:
                return phase
        raise KeyError(name)


@dataclass(frozen=True)
class MemoryPlan:
    """What `predict` found.

    Attributes:
        ranks: the trainer's classes of ranks, stage after stage.
        rollout: a GPU of a rollout engine that has GPUs of its own; None when there is none.
        host: bytes on the first node by phase.
        megatron: bytes by Megatron-LM's own formula.
    """

    spec: ModelSpec
    allocation: ModelAllocation
    job: MemoryJob
    ranks: tuple[RankMemory, ...]
    rollout: RankMemory | None
    host: dict[str, int]
    megatron: int

    @property
    def everything(self) -> tuple[RankMemory, ...]:
        return self.ranks + (() if self.rollout is None else (self.rollout,))

    @property
    def worst(self) -> RankMemory:
        """The fullest GPU of the job."""
        return max(self.everything, key=lambda rank: rank.peak.total)

    @property
    def peak(self) -> int:
        """Bytes of the fullest GPU at its fullest moment."""
        return self.worst.peak.total

    @property
    def fits(self) -> bool | None:
        """None when the memory of a GPU is not known."""
        return None if self.job.gpu_memory is None else self.peak <= self.job.gpu_memory

    @property
    def split(self) -> list[int]:
        """Layers of each stage."""
        return [rank.ranks.num_layers for rank in self.ranks if rank.ranks is not None]

    def render(self) -> str:
        """A table for a person."""
        from areal_like.spec.memory.report import render

        return render(self)

    def to_dict(self) -> dict[str, Any]:
        """Everything in bytes, for JSON."""
        from areal_like.spec.memory.report import to_dict

        return to_dict(self)


def predict(spec: ModelSpec, allocation: ModelAllocation, job: MemoryJob) -> MemoryPlan:
    """Memory of every class of ranks in every phase.

    Raises:
        ValueError: the layers cannot fill the stages, or `job.pipeline_layout` does not fit. (Whether the allocation
            can hold the model at all is for `preflight.check_layout`; sizes that do not divide are rounded up here.)
    """
    kinds, classes = layer_kinds(spec, allocation, job), rank_classes(spec, allocation, job.pipeline_layout)
    trainer = tuple(_Trainer(spec, allocation, job, ranks, kinds).memory() for ranks in classes)
    rollout = None
    if job.rollout is not None and not job.colocated:
        rollout = RankMemory(None, (_rollout(spec, job, job.rollout, {}),))
    return MemoryPlan(
        spec,
        allocation,
        job,
        trainer,
        rollout,
        host_memory(spec, allocation, job, classes),
        megatron_estimate(spec, allocation, job),
    )


@dataclass(frozen=True)
class _Trainer:
    """One class of ranks."""

    spec: ModelSpec
    allocation: ModelAllocation
    job: MemoryJob
    ranks: RankClass
    kinds: dict[bool, LayerMemory]

    def memory(self) -> RankMemory:
        return RankMemory(self.ranks, tuple(self.phases()))

    def phases(self) -> list[Phase]:
        found = [self.load(), self.log_probs()]
        if self.job.optimizer is not None:
            found.append(self.update())
        found += [self.export("weight transfer"), self.export("checkpoint")]
        if self.job.offload:
            found.append(Phase("at rest", self.present()))
        if self.job.rollout is None or not self.job.colocated:
            return found
        # The rollout engine is a process of its own whose weights stay. Its cache is counted while it generates.
        beside = _beside(self.spec, self.job, self.job.rollout)
        found = [Phase(phase.name, _sum(phase.parts, beside)) for phase in found]
        return [found[0], _rollout(self.spec, self.job, self.job.rollout, self.present()), *found[1:]]

    @property
    def is_last(self) -> bool:
        return self.ranks.stage == self.allocation.pp - 1

    @cached_property
    def chunks(self) -> tuple[ChunkMemory, ...]:
        """The virtual stages that the rank holds."""
        return tuple(chunk_memory(self.spec, self.job, layers, self.kinds) for layers in self.ranks.layers)

    @cached_property
    def trained(self) -> Trained:
        return trained(self.spec, self.allocation, self.ranks, self.job)

    def states(self) -> dict[str, int]:
        counts = self.ranks.counts
        return {
            "weights": states.weights(self.spec, counts, self.job, self.trained),
            "FP8 copies": states.fp8_copies(self.spec, counts, self.job),
            "gradients": states.gradients(self.trained, self.job),
            "optimizer": states.optimizer(self.spec, self.allocation, self.trained, self.job),
        }

    @cached_property
    def resident(self) -> dict[str, int]:
        """What stays between phases once a step has been made."""
        a = self.allocation
        return {
            **self.states(),
            "workspaces": overhead.workspaces(self.spec, self.job) + overhead.dummy_gradients(self.spec, a, self.job),
            "CUDA context": overhead.CUDA_CONTEXT,
            "communicators": overhead.communicators(a.dp, a.tp, a.pp, a.cp, a.ep, a.etp),
        }

    def present(self, *needed: str) -> dict[str, int]:
        """What stays while the model needs these parts alone: the roles of a run offload the others, where asked to."""
        away = {PARTS[part] for part in self.job.offload - set(needed)}
        away |= {"FP8 copies"} if "weights" in away else set()  # made anew from the weights when they are back
        return {part: 0 if part in away else size for part, size in self.resident.items()}

    def load(self) -> Phase:
        """The parameters as they were built, beside the buffers that take them in; or the optimizer's copies after."""
        parts = self.resident | {"workspaces": 0, "FP8 copies": 0}
        built = states.load_transient(self.trained)
        main_copy = states.main_copy(self.spec, self.allocation, self.trained, self.job)
        main_copy = 0 if self.job.precision_aware else main_copy  # it comes with the first step, as moments do
        parts["optimizer"] = 0 if built >= main_copy else main_copy
        parts["parameters as built"] = built if built >= main_copy else 0
        return Phase("load", parts)

    def log_probs(self) -> Phase:
        """A pass without gradients: the fullest layer, or on the last stage the head."""
        spec, allocation, job = self.spec, self.allocation, self.job
        parts = self.present("parameters") | {"batch": overhead.batch(spec, job)}
        forward, tables = max(chunk.forward for chunk in self.chunks), self.tables
        parts["activations"] = forward + tables
        if self.is_last:
            boundary = self.chunks[-1].boundary
            # The schedule holds the output of the pass before; the interleaved one lets go of it.
            before = boundary if job.micro_batches > 1 and allocation.vpp == 1 else 0
            end = boundary + logits.gathered_hidden(spec, allocation, job)
            made = logits.chunk(spec, allocation, job) + logits.statistics(allocation, job)
            parts["activations"] += before
            if end + made >= forward:
                parts |= {"activations": end + tables + before, "logits": made}
        return Phase("log-probs", parts)

    def update(self) -> Phase:
        """The fullest moment of the backward passes."""
        spec, allocation, job = self.spec, self.allocation, self.job
        resident = self.resident | {"batch": overhead.batch(spec, job)}
        times = schedule.moments(allocation.pp, allocation.vpp, self.ranks.stage, job.micro_batches)
        passes = max((self._backward(moment) for moment in times), key=lambda parts: sum(parts.values()))
        # In the step, when what the passes needed is free again; these two never come together.
        more = {
            "gradients in float32": states.main_gradients(spec, allocation, self.trained, job),
            "moments in float32": states.moments_in_float32(spec, allocation, self.trained, job),
        }
        return Phase("update", resident | passes | {n: max(0, s - sum(passes.values())) for n, s in more.items()})

    def _backward(self, moment: schedule.Moment) -> dict[str, int]:
        """A backward pass where it begins (at the end of the model: in the head), or in its first layer."""
        chunk, is_end = self.chunks[moment.chunk], self.is_last and moment.chunk == len(self.chunks) - 1
        spec, allocation, job = self.spec, self.allocation, self.job
        kept = activations.kept(self.chunks, moment, has_head=self.is_last)
        kept += self.tables if job.recompute == "full" else 0
        in_layer = chunk.backward + chunk.again
        if not is_end:
            return {"activations": kept + in_layer}
        norm = 2 * chunk.boundary + logits.gathered_hidden(spec, allocation, job)
        size = logits.logits(spec, allocation, job) + logits.statistics(allocation, job)
        gradients, waiting = logits.gradients(spec, allocation, job), logits.waiting_gradient(spec, allocation, job)
        if norm + size + gradients >= in_layer + waiting:
            return {"activations": kept + norm, "logits": size, "head gradients": gradients}
        return {"activations": kept + in_layer, "head gradients": waiting}

    @property
    def tables(self) -> int:
        """What the dispatchers of all layers keep after a pass."""
        return sum(chunk.routing_tables for chunk in self.chunks)

    def export(self, name: str) -> Phase:
        buffers = transfer.export_buffers(self.spec, self.allocation, self.job)
        return Phase(name, self.present("parameters") | {"export": buffers})


def _rollout(spec: ModelSpec, job: MemoryJob, layout: ModelAllocation, resident: dict[str, int]) -> Phase:
    """A GPU of the rollout engine while it generates; `resident` is what a trainer keeps there."""
    parts = _sum(resident, _beside(spec, job, layout))
    parts["KV cache"] = kv_cache.kv_cache(spec, layout, job, occupied=sum(parts.values()))
    return Phase("rollout", parts)


def _beside(spec: ModelSpec, job: MemoryJob, layout: ModelAllocation) -> dict[str, int]:
    """What a rollout engine keeps on a GPU for as long as it lives."""
    return {
        "rollout weights": kv_cache.rollout_weights(spec, layout, job),
        "CUDA context": overhead.CUDA_CONTEXT,
        "communicators": overhead.communicators(layout.tp, layout.pp),
    }


def _sum(one: dict[str, int], other: dict[str, int]) -> dict[str, int]:
    return {part: one.get(part, 0) + other.get(part, 0) for part in one | other}
