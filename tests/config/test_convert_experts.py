"""Conversions of MoE options, float16 and recomputed parts: values by hand, there and back."""

from __future__ import annotations

from pathlib import Path

import yaml

from areal_like.config import load_config
from areal_like.config.convert import convert
from areal_like.config.legacy import look_up

FLAGS = (
    "--tensor-model-parallel-size 2 --num-experts 128 --fp16 --initial-loss-scale 65536 --loss-scale-window 500 "
    "--hysteresis 3 --moe-router-load-balancing-type global_aux_loss --moe-aux-loss-coeff 1e-3 --moe-z-loss-coeff 1e-4 "
    "--moe-router-enable-expert-bias --moe-router-bias-update-rate 2e-3 --moe-permute-fusion "
    "--moe-shared-expert-overlap --recompute-granularity selective --recompute-modules core_attn moe"
)


def ours(tmp_path: Path, source: str, text: str):
    result = convert(source, "ours", text)
    (tmp_path / "ours.yaml").write_text(result.text, encoding="utf-8")
    return load_config(tmp_path / "ours.yaml"), [d.message for d in result.diagnostics if d.code == "AL820"]


def test_from_megatron_lm_and_back(tmp_path: Path) -> None:
    config, left = ours(tmp_path, "megatron-lm", FLAGS)
    actor, moe = config.actor, config.actor.megatron
    assert actor.dtype == "float16" and actor.gradient_checkpointing
    optimizer = actor.optimizer
    assert optimizer is not None
    assert (optimizer.initial_loss_scale, optimizer.loss_scale_window, optimizer.hysteresis) == (65536.0, 500, 3)
    assert (moe.moe_router_load_balancing_type, moe.moe_aux_loss_coeff) == ("global_aux_loss", 1e-3)
    assert (moe.moe_z_loss_coeff, moe.moe_router_bias_update_rate) == (1e-4, 2e-3)
    assert moe.moe_permute_fusion is True and moe.moe_shared_expert_overlap is True
    assert (moe.recompute_granularity, moe.recompute_modules) == ("selective", ("core_attn", "moe"))
    assert not any("moe-" in text or "fp16" in text or "recompute" in text for text in left)
    flags = convert("ours", "megatron-lm", (tmp_path / "ours.yaml").read_text(encoding="utf-8")).text
    for flag in (
        "--fp16",
        "--initial-loss-scale 65536",
        "--moe-router-load-balancing-type global_aux_loss",
        "--moe-aux-loss-coeff 0.001",
        "--moe-router-enable-expert-bias",
        "--moe-router-bias-update-rate 0.002",
        "--recompute-modules 'core_attn moe'",
    ):
        assert flag in flags, flags


def test_megatron_lm_balances_by_aux_loss_unless_told_otherwise(tmp_path: Path) -> None:
    config, _ = ours(tmp_path, "megatron-lm", "--num-experts 8 --moe-aux-loss-coeff 1e-2")
    assert config.actor.megatron.moe_router_load_balancing_type == "aux_loss"
    config, left = ours(tmp_path, "megatron-lm", "--num-experts 8 --moe-router-bias-update-rate 1e-2")
    assert config.actor.megatron.moe_router_bias_update_rate == 0.0
    assert any("acts only with moe-router-enable-expert-bias" in text for text in left)
    config, _ = ours(tmp_path, "megatron-lm", "--num-experts 8 --moe-router-enable-expert-bias")
    assert config.actor.megatron.moe_router_bias_update_rate == 1e-3, "Megatron-Core's default"


def test_from_verl_and_back(tmp_path: Path) -> None:
    transformer = {
        "moe_router_load_balancing_type": "aux_loss",
        "moe_aux_loss_coeff": 0.01,
        "moe_router_fusion": True,
        "moe_enable_deepep": True,
        "recompute_granularity": "selective",
        "recompute_modules": ["moe"],
    }
    section = {"actor": {"megatron": {"override_transformer_config": transformer, "dtype": "float16"}}}
    config, left = ours(tmp_path, "verl", yaml.safe_dump({"actor_rollout_ref": section}))
    moe = config.actor.megatron
    assert (moe.moe_aux_loss_coeff, moe.moe_router_fusion, moe.recompute_modules) == (0.01, True, ("moe",))
    assert config.actor.dtype == "float16"
    assert any("moe_token_dispatcher_type: flex is DeepEP" in text for text in left)
    back = yaml.safe_load(convert("ours", "verl", (tmp_path / "ours.yaml").read_text(encoding="utf-8")).text)
    written = back["actor_rollout_ref"]["actor"]["megatron"]
    assert written["dtype"] == "float16"
    assert written["override_transformer_config"]["moe_aux_loss_coeff"] == 0.01
    assert written["override_transformer_config"]["recompute_modules"] == ["moe"]


def test_from_nemo_rl(tmp_path: Path) -> None:
    megatron = {"enabled": True, "moe_router_bias_update_rate": 0.001, "moe_permute_fusion": True}
    config, _ = ours(
        tmp_path, "nemo-rl", yaml.safe_dump({"policy": {"megatron_cfg": megatron, "precision": "float16"}})
    )
    assert config.actor.megatron.moe_router_bias_update_rate == 0.001
    assert config.actor.megatron.moe_permute_fusion is True and config.actor.dtype == "float16"


def test_areals_switch_of_deepep_is_the_dispatcher() -> None:
    found = look_up("actor.megatron.moe_enable_deepep", True)
    assert found is not None and "actor.megatron.moe_token_dispatcher_type: flex" in found[1]
