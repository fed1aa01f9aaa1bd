"""Files that load, what is in them, and where their keys stand."""

from __future__ import annotations

import pickle
import subprocess
import sys
import textwrap
from pathlib import Path

import pydantic
import pytest

from areal_like.config import ConfigError, RLConfig, load_config
from areal_like.config.docs import markdown

ROOT = Path(__file__).parents[2]
AREAL = Path(__file__).parent / "data" / "areal_gsm8k_grpo_megatron.yaml"
CPU = ROOT / "examples" / "math" / "gsm8k_grpo_cpu.yaml"
MINIMAL = """\
experiment_name: e
trial_name: t
rollout: {backend: "huggingface:d1"}
actor:
  backend: megatron:d1
  path: some/model
  optimizer: {lr: 1e-5}
train_dataset: {path: reasoning_gym/chain_sum, batch_size: 4}
"""


def load(tmp_path: Path, text: str, *overrides: str) -> RLConfig:
    file = tmp_path / "run.yaml"
    file.write_text(textwrap.dedent(text), encoding="utf-8")
    return load_config(file, list(overrides))


def test_the_keys_of_areal_load_as_they_are() -> None:
    config = load_config(AREAL, [])
    assert (
        config.actor.optimizer is not None and config.actor.optimizer.lr == 3e-6 and config.actor.optimizer.eps == 1e-8
    )
    assert config.actor.reward_norm is not None and config.actor.reward_norm.group_size == 4
    assert config.rollout.consumer_batch_size == 256 and config.rollout.max_head_offpolicyness == 2
    assert config.ref is not None and config.ref.backend == "megatron:d4p1t1" and config.ref.dtype == "bfloat16"
    assert config.tokenizer_path == "Qwen/Qwen2.5-1.5B-Instruct"
    assert config.valid_dataset is not None and config.valid_dataset.split == "test"
    assert config.scheduler.type is None and config.gconfig.max_new_tokens == 1024


def test_what_has_no_effect_is_said_once_a_section_and_a_rollout_engine_that_is_missing_forbids_the_run() -> None:
    config = load_config(AREAL, [])
    infos = [d for d in config.diagnostics if d.severity == "info"]
    assert all(d.code == "AL812" and d.line and d.column and d.file == str(AREAL) for d in infos)
    named = {d.key: d.message for d in infos}
    assert len(named) == len(infos) == 9
    assert "sglang, vllm have no effect" in named["sglang"]
    with pytest.raises(ConfigError) as raised:
        config.ensure_runnable()
    (error,) = raised.value.diagnostics
    assert error.code == "AL205" and error.key == "rollout.backend" and "sglang has no engine" in error.message
    assert error.line is not None and error.column is not None
    line = AREAL.read_text().splitlines()[error.line - 1]
    assert line[error.column - 1 :].startswith("sglang:d4p1t1")


@pytest.mark.parametrize("path", sorted((ROOT / "examples" / "math").glob("*.yaml")), ids=lambda p: p.name)
def test_every_example_loads(path: Path) -> None:
    config = load_config(path, [])
    assert [d for d in config.diagnostics if d.severity != "error"] == []
    if "sglang" in config.rollout.backend:
        assert [d.code for d in config.diagnostics] == ["AL205"]
    else:
        config.ensure_runnable()
        assert config.rollout.backend.startswith("huggingface:")


