"""Everything that happens before the first step: check, find the model and the data, start the processes."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from areal_like.alloc import Diagnostic, DiagnosticError, ModelAllocation, get_backend
from areal_like.config import RLConfig, TrainDatasetConfig
from areal_like.data.loader import RowLoader
from areal_like.data.models import resolve_model
from areal_like.data.prompts import encode_prompt, filter_by_length, load_tokenizer
from areal_like.data.rewards import Reward
from areal_like.data.rows import Row
from areal_like.preflight import check, check_layout
from areal_like.preflight.continuing import OTHER
from areal_like.preflight.offloading import offload_of
from areal_like.rollout.groups import Prompt
from areal_like.rollout.rewards import RewardPool
from areal_like.runtime.local import WorkerGroup
from areal_like.spec import ModelSpec
from areal_like.spec.checkpoint import checkpoint_identity, differences
from areal_like.trainers.placement import Placement, place
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
        loader: batches of rows in the order of the run.
        valid_rows: rows of the evaluation, if there are any.
        batch_size: prompts of a full batch.
        total_steps: steps of the run.
        notes: what the user should know.
        resume: the recovery checkpoint that the run goes on from; None when it begins.
    """

    config: RLConfig
    folder: Path
    placement: Placement
    tokenizer: Any
    loader: RowLoader
    valid_rows: Sequence[Row] | None
    batch_size: int
    total_steps: int
    notes: tuple[str, ...]
    resume: Resume | None = None

    @property
    def steps_done(self) -> int:
        """Steps that the run need not make again."""
        return self.resume.state.step if self.resume else 0

    def prompts(self) -> Iterator[list[Prompt]]:
        """The prompts of the run, one list a step."""
        number = itertools.count(self.resume.state.prompts if self.resume else 0)
        for _ in range(self.steps_done, self.total_steps):
            yield [Prompt(next(number), encode_prompt(row, self.tokenizer), row) for row in self.loader.next_batch()]


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


def prepare(config: RLConfig, rows: Sequence[Row], valid_rows: Sequence[Row] | None, skip: Collection[str] = ()) -> Job:
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
    rows = _fitting(rows, tokenizer, config.train_dataset, notes)
    if valid_rows is not None and config.valid_dataset is not None:
        valid_rows = _fitting(valid_rows, tokenizer, config.valid_dataset, notes)
    batch_size = config.rollout.consumer_batch_size or config.train_dataset.batch_size
    loader = _loader(config, rows, batch_size)
    total_steps = loader.batches_per_epoch * config.total_train_epochs
    if config.total_train_steps is not None:
        total_steps = min(total_steps, config.total_train_steps)
    folder = Path(config.cluster.fileroot).expanduser() / config.experiment_name / config.trial_name
    resume, more = find_resume(config, folder)
    if resume is not None:
        _go_on(config, loader, resume)
    notes += more
    return Job(config, folder, placement, tokenizer, loader, valid_rows, batch_size, total_steps, tuple(notes), resume)


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


def _fitting(rows: Sequence[Row], tokenizer: Any, section: TrainDatasetConfig, notes: list[str]) -> Sequence[Row]:
    filtered = filter_by_length(rows, tokenizer, section.max_length)
    if filtered.dropped:
        notes.append(str(filtered))
    return filtered.rows


def _loader(config: RLConfig, rows: Sequence[Row], batch_size: int) -> RowLoader:
    section = config.train_dataset
    try:
        return RowLoader(
            rows, batch_size=batch_size, shuffle=section.shuffle, drop_last=section.drop_last, seed=config.seed
        )
    except ValueError as error:
        at = config.location("train_dataset.batch_size")
        finding = Diagnostic(
            "AL569", "error", str(error), key="train_dataset.batch_size", file=at.file, line=at.line, column=at.column
        )
        raise DiagnosticError([finding]) from error


def _go_on(config: RLConfig, loader: RowLoader, resume: Resume) -> None:
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


def start_engines(job: Job, reward: Reward) -> Engines:
    """Start actor, reference, rollout engine and reward processes beside each other, and wait for all of them.

    Raises:
        WorkerError, DiagnosticError, TimeoutError: one of them did not start; none is left running.
    """
    config, placement = job.config, job.placement
    common: dict[str, Any] = {"device": placement.device, "seed": config.seed, "log_dir": job.folder / "logs"}
    with contextlib.ExitStack() as undo:
        optimizer_steps = job.total_steps * config.actor.ppo_n_minibatches
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
        rewards = RewardPool(reward, workers=placement.reward_workers)
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
        wait=False,
    )
