"""AReaL's and verl's training engines beside ours: one batch, one GPU, one run, each engine in a process of its own.

    python benchmarks/peers.py --areal SITE --verl SITE [--only areal-megatron verl-megatron] [--json FILE]

SITE is a folder that holds the peer's package and what it needs (`pip install --no-deps --target SITE areal ...`); it
goes before everything else on that process's path, so a peer may bring the versions that it pins. All train the same
shape (Qwen2.5-1.5B) from one random checkpoint on the same tokens, masks, advantages and old log-probabilities: four
micro-batches of 16,384 tokens in sequences of 1,024 and one optimizer step, through the engine's own update with its
own clipped policy loss:

    ours                  MegatronEngine.train_batch with GRPOLoss
    areal-megatron        MegatronPPOActor.ppo_update, AReaL's defaults
    areal-bridge          the same with bridge_type megatron-bridge instead of mbridge
    areal-fsdp            FSDPPPOActor.ppo_update
    verl-megatron         MegatronEngineWithLMHead.train_batch with ppo_loss, verl's defaults
    verl-megatron-fused   the same with verl's fused linear cross-entropy (use_fused_kernels)
    verl-fsdp             FSDPEngineWithLMHead.train_batch with ppo_loss

What differs from a peer's defaults is printed with its figures as `changed`: flash-attn is a compiled package of its
own, and where it is not installed the attention of TransformerEngine (Megatron) or FlexAttention (FSDP) is asked for,
and verl's recomputation of all activations, which its FSDP engine does by default, is off as it is in the others.
Three services for reports that AReaL imports (`swanlab`, `trackio`, `wandb`) are empty modules where they are missing;
nothing else of a peer is replaced. A peer that cannot run is reported with its exception. AReaL computes the policy's
entropy in every update; `--entropy` makes ours and verl's do the same. `--set KEY=VALUE` changes a key of our `actor`.

Figures of different runs are not comparable: only the ratio is a result.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
import types
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from train_step import COMMON, SHAPES, make_batch, run_engine, timed

PACKAGES = ("areal", "verl", "torch", "megatron-core", "mbridge", "megatron-bridge", "transformers")
PEERS = (
    "areal-megatron",
    "areal-bridge",
    "areal-fsdp",
    "verl-megatron",
    "verl-megatron-fused",
    "verl-fsdp",
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--areal", type=Path, help="folder with the package areal and what it needs")
    parser.add_argument("--verl", type=Path, help="folder with the package verl and what it needs")
    parser.add_argument("--only", nargs="+", choices=PEERS, default=PEERS, help="these peers alone")
    parser.add_argument("--layers", type=int, help="fewer layers than the shape has")
    parser.add_argument("--tokens", type=int, default=16384, help="tokens of a micro-batch")
    parser.add_argument("--seq", type=int, default=1024, help="tokens of a sequence")
    parser.add_argument("--micro", type=int, default=4, help="micro-batches of a step")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="of our actor")
    parser.add_argument(
        "--entropy", action="store_true", help="ours and verl's report the entropy; AReaL's always does"
    )
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu: to see how far a peer comes without one"
    )
    parser.add_argument("--timeout", type=int, default=240, help="seconds that one peer may take")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--worker", choices=PEERS, help="run one peer in this process, on the checkpoint in --folder")
    parser.add_argument("--folder", type=Path)
    a = parser.parse_args()
    a.model, a.profile = "dense", False
    if a.worker:
        a.json.write_text(json.dumps(run_worker(a)))
        return 0
    results = {"ours": run_engine(a)}
    print(json.dumps({"engine": "ours", **results["ours"]}), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(a, Path(folder))
        for name in a.only:
            site = a.areal if name.startswith("areal") else a.verl
            if site is None:
                continue
            results[name] = run_peer(a, name, site, Path(folder))
            print(json.dumps({"engine": name, **results[name]}), flush=True)
    report(results)
    if a.json:
        a.json.write_text(json.dumps(results, indent=2))
    return 0 if any("tok_s_gpu" in r for name, r in results.items() if name != "ours") else 1


def report(results: dict[str, dict[str, Any]]) -> None:
    ours = results["ours"]
    for name, theirs in results.items():
        if "failed" in theirs:
            print(f"{name}: does not run: {theirs['failed']}")
        elif name != "ours":
            speed, memory = ours["tok_s_gpu"] / theirs["tok_s_gpu"], ours["peak_gib"] / (theirs["peak_gib"] or 1)
            print(f"tokens/s: {speed:.3f} x {name}; peak memory: {memory:.3f} x {name}")


def write_checkpoint(a: argparse.Namespace, folder: Path) -> None:
    """A random model and a tokenizer of whole words as a Hugging Face folder: the peers start from one."""
    from tokenizers import Tokenizer, models
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    shape = {**COMMON, **SHAPES[a.model], "architectures": ["Qwen2ForCausalLM"]}
    if a.layers:
        shape["num_hidden_layers"] = a.layers
    (folder / "config.json").write_text(json.dumps(shape))
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.bfloat16)
    model.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(shape))
    words = Tokenizer(models.WordLevel({"<eos>": 0, "<unk>": 1}, unk_token="<unk>"))
    special = {"eos_token": "<eos>", "pad_token": "<eos>", "bos_token": "<eos>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=words, **special).save_pretrained(folder)


def run_peer(a: argparse.Namespace, name: str, site: Path, folder: Path) -> dict[str, Any]:
    """One peer in a process whose path begins with its own folder: its figures, or why there are none."""
    out = folder / f"{name}.json"
    command = [sys.executable, __file__, "--worker", name, "--folder", str(folder), "--json", str(out)]
    for option in ("tokens", "seq", "micro", "steps", "device"):
        command += [f"--{option}", str(getattr(a, option))]
    command += ["--entropy"] if a.entropy else []
    path = os.pathsep.join(filter(None, [str(site.resolve()), os.environ.get("PYTHONPATH")]))
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29531", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    try:
        done = subprocess.run(
            command,
            env={**os.environ, **alone, **meeting, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            timeout=a.timeout,
        )
    except subprocess.TimeoutExpired:
        return {"failed": f"no result after {a.timeout} s"}
    if done.returncode or not out.exists():
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        reasons = [line for line in lines if line and not line[0].isspace() and "Error" in line.split(":")[0]]
        return {"failed": (reasons or lines)[-1], "traceback": "\n".join(lines[-25:])}
    result: dict[str, Any] = json.loads(out.read_text())
    return result


def run_worker(a: argparse.Namespace) -> dict[str, Any]:
    start = time.monotonic()
    build = {"areal": _areal_fsdp if a.worker == "areal-fsdp" else _areal_megatron}
    build["verl"] = _verl_fsdp if a.worker == "verl-fsdp" else _verl_megatron
    step, figures, changed = build[a.worker.split("-")[0]](a)
    build_seconds = time.monotonic() - start
    seconds, peak = timed(step, a)
    return {
        "tok_s_gpu": round(a.micro * a.tokens / seconds),
        "peak_gib": round(peak, 2),
        "step_s": round(seconds, 4),
        "build_s": round(build_seconds, 1),
        **figures(),
        "changed": changed,
        "versions": {name: found for name in PACKAGES if (found := _version(name))},
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _rows(a: argparse.Namespace) -> dict[str, torch.Tensor]:
    """Our batch as rows `[sequences, tokens]`; what concerns a token stands at its own place."""
    batch = make_batch(a)
    rows = {"input_ids": batch.input_ids, **batch.tokens}
    return {name: value.view(-1, a.seq).to(a.device) for name, value in rows.items()}


# AReaL


def _empty_reporters() -> list[str]:
    """AReaL's package of trainers imports these when it is imported; its engines report to none of them."""
    missing = [name for name in ("swanlab", "trackio", "wandb") if importlib.util.find_spec(name) is None]
    for name in missing:
        sys.modules[name] = types.ModuleType(name)
    return [f"empty modules for {', '.join(missing)}"] if missing else []


