"""Names of Megatron-RL that are read as this system's."""

from __future__ import annotations

from pathlib import Path

import pytest

from areal_like.config import ConfigError, RLConfig, load_config, paths
from areal_like.config.aliases import ALIASES

CPU = (Path(__file__).parents[2] / "examples" / "math" / "gsm8k_grpo_cpu.yaml").read_text()


@pytest.fixture
def load(tmp_path):
    def make(text: str, *overrides: str) -> RLConfig:
        path = tmp_path / "run.yaml"
        path.write_text(text)
        return load_config(path, overrides)

    return make


@pytest.mark.parametrize(("alias", "path"), ALIASES.items(), ids=list(ALIASES))
def test_each_is_a_key_of_the_schema(alias: str, path: str) -> None:
    assert paths.find(RLConfig, paths.split(path) or ()) is not None


def test_in_a_file_and_on_the_command_line(load) -> None:
    config = load(
        f"{CPU}\ngrpo_clamp_eps_lower: 0.1\ngrpo_iterations: 3\nrl_generation_lag: 1.5\n",
        "grpo_clamp_eps_upper=0.3",
        "grpo_group_size=4",
        "rl_submission_granularity=G",
    )
    assert (config.actor.eps_clip, config.actor.eps_clip_higher, config.actor.update_iterations) == (0.1, 0.3, 3)
    assert (config.rollout.generation_lag, config.rollout.submission_granularity) == (1.5, "G")
    assert config.gconfig.n_samples == 4, "the command line replaces what the file says under the other name"
    told = [d.message for d in config.diagnostics if d.code == "AL818"]
    assert "grpo_iterations is read as actor.update_iterations" in told
    assert config.location("actor.update_iterations").line == CPU.count("\n") + 3


def test_both_names_of_one_key(load) -> None:
    with pytest.raises(ConfigError, match=r"grpo_group_size is gconfig\.n_samples, which is given too"):
        load(f"{CPU}\ngrpo_group_size: 4\n")


def test_a_wrong_value_is_said_of_the_key(load) -> None:
    with pytest.raises(ConfigError, match="must be at least 1, not 0"):
        load(f"{CPU}\ngrpo_iterations: 0\n")
    with pytest.raises(ConfigError, match="rollout"):
        load("rollout: 3\ngrpo_iterations: 1\nrl_generation_lag: 1\n")
