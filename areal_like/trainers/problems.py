"""What a run is trained on and measured on: the rows of a data set, or environments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from areal_like.alloc import Diagnostic, DiagnosticError
from areal_like.config import RLConfig, TrainDatasetConfig
from areal_like.data.loader import RowLoader
from areal_like.data.prompts import filter_by_length
from areal_like.data.rewards import Reward
from areal_like.data.rows import Row
from areal_like.preflight.flow import groups_a_step
from areal_like.rollout.agents.base import EvaluationAgent, GroupedRolloutGenerator
from areal_like.rollout.agents.environment_file import Environments, load_environments
from areal_like.rollout.agents.rows import DatasetAgent
from areal_like.rollout.rewards import RewardPool

__all__ = ["Problems", "choose_problems"]

IN_CODE = "code"
"""Value of `rollout.environments`: the script has them."""


@dataclass
class Problems:
    """Attributes:
    environments: that are trained on, each with its groups of a batch.
    evaluations: that are measured, each with the number of its problems; all it has when None.
    loader: the order of the rows; None where environments pose the problems.
    """

    environments: list[tuple[GroupedRolloutGenerator, int]] = field(default_factory=list)
    evaluations: list[tuple[EvaluationAgent, int | None]] = field(default_factory=list)
    loader: RowLoader | None = None


def choose_problems(
    config: RLConfig,
    rows: Sequence[Row] | None,
    reward: Reward | None,
    valid_rows: Sequence[Row] | None,
    environments: Environments | None,
    tokenizer: Any,
    notes: list[str],
) -> Problems:
    """Environments, those given or those of `rollout.environments`; without any, the rows.

    Args:
        notes: what the user should know is added.

    Raises:
        ConfigError: the environment file is wrong, or a batch cannot hold a group of each environment.
        DiagnosticError: no row is short enough, or there are too few for a batch.
        RewardError: reward processes will not find the function.
        ValueError: neither rows nor environments, or rows without a reward.
    """
    found = Problems()
    if valid_rows is not None and config.valid_dataset is not None:
        if reward is None:
            raise ValueError("valid_rows need a reward")
        valid_rows = _fitting(valid_rows, tokenizer, config.valid_dataset, notes)
        found.evaluations.append((DatasetAgent(valid_rows, reward, name="valid_dataset", shuffle=False), None))
    if environments is None and config.rollout.environments == IN_CODE:
        raise ValueError("rollout.environments is code, and the script gives no environments to the trainer")
    if environments is None and config.rollout.environments is not None:
        environments = load_environments(config.rollout.environments, seed=config.seed)
        notes += [d.render() for d in environments.diagnostics]
    if environments is not None:
        found.evaluations += [(agent, config.evaluator.prompts_per_environment) for agent in environments.evaluation]
        found.environments += environments.training(groups_a_step(config))
        return found
    if rows is None or reward is None:
        raise ValueError("without environments a run needs rows and their reward")
    RewardPool.check(reward)
    found.loader = loader = _loader(config, _fitting(rows, tokenizer, config.train_dataset, notes))
    agent = DatasetAgent(
        loader.rows,
        reward,
        name="train_dataset",
        batch_size=loader.batch_size,
        shuffle=loader.shuffle,
        drop_last=loader.drop_last,
        seed=loader.seed,
    )
    found.environments.append((agent, loader.batch_size))
    return found


def _fitting(rows: Sequence[Row], tokenizer: Any, section: TrainDatasetConfig, notes: list[str]) -> Sequence[Row]:
    filtered = filter_by_length(rows, tokenizer, section.max_length)
    if filtered.dropped:
        notes.append(str(filtered))
    return filtered.rows


def _loader(config: RLConfig, rows: Sequence[Row]) -> RowLoader:
    section, batch_size = config.train_dataset, groups_a_step(config)
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