def _areal_config(a: argparse.Namespace, backend: str, **settings: Any) -> Any:
    from areal.api.cli_args import MicroBatchSpec, OptimizerConfig, PPOActorConfig

    return PPOActorConfig(
        experiment_name="peers",
        trial_name="peers",
        path=str(a.folder),
        backend=f"{backend}:d1",
        dtype="bfloat16" if a.device == "cuda" else "float32",
        disable_dropout=True,
        mb_spec=MicroBatchSpec(max_tokens_per_mb=a.tokens),
        optimizer=OptimizerConfig(lr=1e-6, warmup_steps_proportion=0.0),
        ppo_n_minibatches=1,
        use_decoupled_loss=True,
        **settings,
    )


def _areal_megatron(a: argparse.Namespace) -> tuple[Any, Any, list[str]]:
    empty = _empty_reporters()
    from areal.api.cli_args import MegatronEngineConfig
    from areal.engine.megatron_engine import MegatronPPOActor

    settings: dict[str, Any] = {}
    if a.worker == "areal-bridge":  # on this path AReaL recomputes all activations unless these are None
        settings = dict.fromkeys(("recompute_granularity", "recompute_method", "recompute_num_layers"))
        settings["bridge_type"] = "megatron-bridge"
    engine = MegatronPPOActor(_areal_config(a, "megatron", megatron=MegatronEngineConfig(**settings)))
    step, figures = _areal(a, engine)
    changed = [f"megatron.{name}={value}" for name, value in settings.items()] + empty
    return step, lambda: {**figures(), **_megatron_facts(engine.model[0])}, changed


