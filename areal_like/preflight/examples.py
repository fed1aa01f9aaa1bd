"""The job that the examples of the rules change, and what the check says about one of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from areal_like.alloc import Diagnostic
from areal_like.config.loader import examine
from areal_like.preflight.check import check_job
from areal_like.preflight.cluster import parse_cluster
from areal_like.preflight.job import make_job
from areal_like.preflight.registry import Example
from areal_like.spec import ModelSpec

__all__ = ["BASE_JOB", "BASE_MODEL", "findings"]

FILES = Path(__file__).parent / "example_files"
"""What `{examples}` in an example stands for: runs that were interrupted."""

BASE_JOB = """\
experiment_name: example
trial_name: rules
device: cuda
cluster: {n_gpus_per_node: 8}
rollout: {backend: "huggingface:d4", max_concurrent_rollouts: 32}
gconfig: {n_samples: 8, max_new_tokens: 1024}
actor:
  backend: megatron:d4
  path: Qwen/Qwen3-0.6B
  mb_spec: {max_tokens_per_mb: 8192}
  optimizer: {lr: 1e-6}
  ppo_n_minibatches: 1
  reward_norm: {mean_level: group, std_level: group}
train_dataset: {path: openai/gsm8k, batch_size: 32, max_length: 1024}
"""
"""No rule has anything to say about it."""

BASE_MODEL: dict[str, Any] = {
    "model_type": "qwen3",
    "num_hidden_layers": 28,
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 3072,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
    "max_position_embeddings": 40960,
}
"""The numbers of Qwen/Qwen3-0.6B."""


def findings(example: Example) -> tuple[Diagnostic, ...]:
    """What loading and the rules find in an example."""
    text = BASE_JOB if example.text is None else example.text
    changes = [change.replace("{examples}", str(FILES)) for change in example.changes]
    config, found, _ = examine("job.yaml", changes, text=text)
    if config is None:
        return found
    spec = ModelSpec.from_config({**BASE_MODEL, **dict(example.model)}) if example.model else None
    cluster = parse_cluster(example.cluster, config)
    return (*found, *check_job(make_job(config, spec=spec, cluster=cluster)))
