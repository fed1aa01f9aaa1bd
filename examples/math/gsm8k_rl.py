"""Train a language model on mathematical questions: gsm8k_rl.py --config FILE [key=value ...]

The dataset and its reward follow from `train_dataset.path`; give `run` a `reward=` of your own to change that.
"""

from __future__ import annotations

import argparse
import sys

from areal_like.trainers.launch import run


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True, help="YAML file")
    parser.add_argument("--skip-check", action="append", default=[], metavar="CODE", help="start in spite of an error")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="values that replace those of the file")
    arguments = parser.parse_args()
    return run(arguments.config, arguments.overrides, skip_checks=arguments.skip_check)


if __name__ == "__main__":
    sys.exit(main())
