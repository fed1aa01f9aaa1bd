"""AL58, second part: traces that could not be made."""

from __future__ import annotations

from collections.abc import Iterator

from areal_like.config import ProfilerConfig
from areal_like.preflight.job import Job, Role
from areal_like.preflight.registry import Finding, example, rule


@rule(
    "AL582",
    summary="the profiler is to record a rank that does not exist",
    why="Ranks of a model are counted from 0 to the number that its `backend` says.",
    bad=example("actor.profiler={ranks: [0, 4]}"),
    good=example("actor.profiler={ranks: [0, 3]}"),
    curable=True,
)
def recorded_ranks(job: Job) -> Iterator[Finding]:
    for role, profiler in _profiled(job):
        last = role.allocation.world_size - 1
        if outside := [rank for rank in profiler.ranks if not 0 <= rank <= last]:
            message = f"{role.name} has ranks 0 to {last}; there is no rank {outside[0]}"
            yield Finding(message, f"name ranks from 0 to {last}", key=f"{role.name}.profiler.ranks", role=role)


@rule(
    "AL583",
    summary="the profiler is to record steps that do not come",
    why="Steps are counted from 1, both ends included; a batch of rollouts makes ppo_n_minibatches of them.",
    bad=example("actor.profiler={step_start: 4, step_end: 2}"),
    good=example("actor.profiler={step_start: 2, step_end: 4}"),
)
def recorded_steps(job: Job) -> Iterator[Finding]:
    for role, profiler in _profiled(job):
        if profiler.step_end < profiler.step_start:
            message = f"step_end {profiler.step_end} is before step_start {profiler.step_start}"
            yield Finding(message, "set step_end to step_start or later", key=f"{role.name}.profiler.step_end")
            continue
        total = job.config.total_train_steps if job.config is not None else None
        if job.config is not None and total is not None:
            if role.name == "actor":
                total *= job.config.actor.ppo_n_minibatches * job.config.actor.update_iterations
            if profiler.step_start > total:
                message = f"the run ends after {total} steps of {role.name}: nothing would be recorded"
                yield Finding(message, f"set step_start to {total} or less", key=f"{role.name}.profiler.step_start")


@rule(
    "AL584",
    summary="a snapshot of GPU memory without a GPU",
    why="The history of allocations is kept by PyTorch's allocator for CUDA.",
    bad=example("device=cpu", "actor.profiler={memory: true}"),
    good=example("device=cuda", "actor.profiler={memory: true}"),
)
def memory_snapshot(job: Job) -> Iterator[Finding]:
    for role, profiler in _profiled(job):
        if profiler.memory and job.config is not None and job.config.device == "cpu":
            message = "memory: true records the allocations of CUDA; device is cpu"
            yield Finding(message, "remove it; the trace itself works on a CPU", key=f"{role.name}.profiler.memory")


def _profiled(job: Job) -> Iterator[tuple[Role, ProfilerConfig]]:
    for role in job.running():
        if role.trains and role.section is not None and role.section.profiler is not None:
            yield role, role.section.profiler
