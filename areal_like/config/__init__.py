"""One YAML file, checked and typed: `load_config(path, overrides) -> RLConfig`."""

from __future__ import annotations

from areal_like.config.algorithm import ActorConfig, CriticConfig, NormConfig, RefConfig, RejectionSamplingConfig
from areal_like.config.experiment import RLConfig
from areal_like.config.findings import CODES, ConfigError, Location
from areal_like.config.generation import GenerationConfig
from areal_like.config.loader import load_config
from areal_like.config.megatron import DDPConfig, FP8Config, MegatronConfig
from areal_like.config.running import (
    ClusterConfig,
    EvaluatorConfig,
    RecoverConfig,
    RolloutConfig,
    SaverConfig,
    StatsLoggerConfig,
    TrainDatasetConfig,
    ValidDatasetConfig,
)
from areal_like.config.training import (
    MicroBatchConfig,
    OptimizerConfig,
    ProfilerConfig,
    TrainEngineConfig,
)

__all__ = [
    "CODES",
    "ActorConfig",
    "ClusterConfig",
    "ConfigError",
    "CriticConfig",
    "DDPConfig",
    "EvaluatorConfig",
    "FP8Config",
    "GenerationConfig",
    "Location",
    "MegatronConfig",
    "MicroBatchConfig",
    "NormConfig",
    "OptimizerConfig",
    "ProfilerConfig",
    "RLConfig",
    "RecoverConfig",
    "RefConfig",
    "RejectionSamplingConfig",
    "RolloutConfig",
    "SaverConfig",
    "StatsLoggerConfig",
    "TrainDatasetConfig",
    "TrainEngineConfig",
    "ValidDatasetConfig",
    "load_config",
]
