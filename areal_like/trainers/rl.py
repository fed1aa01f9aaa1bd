"""`RLTrainer`: group-relative policy optimisation, from prompts to an updated policy, step after step.

One step (the order of AReaL's `PPOTrainer.train`):

    a batch of rollouts -> reference log-probabilities -> log-probabilities before the update -> advantages -> update
    -> pause generation -> new weights and version -> save -> recovery checkpoint -> evaluate -> figures
    -> resume generation
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from types import TracebackType

from areal_like.algorithms import compute_advantages
from areal_like.algorithms.settings import advantage_settings, policy_loss
from areal_like.alloc import Diagnostic, DiagnosticError
from areal_like.config import RLConfig
from areal_like.data.batch import PackedBatch
from areal_like.data.rewards import Reward
from areal_like.data.rows import Row
from areal_like.rollout.agents.environment_file import Environments
from areal_like.rollout.bank import RolloutBank
from areal_like.spec.recovery import RunState
from areal_like.trainers.batches import log_prob_figures, rollout_figures, to_batch
from areal_like.trainers.evaluation import evaluate
from areal_like.trainers.generation import Generation, open_bank
from areal_like.trainers.recording import RunRecorder
from areal_like.trainers.recovery import Recovery
from areal_like.trainers.startup import Engines, prepare, start_engines
from areal_like.trainers.timers import Timer

__all__ = ["RLTrainer"]


class RLTrainer:
    """Trains the actor of a configuration on the rewards of its own answers.

    Use it as a context manager: leaving ends every process, at once after an exception (Ctrl-C included).

    Args:
        config: from `load_config`.
        rows: prompts with what their reward is computed from; None where environments pose the problems.
        reward: `reward(prompt, completion, row)`, a finite number; a function of a module's top level.
        valid_rows: rows of the evaluation, besides the environments that are for evaluation.
        environments: made in Python, instead of those that `rollout.environments` names.
        skip_checks: codes of the check whose errors do not stop the run.

    Raises:
        DiagnosticError: everything that is known to stop the run, before any process starts.
    """

    def __init__(
        self,
        config: RLConfig,
        rows: Sequence[Row] | None = None,
        reward: Reward | None = None,
        valid_rows: Sequence[Row] | None = None,
        *,
        environments: Environments | None = None,
        skip_checks: Collection[str] = (),
    ) -> None:
        self.job = prepare(config, rows, reward, valid_rows, skip_checks, environments)
        self.config = self.job.config
        resume = self.job.resume
        self.version = resume.state.version if resume else 0
        self._prompts = resume.state.prompts if resume else 0
        self._engines: Engines | None = None
        self._generation: Generation | None = None
        self._bank: RolloutBank | None = None
        actor = self.config.actor
        try:
            self._loss = policy_loss(actor)
            self._advantages = advantage_settings(actor, n_samples=self.config.gconfig.n_samples)
        except ValueError as error:
            raise DiagnosticError([Diagnostic("AL816", "error", str(error), key="actor")]) from error
        self._saver = Timer(self.config.saver)
        self._evaluator = Timer(self.config.evaluator)

    def __enter__(self) -> RLTrainer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close(now=kind is not None)

    def close(self, *, now: bool = False) -> None:
        """End all processes; `now` does not wait for what they are doing. Safe to call twice."""
        if self._generation is not None:
            self._generation.close()
        if self._bank is not None:
            self._bank.close()
        if self._engines is not None:
            self._engines.close(now=now)

    def train(self) -> None:
        """Run all steps.

        Raises:
            RewardError, WorkerError, EpisodesFailedError, BankError, DiagnosticError: what stopped the run.
        """
        with RunRecorder(self.job) as recorder:
            if self.job.steps_done >= self.job.total_steps:
                recorder.note(f"nothing is left to do: step {self.job.steps_done} of {self.job.total_steps} is done")
                return
            with recorder.phase("start"):
                engines, generation = self._start(recorder)
                recovery = self._recovery(engines, generation)
            recorder.note(str(generation.control))
            for step in range(self.job.steps_done + 1, self.job.total_steps + 1):
                with recorder.step(step):
                    self._step(step, engines, generation, recovery, recorder)
                recovery.poll()  # the figures are on disk: the checkpoint may be complete
            recovery.finish()

    def _recovery(self, engines: Engines, generation: Generation) -> Recovery:
        return Recovery(
            self.config.recover,
            engines.actor,
            self.job.folder,
            steps_per_epoch=self.job.steps_per_epoch,
            total_steps=self.job.total_steps,
            on_complete=generation.checkpointed,
        )

    def _start(self, recorder: RunRecorder) -> tuple[Engines, Generation]:
        config = self.config
        self._bank = open_bank(self.job, recorder.note)  # its faults come before minutes of starting engines
        self._engines = engines = start_engines(self.job)
        self._generation = generation = Generation(
            self.job, engines.rollout, engines.rewards, self._bank, note=recorder.note
        )
        if self.job.resume is not None:
            engines.actor.load_checkpoint(self.job.resume.folder / "actor")
        if self.job.resume is not None or config.actor.init_from_scratch:
            # The rollout engine has loaded the weights of the folder.
            generation.pause()
            adapters_only = config.rollout.use_lora and not config.actor.init_from_scratch
            generation.update_weights(engines.actor.weights(adapters_only=adapters_only), self.version)
            engines.actor.rest()
            generation.resume()
        generation.start()
        return engines, generation

    def _step(
        self, step: int, engines: Engines, generation: Generation, recovery: Recovery, recorder: RunRecorder
    ) -> None:
        with recorder.phase("generation"):
            taken = generation.take(step)
        groups = taken.groups
        self._prompts += len(groups)
        batch = to_batch(groups)
        recorder.figures(taken.figures)
        for note in taken.notes:
            recorder.note(note)
        recorder.figures(rollout_figures(groups, batch, self.version))
        recorder.samples(step, groups)
        recorder.tokens(batch.input_ids.numel())
        self._add_log_probs(batch, engines, recorder)
        with recorder.phase("update"):
            batch.tokens["advantages"] = compute_advantages(batch, self._advantages)
            recorder.figures(engines.actor.update(batch, self._loss, self.config.actor), "actor/")
        with recorder.phase("weights"):
            generation.pause()
            self.version += 1
            buckets = engines.actor.weights(adapters_only=self.config.rollout.use_lora)
            generation.update_weights(buckets, self.version)
        self._save(step, engines, recorder)
        if recovery.due(step):
            with recorder.phase("checkpoint"):
                recovery.save(self._state(step, generation))
        engines.actor.rest()
        self._evaluate(step, generation, recorder)
        generation.resume()

    def _add_log_probs(self, batch: PackedBatch, engines: Engines, recorder: RunRecorder) -> None:
        """What the reference and the policy before its update say about the drawn tokens."""
        temperature = self.config.actor.temperature
        if engines.reference is not None:
            with recorder.phase("reference"):
                batch.tokens["ref_log_probs"] = engines.reference.log_probs(batch, temperature)
                engines.reference.rest()
        if self._loss.use_decoupled_loss or self._loss.recompute_log_probs:
            with recorder.phase("log_probs"):
                batch.tokens["prox_log_probs"] = engines.actor.log_probs(batch, temperature)
            recorder.figures(log_prob_figures(batch))

    def _save(self, step: int, engines: Engines, recorder: RunRecorder) -> None:
        last = step == self.job.total_steps
        if self._saver.due(step, self.job.steps_per_epoch) or (last and self._saver.active):
            with recorder.phase("save"):
                engines.actor.save(self.job.folder / "checkpoints" / f"step-{step:06d}")
                if self.config.actor.use_lora:  # beside the merged weights, the adapters for whoever has the model
                    engines.actor.save_adapter(self.job.folder / "adapters" / f"step-{step:06d}")

    def _evaluate(self, step: int, generation: Generation, recorder: RunRecorder) -> None:
        if not self.job.evaluations:
            return
        last = step == self.job.total_steps
        if self._evaluator.due(step, self.job.steps_per_epoch) or (last and self._evaluator.active):
            with recorder.phase("evaluation"):
                found = evaluate(self.job, generation)
            recorder.figures(found, "evaluation/")

    def _state(self, step: int, generation: Generation) -> RunState:
        """Where the run stands after a step, whatever the rollout engine has read ahead."""
        environments = {name: progress.state() for name, progress in generation.progress.items()}
        return RunState(step, self.version, self._prompts, self.job.data_state(step), environments)
