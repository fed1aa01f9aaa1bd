"""One run from a file: load, check, fetch, train; every fault in words and with an exit status."""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence

from areal_like.alloc import DiagnosticError
from areal_like.config import load_config
from areal_like.data.datasets import load_rows
from areal_like.data.rewards import Reward, RewardError, default_reward, get_reward
from areal_like.data.rows import Asker
from areal_like.rollout.agents.environment_file import Environments
from areal_like.rollout.bank import BankError
from areal_like.rollout.pipeline import EpisodesFailedError
from areal_like.runtime.local import WorkerError
from areal_like.trainers.rl import RLTrainer
from areal_like.trainers.startup import check_before_start

__all__ = ["run"]

FAILURES = (DiagnosticError, RewardError, WorkerError, EpisodesFailedError, BankError)
"""What ends a run, said in words."""


def run(
    path: str,
    overrides: Sequence[str] = (),
    *,
    reward: Reward | None = None,
    environments: Environments | None = None,
    skip_checks: Collection[str] = (),
) -> int:
    """Train as a YAML file says.

    Args:
        path: the file.
        overrides: `key=value`.
        reward: `reward(prompt, completion, row)`; by default the one that belongs to the dataset. Environments bring
            their own.
        environments: made in Python, with `rollout.environments: code`.
        skip_checks: codes of the check whose errors do not stop the run.

    Returns:
        0; 1 when the run failed; 2 when it cannot start; 130 when it was interrupted. What is wrong is on stderr.
    """
    try:
        config = load_config(path, overrides)
        check_before_start(config, skip_checks)  # before anything is fetched
        rows = valid_rows = None
        if config.rollout.environments is None:
            rows = load_rows(config.train_dataset, seed=config.seed, asker=Asker("train_dataset", config.location))
            reward = reward or get_reward(default_reward(config.train_dataset.path))
        if config.valid_dataset is not None:
            asker = Asker("valid_dataset", config.location)
            valid_rows = load_rows(config.valid_dataset, seed=config.seed, asker=asker)
            reward = reward or get_reward(default_reward(config.valid_dataset.path))
        with RLTrainer(config, rows, reward, valid_rows, environments=environments, skip_checks=skip_checks) as trainer:
            trainer.train()
    except (
        DiagnosticError,
        RewardError,
        WorkerError,
        EpisodesFailedError,
        BankError,
    ) as error:  # they say everything that is to be said
        print(error, file=sys.stderr)
        return 2 if isinstance(error, DiagnosticError) else 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return 0