def test_the_embedded_default_is_the_measured_one() -> None:
    config = load_config(CPU, [])
    assert (config.device, config.actor.dtype, config.total_train_steps) == ("cpu", "float32", 13)
    assert config.actor.optimizer is not None
    assert (config.actor.optimizer.lr, config.actor.optimizer.gradient_clipping) == (1e-5, 1.0)
    assert (config.train_dataset.batch_size, config.gconfig.n_samples, config.gconfig.max_new_tokens) == (8, 8, 16)
    assert config.train_dataset.kwargs == {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    assert config.actor.reward_norm is not None and config.actor.reward_norm.group_size == 8
    assert config.actor.mb_spec.max_tokens_per_mb == 2048


def test_the_names_are_written_once_and_every_section_has_them(tmp_path: Path) -> None:
    config = load(tmp_path, MINIMAL, "cluster.fileroot=/runs")
    assert (config.saver.experiment_name, config.saver.trial_name, config.saver.fileroot) == ("e", "t", "/runs")
    assert (config.actor.experiment_name, config.rollout.tokenizer_path) == ("e", "some/model")


def test_locations(tmp_path: Path) -> None:
    config = load(tmp_path, MINIMAL, "gconfig.top_p=0.5")
    file = str(tmp_path / "run.yaml")
    assert config.location("actor.backend") == (file, 5, 3)
    assert config.location("actor.optimizer.lr") == (file, 7, 15)
    assert config.location("gconfig.top_p") == ("<command line>", 1, 1)
    assert config.location("actor.dtype") == (file, 4, 1), "a key that is not given stands where its section stands"
    assert config.location("tokenizer_path") == (file, 6, 3), "an inherited value stands where it is written"
    assert str(config.location("actor.path")) == f"{file}:6:3"
    for unknown in ("actor.backen", "", "nonsense", "actor.backend.x"):
        with pytest.raises(KeyError):
            config.location(unknown)


def test_a_configuration_is_immutable_and_travels_to_workers(tmp_path: Path) -> None:
    config = load(tmp_path, MINIMAL)
    with pytest.raises(pydantic.ValidationError):
        config.actor.path = "x"
    copy = pickle.loads(pickle.dumps(config))
    assert copy == config and copy.location("actor.path") == config.location("actor.path")
    assert pickle.loads(pickle.dumps(config.actor)) == config.actor


@pytest.mark.parametrize("written", ["", "null", "''", "${actor.backend}"])
@pytest.mark.parametrize("role", ["ref", "critic"])
def test_an_empty_backend_inherits_the_actors(tmp_path: Path, role: str, written: str) -> None:
    config = load(tmp_path, MINIMAL + f"{role}:\n  backend: {written}\n", "actor.backend=megatron:d2")
    section = getattr(config, role)
    assert section.backend == "megatron:d2" and section.path == "some/model"
    assert load(tmp_path, MINIMAL, role + "={}").location(f"{role}.backend").line == 5


def test_a_critic_loads_and_no_run_starts_with_it(tmp_path: Path) -> None:
    config = load(tmp_path, MINIMAL, "critic={}")
    with pytest.raises(ConfigError, match="AL815"):
        config.ensure_runnable()


def test_yaml_numbers_words_merges_and_anchors(tmp_path: Path) -> None:
    text = MINIMAL.replace("lr: 1e-5", "lr: 1e-5, eps: 1E-7, beta1: .5, weight_decay: 0") + (
        "recover: {mode: off}\n"
        "saver: &often {freq_steps: 1_000, freq_epochs: 2}\n"
        "evaluator: {<<: *often, freq_epochs: 3}\n"
        "valid_dataset: {path: x, split: 'no', kwargs: {a: 0x10, b: 010, c: [yes, 'on', true, ~], d: 2026-01-02}}\n"
    )
    config = load(tmp_path, text)
    assert config.actor.optimizer is not None
    assert (config.actor.optimizer.eps, config.actor.optimizer.beta1) == (1e-7, 0.5)
    assert config.recover.mode == "off" and config.evaluator.freq_steps == 1000 and config.evaluator.freq_epochs == 3
    assert config.valid_dataset is not None and config.valid_dataset.split == "no"
    assert config.valid_dataset.kwargs == {"a": 16, "b": 10, "c": ["yes", "on", True, None], "d": "2026-01-02"}


def test_infos_name_only_what_differs_from_doing_nothing(tmp_path: Path) -> None:
    text = MINIMAL + "stats_logger: {wandb: {mode: disabled}}\nperf_tracer: {enabled: false}\nvllm: null\n"
    assert load(tmp_path, text).diagnostics == ()
    found = load(tmp_path, text, "stats_logger.wandb.mode=online").diagnostics
    assert [(d.code, d.key, d.file) for d in found] == [("AL812", "stats_logger.wandb", str(tmp_path / "run.yaml"))]


def test_the_reference_page_is_the_one_of_this_schema() -> None:
    assert (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8") == markdown()


def test_nothing_heavy_is_imported_and_a_load_is_fast() -> None:
    code = f"""
import sys, time
from areal_like.config import load_config
start = time.process_time()
load_config({str(AREAL)!r}, ["actor.backend=megatron:d2t2"])
took = time.process_time() - start
heavy = [m for m in ("torch", "transformers", "numpy", "datasets") if m in sys.modules]
assert not heavy, heavy
print(took)
"""
    took = float(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout)
    assert took < 0.3, "seconds of computing for one load"
