"""verl's keys with their counterparts here; names and defaults as in its `ppo_megatron_trainer.yaml` of 2026."""

from __future__ import annotations

from areal_like.config.convert.common import (
    ATTENTION,
    DTYPE,
    SCHEDULE,
    Sizes,
    never_as,
    off_as,
    opposite,
    usable_name,
)
from areal_like.config.convert.draft import Row, one_of
from areal_like.config.convert.experts import moe_rows

R = "actor_rollout_ref"
_TRANSFORMER = f"{R}.actor.megatron.override_transformer_config"
_DDP = f"{R}.actor.megatron.override_ddp_config"
_DEVICE = one_of({"cuda": "cuda", "cpu": "cpu"})
_LOSS = one_of({"vanilla": "token", "gspo": "sequence"})
_BRIDGE = one_of({True: "mbridge", False: "megatron-bridge"})
_LAYOUT = "a letter of the `backend` string says it"
_TOP_K = off_as(-1, 0)
_NEVER = off_as(-1, None)
_PROFILE = (
    "profiles are set up in actor.profiler and ref.profiler, which count optimizer steps, not batches of rollouts"
)
_NEVER_READ = "verl takes this key and never reads it: gradients go with param_offload there"
_ONE_VALUE = "the loss is the mean over tokens of the whole batch"


def megatron_sizes(role: str) -> Sizes:
    """Keys of the parallel sizes below a role's section."""
    return Sizes(
        {
            "t": f"{role}.megatron.tensor_model_parallel_size",
            "p": f"{role}.megatron.pipeline_model_parallel_size",
            "c": f"{role}.megatron.context_parallel_size",
            "e": f"{role}.megatron.expert_model_parallel_size",
            "v": f"{role}.megatron.virtual_pipeline_model_parallel_size",
        },
        f"{role}.megatron.expert_tensor_parallel_size",
    )


