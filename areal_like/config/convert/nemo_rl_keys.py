"""NeMo-RL's keys with their counterparts here; names and defaults of its `examples/configs/grpo_math_1B.yaml` (0.5)."""

from __future__ import annotations

from areal_like.config.convert.common import DTYPE, KL_IN_LOSS, SCHEDULE, Sizes, as_float, never_as, off_as
from areal_like.config.convert.draft import Row, one_of
from areal_like.config.convert.experts import moe_rows

M = "policy.megatron_cfg"
_TOP_K = off_as(None, 0)
_SEQUENCE = (lambda v: "sequence" if v is True else "token", lambda v: v == "sequence")
_KL = one_of({"k1": "k1", "k2": "k2", "k3": "k3"})
_STAY = (
    "the optimizer's step is computed where the model is; actor.megatron.optimizer_offload moves its states between "
    "steps"
)

MEGATRON_SIZES = Sizes(
    {
        "t": f"{M}.tensor_model_parallel_size",
        "p": f"{M}.pipeline_model_parallel_size",
        "c": f"{M}.context_parallel_size",
        "e": f"{M}.expert_model_parallel_size",
    },
    f"{M}.expert_tensor_parallel_size",
    expert_tensor_default=1,
)
DTENSOR_SIZES = Sizes(
    {"t": "policy.dtensor_cfg.tensor_parallel_size", "c": "policy.dtensor_cfg.context_parallel_size"},
    "policy.dtensor_cfg.expert_tensor_parallel_size",
    expert_tensor_default=1,
)

