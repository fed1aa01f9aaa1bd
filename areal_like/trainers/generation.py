"""The rollout side of a run, as the trainer sees it: batches out, weights in."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from areal_like.config import GenerationConfig
from areal_like.data.rows import Row
from areal_like.engines.base import SamplingParams, WeightBucket
from areal_like.preflight.flow import flow_control, requests_per_replica
from areal_like.rollout.agents.attempts import Attempts
from areal_like.rollout.agents.base import Agent, EvaluationAgent
from areal_like.rollout.agents.evaluation import EvaluationResponse
from areal_like.rollout.bank import RolloutBank
from areal_like.rollout.episode import ModelEpisode, sample_seed
from areal_like.rollout.inference.base import Capability, InferenceError, InferenceInterface, require
from areal_like.rollout.inference.engine import EngineInference
from areal_like.rollout.inference.rounds import RoundsInference
from areal_like.rollout.pipeline import Batch, RolloutPipeline, Screening, Share
from areal_like.rollout.pipeline.driver import PipelineThread
from areal_like.rollout.rewards import RewardPool
from areal_like.rollout.trajectories import RolloutGroup
from areal_like.runtime.local import WorkerError, WorkerGroup
from areal_like.spec import ModelSpec
from areal_like.trainers.sampling import sampling_params
from areal_like.trainers.startup import Job

__all__ = ["BANK", "Generation", "Progress", "open_bank"]

BANK = "rollout_bank"
"""Folder of the bank in that of the run."""

TRAINABLE = frozenset({Capability.TOKENS, Capability.LOG_PROBS})
"""What an update needs of a rollout: its tokens, and how likely they were when they were drawn."""

FATAL = (WorkerError, InferenceError)
"""Errors of an episode that no environment can help."""


@dataclass
class Progress:
    """Which problems of an environment are settled: trained on, or dropped for good.

    Attributes:
        position: every number below is settled.
        beyond: settled numbers at or above it.
    """

    position: int = 0
    beyond: set[int] = field(default_factory=set)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def settle(self, index: int) -> None:
        with self._lock:  # the trainer settles what it takes, the pipeline what it drops
            self.beyond.add(index)
            while self.position in self.beyond:
                self.beyond.discard(self.position)
                self.position += 1

    def state(self) -> dict[str, Any]:
        with self._lock:
            return {"position": self.position, "settled": sorted(self.beyond)}

    @classmethod
    def of(cls, state: dict[str, Any]) -> Progress:
        return cls(int(state["position"]), set(map(int, state["settled"])))


class Generation:
    """Keeps the rollout engine busy within the bounds of the configuration.

    Args:
        job: the run.
        workers: the rollout WorkerGroup.
        rewards: reward processes.
        bank: of the run, see `open_bank`; its owner closes it.
        note: told what the user should know.
    """

    def __init__(
        self,
        job: Job,
        workers: WorkerGroup,
        rewards: RewardPool,
        bank: RolloutBank | None = None,
        *,
        note: Callable[[str], None],
    ) -> None:
        config, replicas = job.config, workers.world_size
        self._config, self._rewards, self._tokenizer = config, rewards, job.tokenizer
        self._alone = len(job.environments) == 1
        self.control = flow_control(config, replicas)
        self.progress = _progress(job)
        self._version = job.resume.state.version if job.resume else 0
        self._bank = bank
        restored = self._restore(job, note)
        self._kept: list[WeightBucket] = []  # copies of the last weights, where they are asked for
        spec = ModelSpec.from_path(config.actor.path)
        self._model = EngineInference(
            workers,
            job.tokenizer,
            sampling_params(config.gconfig, 0, None),
            max_requests=requests_per_replica(config, replicas),
            vocabulary=spec.vocab_size,
            context=spec.max_position_embeddings,
            restore=self._restore_replica if config.rollout.keep_weights else None,
        )
        for agent, _ in job.environments:
            require(self._model, agent.needs | TRAINABLE, f"training on {agent.name}")
        self._thread = PipelineThread(lambda: self._pipeline(job, restored))

    def start(self) -> None:
        """Begin to generate with the weights that the engine has."""
        self._thread.start()

    def take(self, step: int) -> Batch:
        """The batch that step `step` trains on; see `RolloutPipeline.take`.

        Raises:
            WorkerError: the engine is dead, and could not be started again.
        """
        try:
            batch = self._thread.take()
        except InferenceError as error:
            raise error.__cause__ if isinstance(error.__cause__, WorkerError) else error from error.__cause__
        if batch is None:
            raise RuntimeError(f"the problems ended before step {step}")
        for group in batch.groups:
            self.progress[group.environment].settle(group.index)
        if self._bank is not None:
            self._bank.mark_consumed([group.key for group in batch.groups], step)
        return batch

    def pause(self) -> None:
        """Bring the engine to rest: requests in flight keep their tokens, or are completed, as configured."""
        self._model.replicas.pause(finish=self._config.rollout.requests_at_update == "finish")

    def update_weights(self, buckets: Iterable[WeightBucket], version: int) -> None:
        """Install weights while paused. Tokens drawn from now on carry their version."""
        if self._config.rollout.keep_weights:
            self._kept = []
            buckets = self._keeping(buckets)
        self._model.replicas.update_weights(buckets, version)
        self._version = version

    def resume(self) -> None:
        """Go on, with as many new groups as the version now allows."""
        self._model.replicas.resume()
        self._thread.installed(self._version)

    def evaluate(self, agent: EvaluationAgent, problems: int | None) -> EvaluationResponse:
        """Measure the installed policy, while paused."""
        sampling = self._config.eval_gconfig or self._config.gconfig
        model = RoundsInference(self._model.replicas, self._tokenizer, sampling_params(sampling, 0, None))
        attempts = Attempts(partial(self._episode, model, sampling, "evaluation"), fatal=FATAL)
        return self._thread.wait(agent.evaluate(attempts, prompts=problems, samples=sampling.n_samples))

    def checkpointed(self, step: int) -> None:
        """No run will go on from before `step`: what it has trained on need not be kept any longer."""
        if self._bank is not None:
            self._bank.checkpoint(step)

    def close(self) -> None:
        self._thread.close()
        self._model.replicas.close()

    def _pipeline(self, job: Job, restored: list[RolloutGroup]) -> RolloutPipeline:
        shares = []
        for agent, groups in job.environments:
            done = self.progress[agent.name]
            taken = {group.index for group in restored if group.environment == agent.name}
            shares.append(Share(agent, groups, done.position, done.beyond | taken))
        return RolloutPipeline(
            shares,
            self.control,
            Attempts(partial(self._episode, self._model, self._config.gconfig, "rollout"), fatal=FATAL),
            screening=Screening(
                drop_equal_rewards=self._config.rollout.filter_groups_with_same_reward,
                patience=max(2, self.control.groups),
                equal_patience=32 * self.control.groups,
            ),
            first=self._version,
            total=job.total_steps,
            groups_in=job.groups_in if job.loader is not None else None,
            restored=restored,
            store=None if self._bank is None else _Durable(self._bank),
            on_dropped=lambda environment, index: self.progress[environment].settle(index),
        )

    def _restore(self, job: Job, note: Callable[[str], None]) -> list[RolloutGroup]:
        """What the bank has of an earlier life, in the order of the problems."""
        if self._bank is None:
            return []
        age = self._config.rollout.bank.max_age if self._config.rollout.bank else None
        found = self._bank.recover(job.steps_done, version=self._version, max_age=age)
        if strange := {group.environment for group in found.groups} - self.progress.keys():
            note(f"the bank has groups of environments that this run has not, and leaves them: {', '.join(strange)}")
        known = [group for group in found.groups if group.environment not in strange]
        if known:
            note(f"{len(known)} finished groups come from the bank")
        return sorted(known, key=lambda group: group.index)

    def _keeping(self, buckets: Iterable[WeightBucket]) -> Iterator[WeightBucket]:
        """The buckets, of which copies stay."""
        for bucket in buckets:
            tensors = {name: tensor.clone() for name, tensor in bucket.tensors.items()}
            self._kept.append(WeightBucket(tensors, bucket.adapter_scaling))
            yield bucket

    def _restore_replica(self, rank: int) -> None:
        """A replica was started again: it gets the weights that the others have."""
        self._model.replicas.install(rank, self._kept, self._version)

    def _episode(
        self,
        model: InferenceInterface,
        section: GenerationConfig,
        purpose: str,
        agent: Agent,
        row: Row,
        index: int,
        attempt: int,
    ) -> ModelEpisode:
        named = purpose if self._alone else f"{purpose}/{agent.name}"

        def sampling(prompt_length: int, call: int) -> SamplingParams:
            what = f"{named}/{call}" if call else named
            return sampling_params(section, prompt_length, sample_seed(self._config.seed, what, index, attempt))

        return ModelEpisode(row, attempt, model, tokenizer=self._tokenizer, rewards=self._rewards, sampling=sampling)


@dataclass(frozen=True)
class _Durable:
    """The bank, as the pipeline wants it."""

    bank: RolloutBank

    async def append(self, group: RolloutGroup) -> None:
        await asyncio.wrap_future(self.bank.append(group))


def open_bank(job: Job, note: Callable[[str], None]) -> RolloutBank | None:
    """The bank of the run, if it has one. What an earlier run of the same name left in the run's own folder has been
    set aside, unless this run goes on from it.

    Raises:
        BankError: another run writes it, or it cannot be used.
        OSError: it cannot be written.
    """
    section = job.config.rollout.bank
    if section is None:
        return None
    folder = job.folder / BANK if section.path is None else Path(section.path).expanduser()
    return RolloutBank.open(folder, log_probs=section.log_probs, max_bytes=section.max_bytes, note=note)


def _progress(job: Job) -> dict[str, Progress]:
    """How far each environment is."""
    state = job.resume.state if job.resume else None
    found = {agent.name: Progress() for agent, _ in job.environments}
    for name in found:
        if state is not None and name in state.environments:
            found[name] = Progress.of(state.environments[name])
        elif state is not None and job.loader is not None:  # of before there were environments
            found[name] = Progress(state.prompts)
    return found
