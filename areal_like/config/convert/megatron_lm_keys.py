"""Megatron-LM's and Megatron-RL's flags with their counterparts here (names without dashes in front, as in --lr)."""

from __future__ import annotations

from areal_like.config.convert.common import (
    ATTENTION,
    KL_IN_LOSS,
    SCHEDULE,
    Sizes,
    as_float,
    as_list,
    joined,
    never_as,
    off_as,
    opposite,
)
from areal_like.config.convert.draft import Row, one_of
from areal_like.config.convert.experts import moe_rows

SIZES = Sizes(
    {
        "t": "tensor-model-parallel-size",
        "p": "pipeline-model-parallel-size",
        "c": "context-parallel-size",
        "e": "expert-model-parallel-size",
        "v": "num-virtual-stages-per-pipeline-rank",
    },
    "expert-tensor-parallel-size",
)
_GRANULARITY = one_of({"full": "full", "selective": "selective"})
_TYPE = one_of({"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp8": "uint8"})
_STAGED = "layers are spread over the stages by their compute"

ROWS: tuple[Row, ...] = (
    Row("seed", "seed", 1234, fill=True),
    Row("train-iters", "total_train_steps"),
    Row("save-interval", "saver.freq_steps", None, never_as),
    Row("eval-interval", "evaluator.freq_steps", None, never_as),
    Row("save", "cluster.fileroot"),
    Row("tokenizer-model", "tokenizer_path"),
    Row("lr", "actor.optimizer.lr"),
    Row("optimizer", "actor.optimizer.type", "adam"),
    Row("weight-decay", "actor.optimizer.weight_decay", 0.01),
    Row("clip-grad", "actor.optimizer.gradient_clipping", 1.0),
    Row("adam-beta1", "actor.optimizer.beta1", 0.9),
    Row("adam-beta2", "actor.optimizer.beta2", 0.999),
    Row("adam-eps", "actor.optimizer.eps", 1e-8),
    Row("use-precision-aware-optimizer", "actor.megatron.use_precision_aware_optimizer", False),
    Row("main-grads-dtype", "actor.megatron.main_grads_dtype", "fp32", *_TYPE),
    Row("main-params-dtype", "actor.megatron.main_params_dtype", "fp32", *_TYPE),
    Row("exp-avg-dtype", "actor.megatron.exp_avg_dtype", "fp32", *_TYPE),
    Row("exp-avg-sq-dtype", "actor.megatron.exp_avg_sq_dtype", "fp32", *_TYPE),
    Row("lr-decay-style", "actor.optimizer.lr_scheduler_type", "linear", *SCHEDULE, fill=True),
    Row("lr-warmup-fraction", "actor.optimizer.warmup_steps_proportion", 0.0, fill=True),
    Row("use-distributed-optimizer", "actor.megatron.ddp.use_distributed_optimizer", False, fill=True),
    Row("overlap-grad-reduce", "actor.megatron.ddp.overlap_grad_reduce", False),
    Row("overlap-param-gather", "actor.megatron.ddp.overlap_param_gather", False),
    Row("ddp-bucket-size", "actor.megatron.ddp.bucket_size"),
    Row("ddp-average-in-collective", "actor.megatron.ddp.average_in_collective", False),
    Row("accumulate-allreduce-grads-in-fp32", "actor.megatron.ddp.grad_reduce_in_fp32", False),
    Row("no-gradient-accumulation-fusion", "actor.megatron.gradient_accumulation_fusion", False, opposite, opposite),
    Row("recompute-granularity", "actor.megatron.recompute_granularity", None, *_GRANULARITY),
    Row("recompute-method", "actor.megatron.recompute_method"),
    Row("recompute-num-layers", "actor.megatron.recompute_num_layers"),
    Row("recompute-modules", "actor.megatron.recompute_modules", None, as_list, joined),
    *moe_rows(
        lambda name: name.replace("_", "-"),
        {"moe_token_dispatcher_type": "allgather", "moe_router_load_balancing_type": "aux_loss"},
    ),
    Row("initial-loss-scale", "actor.optimizer.initial_loss_scale", None, as_float),
    Row("min-loss-scale", "actor.optimizer.min_loss_scale", 1.0, as_float),
    Row("loss-scale-window", "actor.optimizer.loss_scale_window", 1000),
    Row("hysteresis", "actor.optimizer.hysteresis", 2),
    Row("loss-scale", note="the loss scale is always found while training"),
    Row("distribute-saved-activations", default=False, note="with t above 1 what is saved is split already"),
    Row("attention-backend", "actor.megatron.attention_backend", "auto", *ATTENTION),
    Row("deterministic-mode", "actor.megatron.use_deterministic_algorithms", False),
    Row("grpo-prompts-per-step", "train_dataset.batch_size", 32, fill=True),
    Row("grpo-group-size", "gconfig.n_samples", 2, fill=True),
    Row("grpo-clamp-eps-lower", "actor.eps_clip", 0.01, fill=True),
    Row("grpo-kl-beta", "actor.kl_ctl", 0.001, fill=True, note=KL_IN_LOSS),
    Row(
        "grpo-entropy-term-weight", "actor.entropy_coeff", 0.0, note="there the entropy is estimated from drawn tokens"
    ),
    Row("rl-default-temperature", "gconfig.temperature", 1.0),
    Row("rl-default-top-p", "gconfig.top_p", 0, *off_as(0, 1.0)),
    Row("rl-default-top-k", "gconfig.top_k", -1, *off_as(-1, 0)),
    Row("grpo-iterations", "actor.update_iterations", 2, fill=True),
    Row("grpo-filter-groups-with-same-reward", "rollout.filter_groups_with_same_reward", False),
    Row("langrl-env-config", "rollout.environments"),
    Row(
        "rl-partial-rollouts",
        default=False,
        note="rollout.generation_lag alone says how far generation runs ahead",
    ),
    Row("rl-generation-lag", "rollout.generation_lag", None, as_float),
    Row("rl-max-inflight-requests", "rollout.max_inflight_requests"),
    Row("rl-submission-granularity", "rollout.submission_granularity", "B"),
    Row("rl-consumption-granularity", "rollout.consumption_granularity", "B"),
    Row("rl-prompts-per-eval", "evaluator.prompts_per_environment", 32),
    Row("rl-offload-optimizer-during-inference", "actor.megatron.optimizer_offload", False),
    Row("rl-kv-cache-management-mode", default="persist", note="the rollout engine keeps its memory"),
    Row("rl-use-sequence-packing", default=False, note="sequences are always packed without padding"),
    Row("rl-durable-rollout-bank", default=False, note="a section rollout.bank says it"),
    Row("rl-rollout-bank-dir", "rollout.bank.path"),
    Row("rl-rollout-bank-max-bytes", "rollout.bank.max_bytes"),
    Row("refit-method", default="gloo", note="weights are streamed to the rollout workers"),
    Row("inference-max-requests", note="Megatron-RL itself reads inference-dynamic-batching-max-requests"),
    Row("load", note="Megatron checkpoints are not read: actor.path is a Hugging Face folder"),
    Row("pretrained-checkpoint", note="Megatron checkpoints are not read: actor.path is a Hugging Face folder"),
    Row("decoder-first-pipeline-num-layers", note=_STAGED),
    Row("decoder-last-pipeline-num-layers", note=_STAGED),
    Row("pipeline-model-parallel-layout", note=_STAGED),
    Row(
        "optimizer-cpu-offload",
        default=False,
        note="the optimizer's step is computed where the model is; actor.megatron.optimizer_offload moves its states"
        " between steps",
    ),
)
"""Flags that go over one by one; `megatron_lm` reads the rest."""

IGNORED = frozenset({"perform-rl-step", "use-mcore-models", "mock-data", "finetune", "te-rng-tracker"})
"""Flags that only say what this system does anyhow."""

_MODEL = (
    "num-layers hidden-size ffn-hidden-size num-attention-heads num-query-groups group-query-attention kv-channels "
    "max-position-embeddings position-embedding-type rotary-base rotary-percent normalization norm-epsilon swiglu "
    "untie-embeddings-and-output-weights disable-bias-linear add-qkv-bias qk-layernorm num-experts moe-router-topk "
    "moe-ffn-hidden-size moe-grouped-gemm moe-layer-freq make-vocab-size-divisible-by vocab-size tokenizer-type "
    "use-rotary-position-embeddings moe-router-score-function moe-shared-expert-intermediate-size"
)
MODEL = frozenset(_MODEL.split())
"""Flags that describe the model, which its Hugging Face folder does here."""
