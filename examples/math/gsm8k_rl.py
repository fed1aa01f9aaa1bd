"""Train a language model on mathematical questions: gsm8k_rl.py --config FILE [key=value ...]"""

from __future__ import annotations

import argparse
import sys

from areal_like.alloc import DiagnosticError
from areal_like.config import load_config
from areal_like.data.datasets import load_rows
from areal_like.data.rewards import RewardError, default_reward, get_reward
from areal_like.data.rows import Asker
from areal_like.runtime.local import WorkerError
from areal_like.trainers.rl import RLTrainer
from areal_like.trainers.startup import check_before_start


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", required=True, help="YAML file")
    parser.add_argument("--skip-check", action="append", default=[], metavar="CODE", help="start in spite of an error")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="values that replace those of the file")
    arguments = parser.parse_args()
    try:
        config = load_config(arguments.config, arguments.overrides)
        check_before_start(config, arguments.skip_check)  # before anything is fetched
        rows = load_rows(config.train_dataset, seed=config.seed, asker=Asker("train_dataset", config.location))
        valid_rows = None
        if config.valid_dataset is not None:
            asker = Asker("valid_dataset", config.location)
            valid_rows = load_rows(config.valid_dataset, seed=config.seed, asker=asker)
        reward = get_reward(default_reward(config.train_dataset.path))
        with RLTrainer(config, rows, reward, valid_rows, skip_checks=arguments.skip_check) as trainer:
            trainer.train()
    except (DiagnosticError, RewardError, WorkerError) as error:  # they say everything that is to be said
        print(error, file=sys.stderr)
        return 2 if isinstance(error, DiagnosticError) else 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