def _areal_fsdp(a: argparse.Namespace) -> tuple[Any, Any, list[str]]:
    changed = _empty_reporters()
    from areal.engine.fsdp_engine import FSDPPPOActor

    settings = {} if _flash_attention() else {"attn_impl": "flex_attention"}
    changed += [f"{name}={value}" for name, value in settings.items()]
    return (*_areal(a, FSDPPPOActor(_areal_config(a, "fsdp", **settings))), changed)


def _areal(a: argparse.Namespace, engine: Any) -> tuple[Any, Any]:
    from areal.api import FinetuneSpec, ParallelStrategy

    engine.create_process_group(ParallelStrategy())
    engine.initialize(None, FinetuneSpec(total_train_epochs=1, dataset_size=10**6, train_batch_size=1))
    rows = _rows(a)
    # AReaL's update expects what concerns a token at the place of the one before it (its compute_advantages does this).
    shifted = {name: value.roll(-1, dims=-1) for name, value in rows.items() if name != "input_ids"}
    count = rows["input_ids"].shape[0]
    zeros, rewards = torch.zeros_like(shifted["advantages"]), torch.ones(count, device=a.device)
    batch = {
        "input_ids": rows["input_ids"],
        "attention_mask": torch.ones_like(rows["input_ids"], dtype=torch.bool),
        "loss_mask": shifted["loss_mask"],
        "logprobs": shifted["old_log_probs"],
        "prox_logp": shifted["prox_log_probs"],
        "advantages": shifted["advantages"],
        "rewards": rewards,
        "tot_rewards": zeros,
        "kl_rewards": zeros,
    }
    trajectories = [{name: value[i : i + 1] for name, value in batch.items()} for i in range(count)]
    last: dict[str, float] = {}

    def step() -> None:
        engine.ppo_update(trajectories)
        last.update(engine.export_stats())

    def figures() -> dict[str, Any]:
        wanted = {"grad_norm": "grad_norm", "micro_batches": "num_micro_batches", "loss": "actor_loss/avg"}
        return {ours: next((v for k, v in last.items() if k.endswith(theirs)), None) for ours, theirs in wanted.items()}

    return step, figures


# verl


def _verl_model(a: argparse.Namespace, **settings: Any) -> Any:
    from verl.workers.config import HFModelConfig

    return HFModelConfig(path=str(a.folder), use_remove_padding=True, **settings)


def _verl_megatron(a: argparse.Namespace) -> tuple[Any, Any, list[str]]:
    from verl.workers.config import McoreEngineConfig, McoreOptimizerConfig
    from verl.workers.engine.megatron.transformer_impl import MegatronEngineWithLMHead

    fused = a.worker == "verl-megatron-fused"
    changed = ["use_fused_kernels=True"] if fused else []
    transformer: dict[str, Any] = {}
    if not _flash_attention():
        transformer["attention_backend"] = "fused"
        changed.append("override_transformer_config.attention_backend=fused")
    config = McoreEngineConfig(
        use_fused_kernels=fused, max_token_len_per_gpu=a.tokens, override_transformer_config=transformer
    )
    _start_process_group(a)
    optimizer = McoreOptimizerConfig(lr=1e-6, total_training_steps=10**6, lr_decay_style="constant")
    step, figures, engine = _verl(a, MegatronEngineWithLMHead, _verl_model(a), config, optimizer)
    return step, lambda: {**figures(), **_megatron_facts(engine.module[0])}, changed


