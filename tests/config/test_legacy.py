"""A key of another system, or of an older AReaL, gets its replacement: every row of the table, in a file and in an
override."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from areal_like.alloc import Diagnostic
from areal_like.config import ConfigError, RLConfig, load_config, paths
from areal_like.config.aliases import ALIASES
from areal_like.config.convert import megatron_lm_keys, nemo_rl_keys, verl_keys
from areal_like.config.convert.draft import Row
from areal_like.config.legacy import LEGACY, look_up

MINIMAL = """\
experiment_name: e
trial_name: t
rollout: {backend: "huggingface:d1"}
actor: {backend: megatron:d1, path: some/model, optimizer: {lr: 1e-5}}
train_dataset: {path: reasoning_gym/chain_sum, batch_size: 4}
"""
OURS = {paths.join(steps) for steps, _ in paths.keys(RLConfig)}


def errors(tmp_path: Path, text: str, *overrides: str) -> list[Diagnostic]:
    file = tmp_path / "run.yaml"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as raised:
        load_config(file, list(overrides))
    return [d for d in raised.value.diagnostics if d.severity == "error"]


def as_yaml(key: str, value: str) -> str:
    """A dotted key as nested flow mappings."""
    first, *rest = key.split(".")
    return f"{first}: " + "".join(f"{{{name}: " for name in rest) + value + "}" * len(rest)


def mentioned(text: str) -> set[str]:
    """Keys that an advice tells one to write: dotted words of which the first is a section of the schema."""
    top = {key for key in OURS if "." not in key}
    words = re.findall(r"(?<![\w.:])([a-z_]+(?:\.[a-z0-9_]+)+)", text)
    return {word for word in words if word.split(".")[0] in top}


@pytest.mark.parametrize("row", [row for row in LEGACY if row.key not in ALIASES], ids=lambda row: row.key)
def test_every_row_in_a_file_and_in_an_override(row, tmp_path: Path) -> None:
    found = [d for d in errors(tmp_path, MINIMAL, f"+{row.key}=7") if d.code == "AL814"]
    assert [d.key for d in found] == [row.key], found
    assert row.what in found[0].message and found[0].file == "<command line>" and found[0].help
    assert found[0].help == look_up(row.key, 7)[1]
    assert mentioned(found[0].help) <= OURS, "the advice names a key that does not exist"
    assert "{" not in found[0].help.replace("{level", "").replace("{mean_level", "").replace("ref: {}", "").replace(
        "{...}", ""
    )
    if row.key.split(".")[0] in OURS:
        return  # the section is ours, and stands in MINIMAL already
    found = [d for d in errors(tmp_path, MINIMAL + as_yaml(row.key, "7") + "\n") if d.code == "AL814"]
    assert [d.help for d in found if d.key == row.key] == [look_up(row.key, 7)[1]]
    assert all(d.line == 6 for d in found)


CONVERTED = [
    *((f"{row.theirs}", "verl", row) for row in verl_keys.ROWS),
    *((f"{row.theirs}", "NeMo-RL", row) for row in nemo_rl_keys.ROWS),
    *((f"--{row.theirs}", "Megatron-LM", row) for row in megatron_lm_keys.ROWS),
]


@pytest.mark.parametrize(("key", "system", "row"), CONVERTED, ids=[key for key, _, _ in CONVERTED])
def test_every_key_that_converts_has_its_advice(key: str, system: str, row: Row) -> None:
    if row.ours:
        assert row.ours in OURS, "the table names a key that does not exist"
    replaced = look_up(key, None)
    assert replaced is not None
    if row.ours and system in replaced[0]:
        assert mentioned(replaced[1]) <= OURS


# (key as documents write it, value, words of the help)
SEEDS = [
    (
        "actor_rollout_ref.actor.megatron.tensor_model_parallel_size",
        2,
        "letter t of actor.backend, as in megatron:d1t2",
    ),
    ("actor_rollout_ref.ref.megatron.pipeline_model_parallel_size", 4, "letter p of ref.backend, as in megatron:d1p4"),
    ("actor_rollout_ref.actor.megatron.expert_model_parallel_size", 4, "letter e of actor.backend"),
    ("actor_rollout_ref.actor.megatron.expert_tensor_parallel_size", 2, "(attn:d1t2|ffn:e2t2)"),
    ("actor_rollout_ref.actor.megatron.virtual_pipeline_model_parallel_size", 3, "megatron:p2v3"),
    ("actor_rollout_ref.rollout.tensor_model_parallel_size", 2, "letter t of rollout.backend, as in sglang:d1t2"),
    ("policy.generation.vllm_cfg.tensor_parallel_size", 2, "letter t of rollout.backend, as in sglang:d1t2"),
    ("actor_rollout_ref.actor.megatron.context_parallel_size", 2, "letter c of actor.backend"),
    ("actor_rollout_ref.actor.megatron.param_offload", True, "write actor.megatron.param_offload: true"),
    ("actor_rollout_ref.ref.fsdp_config.param_offload", True, "write ref.megatron.param_offload: true"),
    ("actor_rollout_ref.actor.profile.use_profile", True, "write actor.profiler.ranks"),
    ("actor_rollout_ref.actor.profile.step_start", 0, "actor.profiler.step_start"),
    ("algorithm.adv_estimator", "grpo", "actor.reward_norm: {mean_level: group, std_level: group}"),
    ("algorithm.group_size", 8, "gconfig.n_samples: 8"),
    ("actor_rollout_ref.rollout.n", 5, "gconfig.n_samples: 5"),
    ("actor_rollout_ref.actor.kl_coeff", 0.001, "actor.kl_ctl: 0.001"),
    ("actor_rollout_ref.actor.kl_loss_coef", 0.001, "actor.kl_ctl: 0.001"),
    ("actor_rollout_ref.actor.kl_loss_type", "low_var_kl", "low_var_kl is k3"),
    ("actor_rollout_ref.actor.gradient_clipping", 1.0, "actor.optimizer.gradient_clipping: 1.0"),
    ("actor_rollout_ref.actor.optim.clip_grad", 1.0, "actor.optimizer.gradient_clipping: 1.0"),
    ("actor_rollout_ref.actor.optim.lr", 2e-6, "actor.optimizer.lr: 2e-06"),
    ("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu", 4, "actor.mb_spec.max_tokens_per_mb"),
    ("actor_rollout_ref.actor.ppo_mini_batch_size", 64, "train_dataset.batch_size / 64"),
    ("actor_rollout_ref.actor.megatron.override_transformer_config.fp16", True, "actor.dtype"),
    (
        "actor_rollout_ref.actor.megatron.override_transformer_config.moe_token_dispatcher_type",
        "flex",
        "actor.megatron.moe_token_dispatcher_type: flex",
    ),
    ("generation_batch_size", 8, "batches by itself"),
    ("rollout.generation_batch_size_per_gpu", 8, "batches by itself"),
    ("actor.behave_imp_weight_cap", 5, "rejection_sampling: {level: token, action: mask, metric: ratio, upper: X}"),
    ("actor.behav_imp_weight_cap", 5, "rejection_sampling"),
    ("launcher", None, "remove the section"),
    ("allocation_mode", "sglang:d4+megatron:d2t2", "rollout.backend: sglang:d4, actor.backend: megatron:d2t2"),
    ("allocation_mode", "nonsense", "one `backend`"),
    ("--grpo-group-size", 16, "gconfig.n_samples: 16"),
    ("grpo_group_size", 16, "gconfig.n_samples: 16"),
    ("--grpo-prompts-per-step", 64, "train_dataset.batch_size: 64"),
    ("--rl-generation-lag", 2, "rollout.generation_lag: 2.0"),
    ("--grpo-clamp-eps-lower", 0.2, "actor.eps_clip: 0.2"),
    ("--grpo-clamp-eps-upper", 0.28, "actor.eps_clip_higher: 0.28"),
    ("--grpo-kl-beta", 0.001, "actor.kl_ctl: 0.001"),
    ("--inference-max-requests", 32, "inference-dynamic-batching-max-requests"),
    ("--tensor-model-parallel-size", 8, "megatron:d1t8"),
    ("--dry-run", None, "areal-like check"),
    ("grpo.num_generations_per_prompt", 16, "gconfig.n_samples: 16"),
    ("loss_fn.ratio_clip_min", 0.2, "actor.eps_clip: 0.2"),
]


@pytest.mark.parametrize(("key", "value", "words"), SEEDS, ids=[f"{key}-{value}" for key, value, _ in SEEDS])
def test_the_keys_of_documents(key: str, value: object, words: str) -> None:
    found = look_up(key, value)
    assert found is not None and words in " ".join(found), found


def test_a_file_of_verl_gets_every_replacement_at_its_place(tmp_path: Path) -> None:
    text = (
        "actor_rollout_ref:\n  actor:\n    optim: {lr: 1e-6}\n    megatron:\n      tensor_model_parallel_size: 4\n"
        "  rollout: {n: 8, name: vllm, no_such_key: 1}\nalgorithm: {adv_estimator: grpo}\n"
    )
    found = {(d.line, d.column): d for d in errors(tmp_path, text) if d.code == "AL814"}
    assert {d.key for d in found.values()} == {
        "actor_rollout_ref",
        "actor_rollout_ref.actor.optim.lr",
        "actor_rollout_ref.actor.megatron.tensor_model_parallel_size",
        "actor_rollout_ref.rollout.n",
        "actor_rollout_ref.rollout.name",
        "algorithm",
        "algorithm.adv_estimator",
    }
    assert "areal-like convert --from verl" in (found[1, 1].help or "")
    assert "megatron:d1t4" in (found[5, 7].help or "")


def test_what_nobody_knows_stays_unknown(tmp_path: Path) -> None:
    for key in ("lr", "nonsense", "actor.nonsense", "nope.lr", "weight_decay", "seed.x"):
        assert look_up(key, 1) is None, key
    (only,) = errors(tmp_path, MINIMAL + "lr: 3\n")
    assert only.code == "AL805" and "actor.optimizer.lr" in (only.help or "")
    assert [d.code for d in errors(tmp_path, MINIMAL + "nonsense: {a: {b: 1}}\n")] == ["AL805"]
    assert [d.code for d in errors(tmp_path, MINIMAL, "--nonsense")] == ["AL810"]
    assert [d.code for d in errors(tmp_path, MINIMAL, "--dry-run")] == ["AL814"]


def test_odd_values_are_no_trouble() -> None:
    for value in ("{", "}{0}", "x" * 5000, 1 << 20000, float("inf"), [1], {"a": 1}, "+" * 100_000, "a\nb\x00"):
        for key in ("rollout.n", "grpo_group_size", "algorithm.group_size", "allocation_mode"):
            found = look_up(f"actor_rollout_ref.{key}" if key == "rollout.n" else key, value)
            assert found is not None and len(found[1]) < 400 and "\n" not in found[1]


def test_keys_inside_free_sections_are_not_judged(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(MINIMAL + "vllm: {tensor_parallel_size: 2, seq_length: 1}\n", encoding="utf-8")
    load_config(file, ["sglang.seq_length=3"])