ROWS: tuple[Row, ...] = (
    Row("trainer.project_name", "experiment_name", "verl_examples", usable_name, fill=True),
    Row("trainer.experiment_name", "trial_name", "gsm8k", usable_name, fill=True),
    Row("trainer.total_epochs", "total_train_epochs", 30, fill=True),
    Row("trainer.total_training_steps", "total_train_steps"),
    Row("trainer.nnodes", "cluster.n_nodes", 1),
    Row("trainer.n_gpus_per_node", "cluster.n_gpus_per_node", 8),
    Row("trainer.device", "device", "cuda", *_DEVICE, fill=True),
    Row("trainer.save_freq", "saver.freq_steps", -1, never_as, _NEVER[1]),
    Row("trainer.test_freq", "evaluator.freq_steps", -1, never_as, _NEVER[1]),
    Row("trainer.val_before_train", "evaluator.eval_before_train", True),
    Row("trainer.critic_warmup", default=0, note="GRPO has no value model to warm up"),
    Row("trainer.balance_batch", default=True, note="sequences are always balanced over the ranks"),
    Row("trainer.resume_mode", default="auto", note="recover.mode and recover.freq_steps say it here"),
    Row(
        "data.train_files", "train_dataset.path", note="verl's rows have a column prompt, rows here question and answer"
    ),
    Row("data.val_files", "valid_dataset.path", note="verl's rows have a column prompt, rows here question and answer"),
    Row("data.train_batch_size", "train_dataset.batch_size", 1024, fill=True),
    Row("data.val_batch_size", "valid_dataset.batch_size"),
    Row("data.shuffle", "train_dataset.shuffle", True),
    Row("data.max_prompt_length", "train_dataset.max_length", 512, fill=True),
    Row(f"{R}.rollout.prompt_length", "train_dataset.max_length"),
    Row("data.max_response_length", "gconfig.max_new_tokens", 512, fill=True),
    Row(f"{R}.rollout.response_length", "gconfig.max_new_tokens"),
    Row(
        "data.filter_overlong_prompts", default=False, note="prompts above train_dataset.max_length are always left out"
    ),
    Row("data.truncation", default="error", note="prompts above train_dataset.max_length are left out, never cut"),
    Row(f"{R}.model.path", "actor.path"),
    Row(f"{R}.model.tokenizer_path", "tokenizer_path"),
    Row(
        f"{R}.model.lora_rank", default=0, note="here actor.use_lora, lora_rank and bridge_type: megatron-bridge say it"
    ),
    Row(f"{R}.model.lora_alpha", default=16, note="here actor.use_lora and lora_alpha say it"),
    Row(f"{R}.model.trust_remote_code", default=False, note="no code of a model's folder is run"),
    Row(f"{R}.model.use_remove_padding", default=False, note="sequences are always packed without padding"),
    Row(f"{R}.model.enable_gradient_checkpointing", default=True, note="it is for FSDP; see recompute_granularity"),
    Row(f"{R}.hybrid_engine", default=True, note="actor and rollout always stream weights to each other"),
    Row(f"{R}.rollout.n", "gconfig.n_samples", 1, fill=True),
    Row(f"{R}.rollout.temperature", "gconfig.temperature", 1.0),
    Row(f"{R}.rollout.top_p", "gconfig.top_p", 1),
    Row(f"{R}.rollout.top_k", "gconfig.top_k", -1, *_TOP_K),
    Row(f"{R}.rollout.do_sample", "gconfig.greedy", True, opposite, opposite),
    Row(f"{R}.rollout.ignore_eos", "gconfig.ignore_eos", False),
    Row(f"{R}.rollout.val_kwargs.n", "eval_gconfig.n_samples", 1),
    Row(f"{R}.rollout.val_kwargs.temperature", "eval_gconfig.temperature", 0),
    Row(f"{R}.rollout.val_kwargs.top_p", "eval_gconfig.top_p", 1.0),
    Row(f"{R}.rollout.val_kwargs.top_k", "eval_gconfig.top_k", -1, *_TOP_K),
    Row(f"{R}.rollout.val_kwargs.do_sample", "eval_gconfig.greedy", False, opposite, opposite),
    Row(f"{R}.rollout.mode", default="async", note="rollout workers are always called asynchronously"),
    Row(f"{R}.rollout.dtype", default="bfloat16", note="the rollout engine takes the type of the model"),
    Row(
        f"{R}.rollout.data_parallel_size",
        default=1,
        note="replicas inside one server have no letter; see rollout.backend",
    ),
    Row(f"{R}.rollout.expert_parallel_size", default=1, note="inference backends take no letter e"),
    Row(f"{R}.actor.megatron.dtype", "actor.dtype", "bfloat16", *DTYPE),
    Row(f"{R}.actor.megatron.param_offload", "actor.megatron.param_offload", False),
    Row(f"{R}.actor.megatron.grad_offload", "actor.megatron.grad_offload", False, note=_NEVER_READ),
    Row(f"{R}.actor.megatron.optimizer_offload", "actor.megatron.optimizer_offload", False),
    Row(f"{R}.ref.megatron.param_offload", "ref.megatron.param_offload", False),
    Row(f"{R}.actor.megatron.use_mbridge", default=True, note="weights are always those of a Hugging Face folder"),
    Row(f"{R}.actor.megatron.vanilla_mbridge", "actor.megatron.bridge_type", True, *_BRIDGE),
    Row(f"{R}.actor.megatron.use_remove_padding", default=True, note="sequences are always packed without padding"),
    Row(f"{R}.actor.megatron.use_distributed_optimizer", "actor.megatron.ddp.use_distributed_optimizer", True),
    Row(f"{_DDP}.grad_reduce_in_fp32", "actor.megatron.ddp.grad_reduce_in_fp32"),
    Row(f"{_DDP}.overlap_grad_reduce", "actor.megatron.ddp.overlap_grad_reduce"),
    Row(f"{_DDP}.overlap_param_gather", "actor.megatron.ddp.overlap_param_gather"),
    Row(f"{_DDP}.bucket_size", "actor.megatron.ddp.bucket_size"),
    Row(f"{_DDP}.average_in_collective", "actor.megatron.ddp.average_in_collective"),
    Row(f"{_DDP}.check_for_nan_in_grad", "actor.megatron.ddp.check_for_nan_in_grad"),
    Row(f"{_TRANSFORMER}.recompute_method", "actor.megatron.recompute_method"),
    Row(f"{_TRANSFORMER}.recompute_num_layers", "actor.megatron.recompute_num_layers"),
    Row(f"{_TRANSFORMER}.recompute_modules", "actor.megatron.recompute_modules"),
    *moe_rows(lambda name: f"{_TRANSFORMER}.{name}", {}),
    Row(f"{_TRANSFORMER}.deterministic_mode", "actor.megatron.use_deterministic_algorithms"),
    Row(f"{_TRANSFORMER}.gradient_accumulation_fusion", "actor.megatron.gradient_accumulation_fusion"),
    Row(f"{_TRANSFORMER}.fp16", default=False, note="actor.dtype says it"),
    Row(f"{_TRANSFORMER}.bf16", default=True, note="actor.dtype says it"),
    Row(f"{_TRANSFORMER}.attention_backend", "actor.megatron.attention_backend", "flash", *ATTENTION),
    Row(f"{_TRANSFORMER}.masked_softmax_fusion", default=True, note="kernels are the engine's choice"),
    Row(f"{_TRANSFORMER}.bias_activation_fusion", default=True, note="kernels are the engine's choice"),
    Row(f"{R}.actor.ppo_epochs", default=1, note="each answer is trained on once"),
    Row(f"{R}.actor.clip_ratio_c", "actor.c_clip", 3.0, fill=True),
    Row(f"{R}.actor.entropy_coeff", "actor.entropy_coeff", 0),
    Row(f"{R}.actor.loss_agg_mode", default="token-mean", note=_ONE_VALUE),
    Row(f"{R}.actor.policy_loss.loss_mode", "actor.importance_sampling_level", "vanilla", *_LOSS),
    Row(f"{R}.actor.shuffle", default=False, note="mini-batches keep the order of the batch"),
    Row(f"{R}.actor.optim.lr", "actor.optimizer.lr", 1e-6, fill=True),
    Row(f"{R}.actor.optim.optimizer", "actor.optimizer.type", "adam"),
    Row(
        f"{R}.actor.optim.override_optimizer_config.use_precision_aware_optimizer",
        "actor.megatron.use_precision_aware_optimizer",
    ),
    Row(f"{R}.actor.optim.weight_decay", "actor.optimizer.weight_decay", 0.01),
    Row(f"{R}.actor.optim.clip_grad", "actor.optimizer.gradient_clipping", 1.0),
    Row(f"{R}.actor.optim.lr_warmup_steps_ratio", "actor.optimizer.warmup_steps_proportion", 0.0, fill=True),
    Row(
        f"{R}.actor.optim.lr_warmup_steps", default=-1, note="give it as a share of all steps: warmup_steps_proportion"
    ),
    Row(f"{R}.actor.optim.lr_decay_style", "actor.optimizer.lr_scheduler_type", "constant", *SCHEDULE),
    Row("algorithm.gamma", "actor.discount", 1.0),
    Row("algorithm.lam", "actor.gae_lambda", 1.0),
)
"""Keys that go over one by one. `verl` reads the rest: sizes, batches, clipping, KL, advantages."""

