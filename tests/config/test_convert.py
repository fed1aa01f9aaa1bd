"""Conversions by hand-computed values: from each system, to each system, and there and back."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from convert_inputs import FLAGS, NEMO, VERL

from areal_like.alloc import Diagnostic
from areal_like.config import ConfigError, RLConfig, load_config
from areal_like.config.convert import convert

ROOT = Path(__file__).parents[2]


def ours(tmp_path: Path, source: str, text: str, *overrides: str) -> tuple[RLConfig, tuple[Diagnostic, ...]]:
    """The result as `load_config` reads it from a file."""
    result = convert(source, "ours", text, overrides=overrides)
    file = tmp_path / "ours.yaml"
    file.write_text(result.text, encoding="utf-8")
    config = load_config(file)
    assert all(d.severity != "error" for d in result.diagnostics)
    return config, result.diagnostics


def said(diagnostics: tuple[Diagnostic, ...], code: str) -> list[str]:
    return [d.message for d in diagnostics if d.code == code]


def refused(source: str, text: str, *overrides: str, target: str = "ours") -> str:
    with pytest.raises(ConfigError) as raised:
        convert(source, target, text, overrides=overrides)
    assert all(
        d.code in ("AL823", "AL810", "AL802", "AL803", "AL808", "AL807", "AL805") for d in raised.value.diagnostics
    )
    return str(raised.value)


def test_from_verl(tmp_path: Path) -> None:
    config, found = ours(tmp_path, "verl", VERL)
    assert config.actor.backend == "megatron:(attn:d2t2p2c2|ffn:t2e4)", "Megatron cuts experts as attention by default"
    assert config.rollout.backend == "sglang:d4t4"
    assert config.rollout.scheduling_strategy == {"type": "colocation", "target": "actor"}
    assert (config.cluster.n_nodes, config.cluster.n_gpus_per_node, config.device) == (1, 16, "cuda")
    assert (config.experiment_name, config.trial_name) == ("math", "a-b")
    assert (config.total_train_epochs, config.saver.freq_steps, config.evaluator.freq_steps) == (2, 20, None)
    actor, sampling = config.actor, config.gconfig
    assert actor.path == "Qwen/Qwen3-30B-A3B" and actor.ppo_n_minibatches == 256 // 64
    assert actor.mb_spec.max_tokens_per_mb == 8192 * 2, "verl's budget is of one rank of a context-parallel group"
    assert (actor.eps_clip, actor.eps_clip_higher, actor.c_clip) == (0.2, 0.28, 3.0)
    assert (actor.kl_ctl, actor.kl_estimator, config.ref is not None) == (0.002, "k3", True)
    assert actor.reward_norm is not None and actor.recompute_logprob and not actor.use_decoupled_loss
    norm = actor.reward_norm
    assert (norm.mean_level, norm.std_level, norm.eps, norm.group_size) == ("group", None, 1e-6, 8)
    assert actor.optimizer is not None
    optimizer = actor.optimizer
    assert (optimizer.lr, optimizer.beta1, optimizer.beta2) == (2e-6, 0.9, 0.95)
    assert optimizer.min_lr_ratio == pytest.approx(0.1) and optimizer.warmup_steps_proportion == 0.1
    assert (optimizer.lr_scheduler_type, optimizer.weight_decay) == ("cosine", 0.01)
    assert actor.gradient_checkpointing
    megatron = actor.megatron
    assert (megatron.recompute_granularity, megatron.recompute_method, megatron.recompute_num_layers) == (
        *("full", "uniform"),
        2,
    )
    assert (sampling.n_samples, sampling.temperature, sampling.top_k, sampling.max_new_tokens) == (8, 0.9, 0, 3072)
    assert (config.train_dataset.path, config.train_dataset.batch_size) == ("/data/train.parquet", 256)
    assert config.train_dataset.max_length == 1024
    left = said(found, "AL820")
    for key in ("rollout.gpu_memory_utilization", "critic.optim.lr"):
        assert any(key in message for message in left), key
    assert len(left) == 2 and any("taken off the rewards" in m for m in said(found, "AL822"))
    assert megatron.param_offload and megatron.grad_offload and not megatron.optimizer_offload
    assert any("grad_offload" in m and "never reads it" in m for m in said(found, "AL822"))


def test_what_verl_does_by_default_is_written(tmp_path: Path) -> None:
    config, found = ours(tmp_path, "verl", "", "actor_rollout_ref.model.path=m", "algorithm.adv_estimator=grpo")
    assert (config.actor.backend, config.rollout.backend) == ("megatron:d8", "vllm:d4t2")
    assert (config.actor.c_clip, config.gconfig.max_new_tokens, config.train_dataset.batch_size) == (3.0, 512, 1024)
    assert config.actor.ppo_n_minibatches == 4 and config.total_train_epochs == 30
    assert config.actor.optimizer is not None and config.actor.optimizer.lr == 1e-6
    assert any("rollout.name is not given" in message for message in said(found, "AL821"))
    _, found = ours(tmp_path, "verl", "actor_rollout_ref: {model: {path: m}}")
    assert any("adv_estimator" in message and "value model" in message for message in said(found, "AL822"))


@pytest.mark.parametrize(
    ("override", "check"),
    [
        (
            "algorithm.adv_estimator=rloo",
            lambda c: c.actor.reward_norm.mean_leave1out and not c.actor.reward_norm.std_level,
        ),
        ("algorithm.use_kl_in_reward=true", lambda c: (c.actor.kl_ctl, c.actor.kl_estimator) == (0.001, "k1")),
        (
            "actor_rollout_ref.actor.policy_loss.loss_mode=gspo",
            lambda c: c.actor.importance_sampling_level == "sequence",
        ),
        ("actor_rollout_ref.rollout.do_sample=false", lambda c: c.gconfig.greedy is True),
        ("actor_rollout_ref.actor.megatron.expert_tensor_parallel_size=1", lambda c: c.actor.backend == "megatron:d8"),
        ("actor_rollout_ref.actor.strategy=fsdp2", lambda c: c.actor.backend == "fsdp:d8"),
        (
            "algorithm.rollout_correction.rollout_is=token",
            lambda c: c.actor.use_decoupled_loss and c.actor.rejection_sampling.upper == 2.0,
        ),
        ("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4", lambda c: c.actor.mb_spec.max_tokens_per_mb == 4096),
        ("actor_rollout_ref.actor.megatron.virtual_pipeline_model_parallel_size=null", lambda c: True),
    ],
)
def test_single_keys_of_verl(tmp_path: Path, override: str, check) -> None:
    config, _ = ours(tmp_path, "verl", "actor_rollout_ref: {model: {path: m}, rollout: {name: vllm}}", override)
    assert check(config), config


def test_references_of_verl_are_followed(tmp_path: Path) -> None:
    text = (
        "actor_rollout_ref:\n  model: {path: m}\n  rollout: {name: vllm, n: 4}\n"
        "  actor: {clip_ratio: 0.3, clip_ratio_low: '${.clip_ratio}', "
        "entropy_coeff: '${oc.select:no.such.key,0.01}'}\n"
        "data: {train_batch_size: 512, val_batch_size: '${data.train_batch_size}', val_files: v, "
        "train_files: '${oc.env:HOME}/x'}\n"
    )
    config, found = ours(tmp_path, "verl", text)
    assert (config.actor.eps_clip, config.actor.entropy_coeff) == (0.3, 0.01)
    assert config.valid_dataset is not None and config.valid_dataset.batch_size == 512
    assert any("data.train_files" in m and "cannot be followed" in m for m in said(found, "AL820"))


def test_from_nemo_rl(tmp_path: Path) -> None:
    config, found = ours(tmp_path, "nemo-rl", NEMO)
    assert (config.actor.backend, config.rollout.backend) == ("megatron:d4t2e4", "vllm:d2t4"), "8 GPUs each"
    assert config.rollout.scheduling_strategy is None and config.rollout.max_head_offpolicyness == 2
    assert config.actor.ppo_n_minibatches == 64 * 8 // 256 and config.actor.mb_spec.max_tokens_per_mb == 8192
    assert (config.gconfig.n_samples, config.gconfig.max_tokens, config.seed) == (8, 4096, 42)
    assert (config.actor.eps_clip, config.actor.eps_clip_higher, config.actor.c_clip) == (0.2, 0.28, None)
    assert config.actor.kl_ctl == 0 and config.ref is None
    assert config.actor.use_decoupled_loss and config.actor.recompute_logprob
    rejection = config.actor.rejection_sampling
    assert rejection is not None and (rejection.action, rejection.upper) == ("clamp", 5.0)
    assert config.actor.reward_norm is not None and config.actor.reward_norm.mean_leave1out
    optimizer = config.actor.optimizer
    assert optimizer is not None and optimizer.warmup_steps_proportion == 0.1
    assert optimizer.min_lr_ratio == pytest.approx(0.1)
    assert config.actor.megatron.moe_router_dtype == "fp64" and not config.actor.megatron.ddp.grad_reduce_in_fp32
    assert len(said(found, "AL820")) == 2 and any("logger.wandb_enabled" in m for m in said(found, "AL820"))
    assert any("cluster.num_nodes: 2" in m for m in said(found, "AL820"))


def test_defaults_files_of_nemo_rl_are_read(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text(NEMO, encoding="utf-8")
    text = "defaults: base.yaml\npolicy: {megatron_cfg: {tensor_model_parallel_size: 4}}\n"
    result = convert("nemo-rl", "ours", text, beside=tmp_path)
    assert "backend: megatron:d2t4e4" in result.text and "Qwen/Qwen3-30B-A3B" in result.text
    (tmp_path / "loop.yaml").write_text("defaults: loop.yaml\n", encoding="utf-8")
    for name, words in (("loop.yaml", "name each other"), ("none.yaml", "cannot be read")):
        with pytest.raises(ConfigError, match=words):
            convert("nemo-rl", "ours", f"defaults: {name}\n", beside=tmp_path)


def test_from_megatron_lm(tmp_path: Path) -> None:
    config, found = ours(tmp_path, "megatron-lm", FLAGS)
    assert config.actor.backend == "megatron:(attn:d4t2p2v2|ffn:t2e4)", "48 layers = 2 ranks x 2 stages x 12"
    assert config.rollout.backend == "sglang:d4t4" and config.rollout.generation_lag == 2.0
    assert (config.train_dataset.batch_size, config.gconfig.n_samples, config.actor.ppo_n_minibatches) == (64, 16, 2)
    assert (config.actor.eps_clip, config.actor.eps_clip_higher, config.actor.dtype) == (0.2, 0.28, "bfloat16")
    norm = config.actor.reward_norm
    assert norm is not None and (norm.eps, norm.std_unbiased, norm.std_level) == (1e-4, False, "group")
    assert config.actor.rejection_sampling is not None and config.actor.rejection_sampling.upper == 10.0
    assert config.actor.gradient_checkpointing and config.actor.megatron.recompute_granularity == "selective"
    assert config.actor.disable_dropout and config.gconfig.max_tokens == 4096
    assert config.actor.optimizer is not None and config.actor.optimizer.beta2 == 0.95
    assert config.actor.optimizer.lr_scheduler_type == "cosine"
    left = " ".join(said(found, "AL820"))
    for flag in ("load: /checkpoints/base", "num-experts: 128", "num-layers: 48", "rl-partial-rollouts"):
        assert flag in left
    config, _ = ours(tmp_path, "megatron-lm", "--tensor-model-parallel-size 4 --expert_model_parallel_size 2")
    assert config.actor.backend == "megatron:(attn:d*t4|ffn:t4e2)", "d is open without a number of ranks"
    config, _ = ours(tmp_path, "megatron-lm", "--tensor-model-parallel-size 4 --world-size 8")
    assert config.actor.backend == "megatron:d2t4", "a model without experts has no expert tensor size"


@pytest.mark.parametrize(
    ("text", "backends"),
    [
        ("sglang:d4+megatron:d4", {"rollout": "sglang:d4", "actor": "megatron:d4"}),
        (" megatron : d2 t2 + vllm:d4 ", {"rollout": "vllm:d4", "actor": "megatron:d2t2"}),
        ("sglang:d4|megatron[actor]:d4", {"rollout": "sglang:d4", "actor": "megatron:d4"}),
        (
            "sglang[rollout]:d2t2+megatron[actor]:(attn:d1p4t2c2|ffn:d1p4t1e4)|megatron[ref]:d16",
            {"rollout": "sglang:d2t2", "actor": "megatron:d1t2p4c2e4", "ref": "megatron:d16"},
        ),
        ("sglang:d1+megatron:attn:d1t2|ffn:e2", {"rollout": "sglang:d1", "actor": "megatron:d1t2e2"}),
        ("sglang.d4p1t1+fsdp:d2", {"rollout": "sglang:d4", "actor": "fsdp:d2"}),
        ("megatron:d8", {"actor": "megatron:d8"}),
    ],
)
def test_from_allocation_mode(tmp_path: Path, text: str, backends: dict[str, str]) -> None:
    result = convert("allocation_mode", "ours", text, fragment=True)
    assert {key: section["backend"] for key, section in yaml.safe_load(result.text).items()} == backends
    config, _ = ours(tmp_path, "allocation_mode", text)
    for key, backend in backends.items():
        assert getattr(config, key).backend == backend


def test_the_same_gpus_are_a_colocation() -> None:
    text = "sglang[rollout]:d4|megatron[actor]:d4+megatron[ref]:d2"
    sections = yaml.safe_load(convert("allocation_mode", "ours", text, fragment=True).text)
    assert sections["actor"]["scheduling_strategy"] == {"type": "colocation", "target": "rollout"}
    assert "scheduling_strategy" not in sections["rollout"] and "scheduling_strategy" not in sections["ref"]


@pytest.mark.parametrize(
    ("source", "text", "words"),
    [
        ("allocation_mode", "sglang:d4|megatron[actor]:d8", "4 and 8 ranks"),
        ("allocation_mode", "sglang:d4+fsdp:d4+fsdp:d4", "a second component without a name"),
        ("allocation_mode", "sglang[a]:d4+fsdp[a]:d4", "the name a is given twice"),
        ("allocation_mode", "sglang[actor]:d4+fsdp:d4", "actor cannot be sglang"),
        ("allocation_mode", "sglang:d4+d4t2", "write megatron:d4t2 or fsdp:d4t2"),
        ("allocation_mode", "sglang:d4+megatron:d4x2", "unknown letter 'x'"),
        ("allocation_mode", "", "empty"),
        ("allocation_mode", "sglang:d4+", "empty"),
        ("megatron-lm", "--tensor-model-parallel-size 3 --world-size 8", "8 ranks do not divide by t3"),
        ("megatron-lm", "--nnodes 2 --nproc-per-node 8 --world-size 8", "nnodes * nproc-per-node is 16"),
        ("megatron-lm", "--lr 1 --lr 2", "given twice: 1 and 2"),
        ("megatron-lm", "--tensor-model-parallel-size x", "whole number of at least 1"),
        ("megatron-lm", "--tensor-model-parallel-size 0", "whole number of at least 1"),
        ("megatron-lm", "tensor 8", "is no flag"),
        ("megatron-lm", "--lr '1", "close the quote"),
        ("megatron-lm", "--num-layers-per-virtual-pipeline-stage 5", "together with num-layers"),
        ("megatron-lm", "--grpo-group-size 8 --grpo-prompts-per-step 8 --global-batch-size 48", "does not divide"),
        (
            "verl",
            "trainer: {n_gpus_per_node: 6}\nactor_rollout_ref: {rollout: {tensor_model_parallel_size: 4}}",
            "6 GPUs",
        ),
        ("verl", "data: {train_batch_size: 100}", "100 does not divide by"),
        ("verl", "actor_rollout_ref: {actor: {megatron: {tensor_model_parallel_size: 16}}}", "8 ranks do not divide"),
        (
            "verl",
            "data: {max_response_length: 512}\nactor_rollout_ref: {rollout: {response_length: 1024}}",
            "gconfig.max_new_tokens would be 512 and 1024",
        ),
        ("verl", "actor_rollout_ref: {actor: {use_kl_loss: true}}\nalgorithm: {use_kl_in_reward: true}", "one weight"),
        ("verl", "actor_rollout_ref: {rollout: {name: trtllm}}", "trtllm has no backend here"),
        ("verl", "- a", "not a mapping"),
        ("verl", "a: [", "not YAML"),
        ("verl", "actor_rollout_ref: {rollout: {name: vllm, temperature: -1}}", "at least 0"),
        ("nemo-rl", "cluster: {gpus_per_node: 6}\npolicy: {dtensor_cfg: {tensor_parallel_size: 4}}", "6 ranks do not"),
        ("nemo-rl", "policy: {megatron_cfg: {enabled: true}, dtensor_cfg: {enabled: true}}", "both enabled"),
        ("nemo-rl", "policy: {generation: {colocated: {enabled: false}}}", "say its GPUs"),
        (
            "nemo-rl",
            "policy: {generation: {colocated: {enabled: false, resources: {gpus_per_node: 8}}}}\n"
            "cluster: {gpus_per_node: 8}",
            "none is left to train on",
        ),
    ],
)
def test_contradictions_are_errors(source: str, text: str, words: str) -> None:
    assert words in refused(source, text)


def test_worlds_that_do_not_fit_the_other_system() -> None:
    text = (ROOT / "examples/math/gsm8k_grpo_megatron.yaml").read_text(encoding="utf-8")
    assert "no whole number of machines" in refused("ours", text, "actor.backend=megatron:d12", target="verl")
    assert "which do not divide" in refused("ours", text, "rollout.backend=sglang:d1t8", target="verl")
    together = "rollout.scheduling_strategy={type: colocation, target: actor}"
    assert "4 and 2 ranks" in refused("ours", text, together, "rollout.backend=sglang:d2", target="nemo-rl")
    assert "cannot train with fsdp" in refused("ours", text, "actor.backend=fsdp:d4", target="megatron-lm")
    assert "equal updates" in refused("ours", text, "actor.ppo_n_minibatches=5", target="megatron-lm")


def test_gradients_and_optimizer_from_and_to_each_system(tmp_path: Path) -> None:
    flags = "--no-gradient-accumulation-fusion --use-precision-aware-optimizer --exp-avg-dtype bf16 --bf16"
    config, _ = ours(tmp_path, "megatron-lm", f"{flags} --use-distributed-optimizer")
    options = config.actor.megatron
    assert options.gradient_accumulation_fusion is False and options.use_precision_aware_optimizer
    assert (options.exp_avg_dtype, options.exp_avg_sq_dtype, options.main_grads_dtype) == ("bfloat16", "float32", None)
    back = convert("ours", "megatron-lm", (tmp_path / "ours.yaml").read_text(encoding="utf-8")).text
    for flag in ("--no-gradient-accumulation-fusion", "--use-precision-aware-optimizer", "--exp-avg-dtype bf16"):
        assert flag in back
    assert "--exp-avg-sq-dtype" not in back and "--main-grads-dtype" not in back
    config, _ = ours(tmp_path, "megatron-lm", "--bf16")
    assert config.actor.megatron.gradient_accumulation_fusion is None, "both systems fuse where they can"

    actor = {
        "megatron": {"override_transformer_config": {"gradient_accumulation_fusion": False}},
        "optim": {"override_optimizer_config": {"use_precision_aware_optimizer": True}},
    }
    config, found = ours(tmp_path, "verl", yaml.safe_dump({"actor_rollout_ref": {"actor": actor}}))
    options = config.actor.megatron
    assert options.gradient_accumulation_fusion is False and options.use_precision_aware_optimizer
    assert not [text for text in said(found, "AL820") if "fusion" in text or "precision" in text]
    back = yaml.safe_load(convert("ours", "verl", (tmp_path / "ours.yaml").read_text(encoding="utf-8")).text)
    assert (
        back["actor_rollout_ref"]["actor"]["optim"]["override_optimizer_config"]
        == actor["optim"]["override_optimizer_config"]
    )

    megatron = {"enabled": True, "optimizer": {"use_precision_aware_optimizer": True}}
    config, found = ours(tmp_path, "nemo-rl", yaml.safe_dump({"policy": {"megatron_cfg": megatron}}))
    assert config.actor.megatron.use_precision_aware_optimizer
