"""Everything that happens before the first step: check, find the model and the data, start the processes."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from areal_like.alloc import Diagnostic, DiagnosticError, ModelAllocation, get_backend
from areal_like.config import RLConfig
from areal_like.data.loader import RowLoader
from areal_like.data.models import resolve_model
from areal_like.data.prompts import load_tokenizer
from areal_like.data.rewards import Reward
from areal_like.data.rows import Row
from areal_like.preflight import check, check_layout
from areal_like.preflight.continuing import OTHER
from areal_like.preflight.flow import groups_a_step
from areal_like.preflight.offloading import offload_of
from areal_like.rollout.agents.base import EvaluationAgent, GroupedRolloutGenerator
from areal_like.rollout.agents.environment_file import Environments
from areal_like.rollout.rewards import RewardPool
from areal_like.runtime.local import WorkerGroup
from areal_like.spec import ModelSpec
from areal_like.spec.checkpoint import checkpoint_identity, differences
from areal_like.trainers.placement import Placement, place
from areal_like.trainers.problems import choose_problems
from areal_like.trainers.recovery import Resume, find_resume
from areal_like.trainers.roles import Actor, Reference

__all__ = ["Engines", "Job", "check_before_start", "prepare", "start_engines"]


@dataclass(frozen=True)
class Job:
    """A checked run: nothing is started yet.

    Attributes:
        config: with local folders for every model.
        folder: of the run: `fileroot/experiment/trial`.
        placement: devices and threads.
        tokenizer: of the model.
        environments: that are trained on, each with its groups of a batch.
        evaluations: that are measured, each with the number of its problems; all it has when None.
        loader: the order of the rows of train_dataset; None where environments pose the problems.
        batch_size: groups of a full batch.
        total_steps: steps of the run.
        notes: what the user should know.
        resume: the recovery checkpoint that the run goes on from; None when it begins.
    """

    config: RLConfig
    folder: Path
    placement: Placement
    tokenizer: Any
    environments: Sequence[tuple[GroupedRolloutGenerator, int]]
    evaluations: Sequence[tuple[EvaluationAgent, int | None]]
    loader: RowLoader | None
    batch_size: int
    total_steps: int
    notes: tuple[str, ...]
    resume: Resume | None = None

    @property
    def steps_done(self) -> int:
        """Steps that the run need not make again."""
        return self.resume.state.step if self.resume else 0

    @property
    def steps_per_epoch(self) -> int:
        """An epoch without a data set is the whole run."""
        return self.total_steps if self.loader is None else self.loader.batches_per_epoch

    def groups_in(self, batch: int) -> int:
        """Groups of batch number `batch`: the last one of an epoch may be smaller."""
        assert self.loader is not None
        last = batch % self.steps_per_epoch == self.steps_per_epoch - 1
        rest = len(self.loader.rows) % self.batch_size
        return rest if last and rest and not self.loader.drop_last else self.batch_size

    def data_state(self, step: int) -> dict[str, int]:
        """The place of the data set after a step; nothing without one."""
        if self.loader is None:
            return {}
        epoch, position = divmod(step, self.steps_per_epoch)
        if position == 0:  # the loader begins an epoch with its first batch
            epoch, position = epoch - 1, self.steps_per_epoch
        return {**self.loader.state(), "epoch": epoch, "position": position}


def check_before_start(config: RLConfig, skip: Collection[str] = ()) -> list[str]:
    """Run the check; what the user should know of it, in words.

    Args:
        skip: codes whose errors do not stop the run; each is told loudly instead.

    Raises:
        DiagnosticError: with every error that is not skipped.
    """
    config.ensure_runnable()
    findings = check(config)
    _raise_errors(findings, skip)
    return [
        *_skipped(findings, skip),
        *(d.render() for d in (*config.diagnostics, *findings) if d.severity == "warning"),
    ]


def prepare(
    config: RLConfig,
    rows: Sequence[Row] | None,
    reward: Reward | None,
    valid_rows: Sequence[Row] | None,
    skip: Collection[str] = (),
    environments: Environments | None = None,
) -> Job:
    """Check the run and find what it needs.

    Args:
        skip: see `check_before_start`.

    Raises:
        DiagnosticError: with everything that is known to stop it.
    """
    notes = check_before_start(config, skip)
    placement = place(config)
    config = _with_local_models(config, placement, skip)
    tokenizer = load_tokenizer(config.tokenizer_path)
    problems = choose_problems(config, rows, reward, valid_rows, environments, tokenizer, notes)
    loader = problems.loader
    steps = [] if config.total_train_steps is None else [config.total_train_steps]
    if loader is not None:
        steps.append(loader.batches_per_epoch * config.total_train_epochs)
    if not steps:
        raise ValueError("environments have no end: give total_train_steps")
    folder = Path(config.cluster.fileroot).expanduser() / config.experiment_name / config.trial_name
    resume, more = find_resume(config, folder)
    if resume is not None:
        _go_on(config, loader, resume)
    notes += more
    return Job(
        config,
        folder,
        placement,
        tokenizer,
        problems.environments,
        problems.evaluations,
        loader,
        groups_a_step(config),
        min(steps),
        tuple(notes),
        resume,
    )


def _raise_errors(findings: Sequence[Diagnostic], skip: Collection[str]) -> None:
    errors = [d for d in findings if d.severity == "error" and d.code not in skip]
    if errors:
        raise DiagnosticError(errors)


def _skipped(findings: Sequence[Diagnostic], skip: Collection[str]) -> list[str]:
    told = [d for d in findings if d.severity == "error" and d.code in skip]
    return [
        f"!!! SKIPPED by --skip-check {d.code}: expect the run to fail or to be wrong !!!\n{d.render()}" for d in told
    ]


def _with_local_models(config: RLConfig, placement: Placement, skip: Collection[str]) -> RLConfig:
    """Paths of models as local folders, whose numbers are now known: check the layouts against them."""
    findings: list[Diagnostic] = []
    updates: dict[str, Any] = {}
    seats = {"actor": placement.actor, "ref": placement.reference}
    for role, seat in seats.items():
        section = getattr(config, role)
        if section is None or seat is None:
            continue
        folder = resolve_model(section.path, key=f"{role}.path")
        at = config.location(f"{role}.backend")
        where: dict[str, Any] = {"key": f"{role}.backend", "file": at.file, "line": at.line, "column": at.column}
        findings += [replace(d, **where) for d in check_layout(seat.allocation, ModelSpec.from_path(folder), section)]
        updates[role] = section.model_copy(update={"path": str(folder)})
    _raise_errors(findings, skip)
    tokenizer = Path(config.tokenizer_path).expanduser()
    if not tokenizer.is_dir():
        tokenizer = resolve_model(config.tokenizer_path, key="tokenizer_path")
    return config.model_copy(update={**updates, "tokenizer_path": str(tokenizer)})


def _go_on(config: RLConfig, loader: RowLoader | None, resume: Resume) -> None:
    """Set the data to where the checkpoint stands, and compare what was not known to the check.

    Raises:
        DiagnosticError: it is of other data or of another model.
    """
    at = config.location("recover.mode")
    where: dict[str, Any] = {"key": "recover.mode", "file": at.file, "line": at.line, "column": at.column}
    name = f"recover/{resume.folder.name}"
    own = checkpoint_identity(ModelSpec.from_path(config.actor.path), config.actor)
    if differing := differences(resume.manifests["actor"].model, own):
        raise DiagnosticError([Diagnostic("AL586", "error", f"{name}: {'; '.join(differing)}", help=OTHER, **where)])
    try:
        if loader is not None:
            loader.load_state(resume.state.data)
    except (ValueError, KeyError) as error:
        raise DiagnosticError([Diagnostic("AL587", "error", f"{name}: {error}", help=OTHER, **where)]) from error


@dataclass
class Engines:
    """The started processes of a run."""

    actor: Actor
    reference: Reference | None
    rollout: WorkerGroup
    rewards: RewardPool

    def close(self, *, now: bool) -> None:
        """End all processes; `now` does not wait for what they are doing."""
        grace = 0.0 if now else 5.0
        groups = [self.actor.workers, self.rollout]
        if self.reference is not None:
            groups.append(self.reference.workers)
        self.rewards.close()
        for group in groups:
            group.close(grace)


def start_engines(job: Job) -> Engines:
    """Start actor, reference, rollout engine and reward processes beside each other, and wait for all of them.

    Raises:
        WorkerError, DiagnosticError, TimeoutError: one of them did not start; none is left running.
    """
    config, placement = job.config, job.placement
    common: dict[str, Any] = {"device": placement.device, "seed": config.seed, "log_dir": job.folder / "logs"}
    with contextlib.ExitStack() as undo:
        optimizer_steps = job.total_steps * config.actor.ppo_n_minibatches * config.actor.update_iterations
        actor = Actor(
            "actor",
            config.actor,
            placement.actor,
            total_steps=optimizer_steps,
            offload=offload_of(config, config.actor),
            **common,
        )
        undo.callback(actor.workers.close, grace=0)
        reference = None
        if placement.reference is not None and config.ref is not None:
            away = offload_of(config, config.ref)
            reference = Reference("ref", config.ref, placement.reference, offload=away, **common)
            undo.callback(reference.workers.close, grace=0)
        rollout = _start_rollout(job, placement.rollout.allocation)
        undo.callback(rollout.close, grace=0)
        rollout_ready = rollout.submit("initialize")
        rewards = RewardPool(
            workers=placement.reward_workers,
            timeout=config.rollout.reward_timeout,
            retries=config.rollout.reward_retries,
        )
        undo.callback(rewards.close)
        timeout = config.rollout.setup_timeout
        actor.wait_until_ready(timeout)
        rollout_ready.result(timeout)
        if reference is not None:
            reference.wait_until_ready(timeout)
            reference.rest()
        actor.rest()
        undo.pop_all()
    return Engines(actor, reference, rollout, rewards)


def _start_rollout(job: Job, allocation: ModelAllocation) -> WorkerGroup:
    config, seat = job.config, job.placement.rollout
    return WorkerGroup.start(
        "rollout",
        get_backend(allocation.backend).engine,
        {
            "allocation": allocation,
            "config": config.rollout,
            "model_path": config.actor.path,
            "tokenizer_path": config.tokenizer_path,
            "device": job.placement.device,
            "seed": config.seed,
        },
        allocation.world_size,
        job.placement.device,
        seat.threads,
        seat.gpu_offset,
        log_dir=job.folder / "logs",
        independent=True,  # replicas know nothing of each other: one that dies is started again, see `Replicas`
        wait=False,
    )