SECTIONS: dict[str, str] = {
    "critic": "GRPO trains no value model",
    "reward_model": "rewards are Python functions, given to the trainer",
    "reward_manager": "rewards are Python functions, given to the trainer",
    "reward": "rewards are Python functions, given to the trainer",
    "custom_reward_function": "rewards are Python functions, given to the trainer",
    "global_profiler": _PROFILE,
    f"{R}.actor.profiler": _PROFILE,
    f"{R}.actor.profile": _PROFILE,
    f"{R}.ref.profiler": _PROFILE,
    f"{R}.rollout.profiler": "only training engines record profiles",
    f"{R}.actor.megatron": "this version sets nothing like it in Megatron-Core",
    f"{R}.ref.megatron": "the reference has the actor's settings",
    f"{R}.ref": "the reference has the actor's micro-batches and settings",
    f"{R}.rollout": "it is a setting of an inference server that this version does not start",
    f"{R}.rollout.multi_turn": "rollouts have one turn",
    f"{R}.rollout.agent": "rollouts have one turn",
    f"{R}.actor.checkpoint": "the actor is saved as a Hugging Face folder, whole",
    f"{R}.actor.policy_loss": "the loss is GRPO's",
    f"{R}.actor.optim": "the optimizer has no such setting here",
    f"{R}.model": "the model is what its folder says",
    "data": "prompts are prepared by the trainer itself",
    "trainer": "the trainer has no such setting",
    "algorithm": "the algorithm is GRPO",
    "algorithm.kl_ctrl": "the weight of the divergence is fixed",
    "ray_kwargs": "nothing is started with Ray",
    "transfer_queue": "batches go straight to their ranks",
}
"""Why the keys of a section have no counterpart; the longest prefix counts."""