ROWS: tuple[Row, ...] = (
    Row("grpo.num_prompts_per_step", "train_dataset.batch_size", 32, fill=True),
    Row("grpo.num_generations_per_prompt", "gconfig.n_samples", 16, fill=True),
    Row("grpo.max_num_epochs", "total_train_epochs", 1),
    Row("grpo.max_num_steps", "total_train_steps", 1000000),
    Row("grpo.seed", "seed", 42, fill=True),
    Row("grpo.val_period", "evaluator.freq_steps", 10, never_as, lambda v: v or 0),
    Row("grpo.val_at_start", "evaluator.eval_before_train", False),
    Row("grpo.val_batch_size", "valid_dataset.batch_size", 256),
    Row("grpo.max_rollout_turns", default=1, note="rollouts have one turn"),
    Row("grpo.overlong_filtering", "actor.mask_no_eos_with_zero", False),
    Row("grpo.use_dynamic_sampling", default=False, note="all groups are trained on"),
    Row("grpo.reward_shaping.enabled", default=False, note="shape the reward in its Python function"),
    Row("grpo.reward_scaling.enabled", default=False, note="actor.reward_scaling and reward_bias are another formula"),
    Row("grpo.async_grpo.in_flight_weight_updates", default=False, note="weights change between requests"),
    Row("loss_fn.reference_policy_kl_penalty", "actor.kl_ctl", 0.01, as_float, fill=True, note=KL_IN_LOSS),
    Row("loss_fn.reference_policy_kl_type", "actor.kl_estimator", "k3", *_KL, fill=True),
    Row("loss_fn.ratio_clip_min", "actor.eps_clip", 0.2),
    Row("loss_fn.ratio_clip_c", "actor.c_clip"),
    Row("loss_fn.sequence_level_importance_ratios", "actor.importance_sampling_level", False, *_SEQUENCE),
    Row("loss_fn.token_level_loss", default=True, note="the loss is the mean over tokens of the whole batch"),
    Row("loss_fn.use_on_policy_kl_approximation", default=False, note="the divergence is taken off the rewards"),
    Row("loss_fn.force_on_policy_ratio", default=False, note="with one optimizer step a batch the ratio is 1 anyway"),
    Row("policy.model_name", "actor.path"),
    Row("policy.tokenizer.name", "tokenizer_path"),
    Row("policy.precision", "actor.dtype", "bfloat16", *DTYPE),
    Row("policy.max_total_sequence_length", "gconfig.max_tokens", 512, fill=True),
    Row("policy.generation_batch_size", default=32, note="the rollout engine batches by itself"),
    Row("policy.logprob_batch_size", default=4, note="log-probabilities use the micro-batches of training"),
    Row("policy.logprob_chunk_size", note="log-probabilities use the micro-batches of training"),
    Row("policy.max_grad_norm", "actor.optimizer.gradient_clipping", 1.0),
    Row(f"{M}.optimizer.clip_grad", "actor.optimizer.gradient_clipping"),
    Row(f"{M}.optimizer.optimizer", "actor.optimizer.type", "adam"),
    Row(f"{M}.optimizer.lr", "actor.optimizer.lr", 5e-6, fill=True),
    Row(f"{M}.optimizer.weight_decay", "actor.optimizer.weight_decay", 0.01),
    Row(f"{M}.optimizer.adam_beta1", "actor.optimizer.beta1", 0.9),
    Row(f"{M}.optimizer.adam_beta2", "actor.optimizer.beta2", 0.999),
    Row(f"{M}.optimizer.adam_eps", "actor.optimizer.eps", 1e-8),
    Row(f"{M}.optimizer.sgd_momentum", default=0.9, note="sgd has no momentum here"),
    Row(f"{M}.optimizer.bf16", default=True, note="actor.dtype says it"),
    Row(f"{M}.optimizer.fp16", default=False, note="actor.dtype says it"),
    Row(f"{M}.optimizer.params_dtype", default="float32", note="the optimizer's own parameters are float32"),
    Row(f"{M}.optimizer.use_distributed_optimizer", "actor.megatron.ddp.use_distributed_optimizer", True),
    Row(f"{M}.optimizer.use_precision_aware_optimizer", "actor.megatron.use_precision_aware_optimizer", True),
    Row(f"{M}.optimizer.optimizer_cpu_offload", default=False, note=_STAY),
    Row(f"{M}.optimizer.optimizer_offload_fraction", default=0.0, note=_STAY),
    Row(f"{M}.scheduler.lr_decay_style", "actor.optimizer.lr_scheduler_type", "constant", *SCHEDULE),
    Row(
        f"{M}.distributed_data_parallel_config.grad_reduce_in_fp32",
        "actor.megatron.ddp.grad_reduce_in_fp32",
        False,
        fill=True,
    ),
    Row(f"{M}.distributed_data_parallel_config.overlap_grad_reduce", "actor.megatron.ddp.overlap_grad_reduce", True),
    Row(f"{M}.distributed_data_parallel_config.overlap_param_gather", "actor.megatron.ddp.overlap_param_gather", True),
    Row(f"{M}.distributed_data_parallel_config.average_in_collective", "actor.megatron.ddp.average_in_collective"),
    Row(
        f"{M}.distributed_data_parallel_config.use_custom_fsdp", default=False, note="the engine is Megatron-Core's own"
    ),
    Row(f"{M}.activation_checkpointing", "actor.gradient_checkpointing", False),
    *moe_rows(
        lambda name: f"{M}.{name}",
        {
            "moe_router_dtype": "fp64",
            "moe_token_dispatcher_type": "allgather",
            "moe_router_load_balancing_type": "none",
            "moe_permute_fusion": False,
            "moe_shared_expert_overlap": False,
        },
        fill=("moe_router_dtype",),
    ),
    Row(f"{M}.moe_router_bias_update_rate", "actor.megatron.moe_router_bias_update_rate", 0.0),
    Row(f"{M}.converter_type", default="Qwen2ForCausalLM", note="the model's folder says its architecture"),
    Row(f"{M}.pipeline_dtype", default="bfloat16", note="actor.dtype says it"),
    Row(f"{M}.freeze_moe_router", default=True, note="all weights are trained"),
    Row(f"{M}.empty_unused_memory_level", default=1, note="unused memory is given back whenever a model is offloaded"),
    Row("policy.dtensor_cfg.activation_checkpointing", "actor.gradient_checkpointing"),
    Row("policy.generation.max_new_tokens", "gconfig.max_new_tokens", 512, fill=True),
    Row("policy.generation.temperature", "gconfig.temperature", 1.0),
    Row("policy.generation.top_p", "gconfig.top_p", 1.0),
    Row("policy.generation.top_k", "gconfig.top_k", None, *_TOP_K),
    Row("policy.generation.stop_token_ids", "gconfig.stop_token_ids"),
    Row("policy.generation.stop_strings", "gconfig.stop"),
    Row("data.train.dataset_name", "train_dataset.path", note="NeMo-RL's short names are of its own loaders"),
    Row("data.dataset_name", "train_dataset.path", note="NeMo-RL's short names are of its own loaders"),
    Row("data.train.data_path", "train_dataset.path"),
    Row("data.validation.dataset_name", "valid_dataset.path", note="NeMo-RL's short names are of its own loaders"),
    Row("data.validation.data_path", "valid_dataset.path"),
    Row("data.shuffle", "train_dataset.shuffle", True),
    Row("data.max_input_seq_length", "train_dataset.max_length", 512),
    Row("checkpointing.save_period", "saver.freq_steps", 10, never_as),
    Row("checkpointing.checkpoint_dir", "cluster.fileroot"),
    Row("cluster.num_nodes", "cluster.n_nodes", 1),
    Row("cluster.gpus_per_node", "cluster.n_gpus_per_node", 1, fill=True),
)
"""Keys that go over one by one; `nemo_rl` reads the rest."""

SECTIONS: dict[str, str] = {
    "grpo": "the algorithm has no such setting here",
    "loss_fn": "the loss is GRPO's",
    "policy": "the trainer has no such setting",
    "policy.dtensor_cfg": "the backend string and the engine's defaults say it",
    "policy.dtensor_cfg.lora_cfg": "here actor.use_lora, lora_rank, lora_alpha and target_modules say it",
    "policy.optimizer": "it is for DTensor; the Megatron optimizer's keys go over",
    "policy.scheduler": "it is for DTensor; the Megatron scheduler's keys go over",
    "policy.megatron_cfg": "this version sets nothing like it in Megatron-Core",
    "policy.megatron_cfg.peft": "here actor.use_lora, lora_rank, lora_alpha and target_modules say it",
    "policy.megatron_cfg.scheduler": "the schedule is of the learning rate alone",
    "policy.generation": "it is a setting of an inference server that this version does not start",
    "data": "prompts are prepared by the trainer itself",
    "env": "rewards are Python functions, given to the trainer",
    "logger": "figures go to TensorBoard and to a JSONL file",
    "checkpointing": "checkpoints are Hugging Face folders, all kept",
    "reward": "rewards are Python functions, given to the trainer",
}
