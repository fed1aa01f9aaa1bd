"""The whole file of a reinforcement-learning run."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import PrivateAttr

from areal_like.alloc import Diagnostic
from areal_like.config import paths
from areal_like.config.algorithm import ActorConfig, CriticConfig, RefConfig
from areal_like.config.fields import REQUIRED, Section, key
from areal_like.config.findings import ConfigError, Location
from areal_like.config.generation import GenerationConfig
from areal_like.config.running import (
    ClusterConfig,
    EvaluatorConfig,
    PerfTracerConfig,
    RecoverConfig,
    RolloutConfig,
    SaverConfig,
    SchedulerConfig,
    StatsLoggerConfig,
    TrainDatasetConfig,
    ValidDatasetConfig,
)

_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"
_OTHER_ENGINE = "no engine of this version reads these options"

AT_START = frozenset({"AL205", "AL815"})
"""Findings that let a file load, so that it can be checked and explained, but no run start."""


class RLConfig(Section):
    """One run; AReaL's `GRPOConfig`."""

    experiment_name: str = key(
        REQUIRED, "Names the folder of the experiment: letters, digits, dot, dash, underscore.", pattern=_NAME
    )
    trial_name: str = key(REQUIRED, "Names the folder of this trial within the experiment.", pattern=_NAME)
    seed: int = key(1, "Seed of weights, data order and sampling.", ge=0, lt=2**32)
    device: Literal["auto", "cpu", "cuda"] = key("auto", "Where models run; auto takes GPUs when torch sees one.")
    total_train_epochs: int = key(1, "Passes over train_dataset.", unit="epochs", ge=1)
    total_train_steps: int | None = key(None, "End after this many steps, if epochs last longer.", unit="steps", ge=1)
    total_train_n_seqs: int | None = key(
        None,
        "End after this many sequences.",
        unit="sequences",
        ge=1,
        unsupported_unless=(None,),
        why="a run is bounded by total_train_epochs and total_train_steps",
    )
    tokenizer_path: str = key("", "Tokenizer; that of actor.path when empty.", inherits="actor.path")
    enable_offload: bool = key(
        False,
        "All three `megatron.*_offload` switches of actor and ref: a model waits in host memory between its uses.",
    )
    cluster: ClusterConfig = key(ClusterConfig, "The machine.")
    scheduler: SchedulerConfig = key(SchedulerConfig, "What starts the processes.")
    rollout: RolloutConfig = key(REQUIRED, "The rollout engine.")
    gconfig: GenerationConfig = key(GenerationConfig, "Sampling of rollouts.")
    eval_gconfig: GenerationConfig | None = key(None, "Sampling of evaluation; gconfig when null.")
    actor: ActorConfig = key(REQUIRED, "The policy that is trained.")
    ref: RefConfig | None = key(None, "The frozen policy that the KL divergence is measured from.")
    critic: CriticConfig | None = key(
        None, "A value model.", refused_at_start="this version trains without a value model (GRPO): remove `critic`"
    )
    sglang: dict[str, Any] | None = key(None, "Options of SGLang servers.", no_effect=_OTHER_ENGINE)
    vllm: dict[str, Any] | None = key(None, "Options of vLLM servers.", no_effect=_OTHER_ENGINE)
    train_dataset: TrainDatasetConfig = key(REQUIRED, "Prompts to train on.")
    valid_dataset: ValidDatasetConfig | None = key(None, "Prompts to measure on.")
    saver: SaverConfig = key(SaverConfig, "When the actor is saved.")
    recover: RecoverConfig = key(RecoverConfig, "Continuing an interrupted run.")
    evaluator: EvaluatorConfig = key(EvaluatorConfig, "When the policy is measured.")
    stats_logger: StatsLoggerConfig = key(StatsLoggerConfig, "Where figures go.")
    perf_tracer: PerfTracerConfig | None = key(None, "AReaL's performance traces.")

    _locations: dict[str, Location] = PrivateAttr(default_factory=dict)
    _diagnostics: tuple[Diagnostic, ...] = PrivateAttr(default=())

    @property
    def diagnostics(self) -> tuple[Diagnostic, ...]:
        """What loading found and did not refuse: infos, warnings, and errors that only forbid a run."""
        return self._diagnostics

    def ensure_runnable(self) -> None:
        """Refuse (ConfigError) what loads and cannot run in this version; every run calls this before it starts."""
        errors = [d for d in self._diagnostics if d.severity == "error"]
        if errors:
            raise ConfigError(errors)

    def location(self, path: str) -> Location:
        """Where a key such as actor.backend stands; for one that was not given, the section around it.

        Raises:
            KeyError: there is no such key in the schema or the file.
        """
        steps = paths.split(path) or ()
        if not steps or (path not in self._locations and paths.find(RLConfig, steps) is None):
            raise KeyError(path)
        for end in range(len(steps), -1, -1):
            found = self._locations.get(paths.join(steps[:end]))
            if found is not None:
                return found
        return Location("<not from a file>", 1, 1)

    def attach(self, locations: dict[str, Location], diagnostics: tuple[Diagnostic, ...]) -> None:
        """For the loader: remember where keys stand and what was found."""
        self._locations, self._diagnostics = locations, diagnostics
