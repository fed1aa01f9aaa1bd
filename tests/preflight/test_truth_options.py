"""Options of the engine, drawn and put together: what the check passes computes the model, what it refuses fails.

The way is that of a user: keys over a YAML, the check, and the engine built from the same configuration, on gloo.
"""

from __future__ import annotations

import importlib.util
import random
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from areal_like.alloc import ModelAllocation
from areal_like.config.loader import examine
from areal_like.preflight import check_layout
from areal_like.preflight.check import check_job
from areal_like.preflight.examples import BASE_JOB
from areal_like.preflight.job import make_job
from areal_like.spec import ModelSpec, stage_sizes

pytestmark = pytest.mark.slow
DRAWN = 30
"""Combinations that are tried in a run of the tests."""
HERE = Path(__file__).parent

SHAPE = {
    "vocab_size": 131,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
LAYOUTS = {
    "dense": ["d2", "d1t2", "d1p2", "d1c2", "d1p2v2", "d1p2c2v2", "d1t2c2", "d2p2v2", "d2t2"],
    "moe": ["d2e2", "d1t2", "d1p2v2", "(attn:d1t2|ffn:e2)", "d1c2e2", "d2p2e2v2", "(attn:d1t2c2|ffn:t2e2)", "d4e2"],
}
JOB = (
    "device=cpu",
    "rollout.backend=huggingface:d1",
    "gconfig.max_new_tokens=48",
    "train_dataset.max_length=48",
    "actor.mb_spec.max_tokens_per_mb=96",
    "actor.dtype=float32",
    "actor.optimizer.lr=5e-4",
    "actor.optimizer.warmup_steps_proportion=0.0",
)
MEGATRON = "actor.megatron."
OPTIONS: dict[str, list[str]] = {
    MEGATRON + "bridge_type": ["megatron-bridge"],
    MEGATRON + "virtual_pipeline_parallel_size": ["V"],
    MEGATRON + "pipeline_layout": ["FITS"],
    MEGATRON + "ddp": [
        "{overlap_grad_reduce: true}",
        "{overlap_grad_reduce: true, overlap_param_gather: true, bucket_size: 5000}",
        "{use_distributed_optimizer: false}",
        "{use_distributed_optimizer: false, overlap_grad_reduce: true}",
        "{grad_reduce_in_fp32: false, check_for_nan_in_grad: true}",
    ],
    MEGATRON + "use_deterministic_algorithms": ["true"],
    MEGATRON + "gradient_accumulation_fusion": ["false"],
    "actor.mb_spec.n_mbs": ["3"],
    "actor.disable_dropout": ["true"],
    "actor.dtype": ["bfloat16"],
}
RECOMPUTE: list[tuple[str, ...]] = [
    (),
    ("recompute_num_layers=2",),
    ("recompute_num_layers=9",),
    ("recompute_method=block", "recompute_num_layers=1"),
    ("recompute_method=block", "recompute_num_layers=9"),
    ("recompute_granularity=selective",),
    ("recompute_granularity=selective", "recompute_modules=[mlp]"),
    ("recompute_granularity=selective", "recompute_modules=[core_attn,moe]"),
    ("recompute_granularity=selective", "recompute_modules=[moe_act]"),
    ("recompute_granularity=selective", "recompute_modules=[layernorm]"),
]
MIXTURE: dict[str, list[str]] = {
    MEGATRON + "moe_token_dispatcher_type": ["allgather", "alltoall"],
    MEGATRON + "moe_grouped_gemm": ["false", "true"],
    MEGATRON + "moe_permute_fusion": ["false"],
    MEGATRON + "moe_router_dtype": ["fp64", "null"],
}
WRONG = [
    MEGATRON + "virtual_pipeline_parallel_size=3",
    MEGATRON + "pipeline_layout=[1,3]",
    MEGATRON + "pipeline_layout=[0,5]",
    MEGATRON + "fp8_config={recipe: blockwise}",
    MEGATRON + "fp8_config={recipe: tensorwise}",
    "actor.gradient_checkpointing=true actor.megatron.recompute_method=null",
    "actor.gradient_checkpointing=true actor.megatron.recompute_num_layers=null",
    "actor.gradient_checkpointing=true actor.megatron.recompute_granularity=null",
    "actor.gradient_checkpointing=true actor.megatron.recompute_modules=[core_attn]",
    MEGATRON + "gradient_accumulation_fusion=true",
    MEGATRON + "use_precision_aware_optimizer=true",
    MEGATRON + "exp_avg_dtype=bfloat16",
    MEGATRON + "moe_token_dispatcher_type=flex",
    MEGATRON + "moe_permute_fusion=true",
    MEGATRON + "moe_router_fusion=true",
    MEGATRON + "attention_backend=flex",
    MEGATRON + "attention_backend=fused",
    MEGATRON + "moe_shared_expert_overlap=true",
    MEGATRON + "moe_aux_loss_coeff=0.01",
    MEGATRON + "moe_router_load_balancing_type=seq_aux_loss",
]
"""What the check refuses, with some models and layouts at the least."""
OTHER_TRAINING: list[tuple[str, ...]] = [
    ("actor.use_lora=true", "rollout.use_lora=true", "actor.lora_rank=4", MEGATRON + "bridge_type=megatron-bridge"),
    ("actor.use_lora=true", "rollout.use_lora=true", "actor.lora_rank=4"),
    ("actor.use_lora=true", "rollout.use_lora=true", "actor.lora_rank=3", MEGATRON + "bridge_type=megatron-bridge"),
    ("actor.optimizer.type=sgd",),
    ("actor.dtype=float16",),
    (MEGATRON + "moe_router_load_balancing_type=aux_loss", MEGATRON + "moe_aux_loss_coeff=0.01"),
    (MEGATRON + "moe_router_load_balancing_type=sinkhorn",),
    (MEGATRON + "moe_z_loss_coeff=0.001",),
    (MEGATRON + "moe_router_bias_update_rate=0.01",),
]
"""What trains otherwise than the reference: only that it runs, and what it computes before, are looked at."""


IGNORED = {"AL231", "AL541", "AL542"}
"""Refused although they run: a key would have no effect, and nobody would be told."""


def draw(seed: int) -> tuple[str, str, tuple[str, ...]]:
    """A model, a layout that is legal without options, and some options."""
    chance = random.Random(seed)
    kind = chance.choice(["dense", "moe"])
    text = "megatron:" + chance.choice(LAYOUTS[kind])
    allocation = ModelAllocation.parse(text)
    fits = str(stage_sizes(model_spec(kind), allocation)[::-1]).replace(" ", "")
    options = chance.sample(list(OPTIONS.items()), chance.randint(1, 3))
    options += chance.sample(list(MIXTURE.items()), chance.randint(1, 2)) if kind == "moe" else []
    changes = [f"{key}={chance.choice(values)}" for key, values in options]
    changes = [change.replace("FITS", fits).replace("=V", f"={allocation.vpp}") for change in changes]
    if chance.random() < 0.6:
        changes.append("actor.gradient_checkpointing=true")
        changes += [MEGATRON + change for change in chance.choice(RECOMPUTE)]
    if chance.random() < 0.3:
        changes += chance.choice(OTHER_TRAINING)
    if chance.random() < 0.35:
        changes += re.split(" (?=actor)", chance.choice(WRONG))
    return kind, text, tuple(changes)


def model_spec(kind: str) -> ModelSpec:
    extra = EXPERTS if kind == "moe" else {}
    return ModelSpec.from_config({"model_type": "qwen3_moe" if extra else "qwen3", **SHAPE, **extra})


@pytest.fixture(scope="module")
def fixtures() -> Any:
    """The helpers of the engine's tests, which keep processes alive."""
    file = HERE.parent / "engines" / "megatron" / "conftest.py"
    spec = importlib.util.spec_from_file_location("engine_fixtures", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["engine_fixtures"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def groups(fixtures: Any) -> Iterator[dict[int, Any]]:
    found: dict[int, Any] = {}
    yield found
    for ranks in found.values():
        ranks.group.close()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("models")
    Qwen3ForCausalLM(Qwen3Config(**SHAPE, tie_word_embeddings=True)).save_pretrained(folder / "dense")
    moe = Qwen3MoeConfig(**SHAPE, **EXPERTS, tie_word_embeddings=False)
    Qwen3MoeForCausalLM(moe).save_pretrained(folder / "moe")
    return {"dense": folder / "dense", "moe": folder / "moe"}


def checked(text: str, folder: Path, changes: tuple[str, ...]) -> tuple[Any, list[str]]:
    """The configuration as the loader makes it, and the errors of the check."""
    overrides = [*JOB, f'actor.backend="{text}"', f"actor.path={folder}", *changes]
    config, found, _ = examine("job.yaml", overrides, text=BASE_JOB)
    errors = [d for d in found if d.severity == "error"]
    if config is not None:
        errors += [d for d in check_job(make_job(config)) if d.severity == "error"]
    return config, [f"{d.code}: {d.message}" for d in errors]


def attempt(fixtures: Any, groups: dict[int, Any], text: str, config: Any, folder: Path) -> list[str]:
    """What goes wrong when the engine is built, asked and trained; empty when it computes what Transformers does."""
    import torch

    from areal_like.config import OptimizerConfig
    from areal_like.trainers import trial
    from areal_like.trainers.reference import ReferenceModel
    from areal_like.trainers.trial_report import TOLERANCES

    allocation = ModelAllocation.parse(text)
    ranks = groups.setdefault(allocation.world_size, None) or fixtures.Ranks(allocation.world_size)
    if ranks.group._error is not None:
        ranks = fixtures.Ranks(allocation.world_size)
    groups[allocation.world_size] = ranks
    ranks.mesh = allocation.mesh()
    wrong = [error for error in ranks.attempt("build", text, config.actor, None) if error is not None]
    if wrong:
        return [f"{name}: {message}" for name, message in wrong]
    plain = OptimizerConfig(lr=5e-4, warmup_steps_proportion=0.0)
    limits = TOLERANCES[config.actor.dtype]
    reference = ReferenceModel(folder, plain, dtype=trial.DTYPES[config.actor.dtype], device="cpu")
    batch = trial._batch(1, allocation, SHAPE["vocab_size"])
    differences = {"logits": (trial._difference(ranks.logits(batch), reference.logits(batch)), limits.logits)}
    figures = ranks.train(batch)
    if not other_training(config):
        loss, norm = reference.train(batch)
        ours, theirs = ranks.weights(), reference.weights()
        weights = max(trial._difference(ours[name], theirs[name]) for name in theirs)
        differences |= {
            "loss": (abs(figures["loss"] - loss) / loss, limits.loss),
            "gradient norm": (abs(figures["grad_norm"] - norm) / norm, limits.grad_norm),
            "weights": (weights, limits.weights),
        }
    elif not (torch.isfinite(torch.tensor(figures["loss"])) and figures["loss"] > 0):
        return [f"loss {figures['loss']}"]
    return [f"{name} differ by {value:.2g}" for name, (value, limit) in differences.items() if not value <= limit]


def other_training(config: Any) -> bool:
    """Whether something makes an update another one than that of AdamW on the mean loss, or float16 skips it."""
    megatron, actor = config.actor.megatron, config.actor
    return bool(
        actor.use_lora
        or actor.optimizer.type == "sgd"
        or actor.dtype == "float16"
        or megatron.moe_aux_loss_coeff
        or megatron.moe_z_loss_coeff
        or megatron.moe_router_bias_update_rate
    )


def test_the_layouts_are_legal_without_options() -> None:
    for kind, texts in LAYOUTS.items():
        for text in texts:
            assert check_layout(ModelAllocation.parse(f"megatron:{text}"), model_spec(kind)) == []


@pytest.mark.parametrize("seed", range(DRAWN))
def test_the_check_says_what_happens(seed: int, models: dict[str, Path], fixtures: Any, groups: dict[int, Any]) -> None:
    """Passed: it computes what Transformers does. Refused: forced to start, it does not."""
    kind, text, changes = draw(seed)
    config, errors = checked(text, models[kind], changes)
    what = f"{kind} {text} {' '.join(changes)}"
    if config is None:
        assert errors, what
        return
    try:
        wrong = attempt(fixtures, groups, text, config, models[kind])
    except Exception as error:
        wrong = [f"{type(error).__name__}: {error}"]
    if errors and {error[:5] for error in errors} <= IGNORED:
        return
    if errors:
        assert wrong, f"{what}\nis refused ({'; '.join(errors)}) and works"
    else:
        assert not wrong, f"{what}\npasses the check and does not work: {'; '.join(wrong)}"