def _verl_fsdp(a: argparse.Namespace) -> tuple[Any, Any, list[str]]:
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

    changed = ["enable_gradient_checkpointing=False"]
    settings: dict[str, Any] = {"enable_gradient_checkpointing": False}
    if not _flash_attention():
        settings["override_config"] = {"attn_implementation": "flex_attention"}
        changed.append("override_config.attn_implementation=flex_attention")
    config = FSDPEngineConfig(max_token_len_per_gpu=a.tokens, strategy="fsdp2")
    _start_process_group(a)
    optimizer = FSDPOptimizerConfig(lr=1e-6, total_training_steps=10**6)
    step, figures, _ = _verl(a, FSDPEngineWithLMHead, _verl_model(a, **settings), config, optimizer)
    return step, figures, changed


def _start_process_group(a: argparse.Namespace) -> None:
    if a.device == "cuda":
        torch.cuda.set_device(0)
    torch.distributed.init_process_group("cpu:gloo,cuda:nccl" if a.device == "cuda" else "gloo")


def _verl(a: argparse.Namespace, kind: Any, model: Any, config: Any, optimizer: Any) -> tuple[Any, Any, Any]:
    from functools import partial

    from verl import DataProto
    from verl.trainer.config import CheckpointConfig
    from verl.utils import tensordict_utils
    from verl.workers.config import ActorConfig
    from verl.workers.utils.losses import ppo_loss
    from verl.workers.utils.padding import left_right_2_no_padding

    engine = kind(
        model_config=model, engine_config=config, optimizer_config=optimizer, checkpoint_config=CheckpointConfig()
    )
    engine.initialize()
    rows = _rows(a)
    tokens, count = rows["input_ids"], rows["input_ids"].shape[0]
    # One token of prompt, the rest is the response; what concerns a response's token stands at its place in it.
    batch = DataProto.from_dict(
        {
            "input_ids": tokens,
            "attention_mask": torch.ones_like(tokens),
            "position_ids": torch.arange(a.seq, device=a.device).repeat(count, 1),
            "prompts": tokens[:, :1],
            "responses": tokens[:, 1:],
            "response_mask": rows["loss_mask"][:, 1:].long(),
            "advantages": rows["advantages"][:, 1:],
            "old_log_probs": rows["prox_log_probs"][:, 1:],
            "rollout_is_weights": (rows["prox_log_probs"] - rows["old_log_probs"])[:, 1:].exp(),
        },
        meta_info={"temperature": 1.0},
    )
    data = left_right_2_no_padding(batch.to_tensordict())
    settings = {
        "use_remove_padding": True,
        "use_dynamic_bsz": True,
        "max_token_len_per_gpu": a.tokens,
        "use_fused_kernels": config.use_fused_kernels,
        "calculate_entropy": a.entropy,
        "global_batch_size": count,
    }
    tensordict_utils.assign_non_tensor(data, **settings)
    actor = ActorConfig(strategy="megatron", use_dynamic_bsz=True, ppo_mini_batch_size=count, rollout_n=1)
    last: dict[str, Any] = {}

    def step() -> None:
        with engine.train_mode():
            last.update(engine.train_batch(data.copy(), loss_function=partial(ppo_loss, actor)))

    def figures() -> dict[str, Any]:
        norm = float(last["metrics"]["grad_norm"])
        return {"loss": float(sum(last["loss"])), "grad_norm": norm, "micro_batches": len(last["loss"])}

    return step, figures, engine


# both


def _flash_attention() -> bool:
    return importlib.util.find_spec("flash_attn") is not None


def _megatron_facts(model: Any) -> dict[str, Any]:
    """Which fusions the peer's own configuration came to, asked of the model that it built."""
    from megatron.core.utils import get_model_config

    config = get_model_config(model)
    names = ["apply_rope_fusion", "bias_activation_fusion", "gradient_accumulation_fusion", "attention_backend"]
    names.append("recompute_granularity")
    return {"settings": {name: str(getattr(config, name, None)) for name in names}}


if __name__ == "__main__":
    sys.exit(main())
