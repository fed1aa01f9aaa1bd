"""Does the first step depend on the layout? One set of rollouts, one update under each layout, figures compared.

    python benchmarks/layout_agreement.py [--config FILE] [--layouts A B ...] [--compare device:dtype ...] [--json FILE]

Answers are drawn once by the embedded engine; then, for each layout, the actor of the configuration is started,
computes the log-probabilities before the update, and makes the first optimizer step. `--compare cuda:bfloat16` adds the
first layout on another device or in another dtype. Exits with 1 when a figure differs from the first layout's by more
than the tolerance: a relative 1e-4 in float32 on one device, 2e-2 in bfloat16.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from areal_like.algorithms import compute_advantages
from areal_like.algorithms.settings import advantage_settings, policy_loss
from areal_like.alloc import ModelAllocation
from areal_like.config import RLConfig, load_config
from areal_like.data.batch import PackedBatch
from areal_like.data.collate import Trajectory, collate
from areal_like.data.datasets import load_rows
from areal_like.data.models import resolve_model
from areal_like.data.prompts import encode_prompt, load_tokenizer
from areal_like.data.rewards import default_reward, get_reward
from areal_like.data.rows import Asker
from areal_like.engines.base import GenerationRequest
from areal_like.engines.huggingface.engine import HuggingFaceEngine
from areal_like.rollout.episode import sample_seed
from areal_like.trainers.roles import Actor
from areal_like.trainers.sampling import sampling_params
from areal_like.trainers.startup import prepare

TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-2}
LAYOUTS = ["megatron:d1", "megatron:d2", "megatron:d1t3", "megatron:d1p2", "megatron:d1p2t3"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="examples/math/gsm8k_grpo_cpu.yaml")
    parser.add_argument("--layouts", nargs="+", default=LAYOUTS)
    parser.add_argument("--compare", nargs="*", default=[], metavar="DEVICE:DTYPE")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    base = load_config(arguments.config)
    batch = draw(base)
    reward = float(batch.sequences["rewards"].mean())
    print(f"{len(batch)} answers, {batch.input_ids.numel()} tokens, mean reward {reward:.3f}")
    runs = [(layout, base.device, base.actor.dtype) for layout in arguments.layouts]
    runs += [(arguments.layouts[0], *other.split(":")) for other in arguments.compare]
    print("layout               device dtype              loss    grad norm  logp rms worst rel.      s")
    results: list[dict[str, Any]] = []
    for layout, device, dtype in runs:
        results.append(first_step(arguments.config, layout, device, dtype, batch))
        result, first = results[-1], results[0]
        result["worst"] = max(abs(result[k] - first[k]) / abs(first[k]) for k in ("loss", "grad_norm"))
        result["passed"] = result["worst"] <= TOLERANCE[dtype]
        print(
            f"{layout:<20} {device:<6} {dtype:<9} {result['loss']:>13.8f} {result['grad_norm']:>12.6f} "
            f"{result['log_prob_rms']:>9.1e} {result['worst']:>10.1e} {result['seconds']:>6.1f}"
            f"  {'ok' if result['passed'] else 'DIFFERS'}",
            flush=True,
        )
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2))
    return 0 if all(r["passed"] for r in results) else 1


def draw(config: RLConfig) -> PackedBatch:
    """One batch of rewarded answers to the first prompts of the configuration."""
    folder = str(resolve_model(config.actor.path))
    tokenizer = load_tokenizer(folder)
    rows = load_rows(config.train_dataset, seed=config.seed, asker=Asker("train_dataset", config.location))
    prompts = [(encode_prompt(rows[i], tokenizer), rows[i]) for i in range(config.train_dataset.batch_size)]
    requests = [
        GenerationRequest(ids, sampling_params(config.gconfig, len(ids), sample_seed(config.seed, "rollout", p, s)))
        for p, (ids, _) in enumerate(prompts)
        for s in range(config.gconfig.n_samples)
    ]
    allocation = ModelAllocation.parse("huggingface:d1")
    engine = HuggingFaceEngine(allocation, config.rollout, folder, folder, "cpu", config.seed)
    engine.initialize()
    completions = engine.generate(requests)
    engine.close()
    reward = get_reward(default_reward(config.train_dataset.path))
    trajectories = []
    for number, completion in enumerate(completions):
        ids, row = prompts[number // config.gconfig.n_samples]
        text = tokenizer.decode(completion.token_ids, skip_special_tokens=True)
        trajectories.append(
            Trajectory(
                ids,
                completion.token_ids,
                completion.log_probs,
                completion.versions,
                reward(tokenizer.decode(ids), text, row),
                number // config.gconfig.n_samples,
            )
        )
    return collate(trajectories)


def first_step(file: str, layout: str, device: str, dtype: str, batch: PackedBatch) -> dict[str, Any]:
    """Loss and gradient norm of the first update under a layout."""
    overrides = [f"actor.backend={layout}", f"device={device}", f"actor.dtype={dtype}"]
    if device != "cpu":
        overrides.append("actor.enable_tree_training=false")  # the attention of GPUs has it not
    config = load_config(file, overrides)
    rows = load_rows(config.train_dataset, seed=config.seed, asker=Asker("train_dataset", config.location))
    start = time.monotonic()
    job = prepare(config, rows, get_reward(default_reward(config.train_dataset.path)), None)
    seat, section = job.placement.actor, job.config.actor
    settings = advantage_settings(section, n_samples=config.gconfig.n_samples)
    log_dir = Path(tempfile.mkdtemp(prefix="areal-like-agreement-"))
    common: dict[str, Any] = {"device": job.placement.device, "seed": config.seed, "log_dir": log_dir}
    actor = Actor("actor", section, seat, total_steps=job.total_steps, **common)
    with actor.workers:
        actor.wait_until_ready(timeout=600)
        batch = batch.select(range(len(batch)))
        batch.tokens["prox_log_probs"] = actor.log_probs(batch, section.temperature)
        batch.tokens["advantages"] = compute_advantages(batch, settings)
        figures = actor.update(batch, policy_loss(section), section)
    drawn = batch.tokens["loss_mask"] != 0
    difference = (batch.tokens["prox_log_probs"] - batch.tokens["old_log_probs"])[drawn]
    return {
        "layout": layout,
        "device": device,
        "dtype": dtype,
        "loss": figures["loss"],
        "grad_norm": figures["grad_norm"],
        # how far the trainer's log-probabilities are from those the answers were drawn with
        "log_prob_rms": float(difference.pow(2).mean().sqrt()),
        "seconds": time.monotonic() - start,
    }


if __name__ == "__main__":
    sys.exit(main())
