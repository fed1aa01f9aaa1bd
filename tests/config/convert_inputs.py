"""One configuration of each system, for the tests of conversion."""

from __future__ import annotations

VERL = """\
actor_rollout_ref:
  model: {path: Qwen/Qwen3-30B-A3B}
  actor:
    strategy: megatron
    ppo_mini_batch_size: 64
    use_dynamic_bsz: true
    ppo_max_token_len_per_gpu: 8192
    clip_ratio_low: 0.2
    clip_ratio_high: 0.28
    use_kl_loss: true
    kl_loss_coef: 0.002
    optim: {lr: 2e-6, betas: [0.9, 0.95], min_lr: 2e-7, lr_decay_style: cosine, lr_warmup_steps_ratio: 0.1}
    megatron:
      tensor_model_parallel_size: 2
      pipeline_model_parallel_size: 2
      context_parallel_size: 2
      expert_model_parallel_size: 4
      param_offload: true
      grad_offload: true
      override_transformer_config: {recompute_granularity: full, recompute_method: uniform, recompute_num_layers: 2}
  rollout: {name: sglang, n: 8, tensor_model_parallel_size: 4, temperature: 0.9, top_k: -1, gpu_memory_utilization: 0.6}
algorithm: {adv_estimator: grpo, norm_adv_by_std_in_grpo: false}
data: {train_batch_size: 256, max_prompt_length: 1024, max_response_length: 3072, train_files: /data/train.parquet}
trainer:
  nnodes: 1
  n_gpus_per_node: 16
  total_epochs: 2
  save_freq: 20
  test_freq: -1
  project_name: math
  experiment_name: a b
critic: {optim: {lr: 1e-5}}
"""
NEMO = """\
grpo:
  num_prompts_per_step: 64
  num_generations_per_prompt: 8
  max_num_steps: 100
  async_grpo: {enabled: true, max_trajectory_age_steps: 2}
loss_fn:
  reference_policy_kl_penalty: 0.0
  ratio_clip_max: 0.28
  use_importance_sampling_correction: true
  truncated_importance_sampling_ratio: 5.0
policy:
  model_name: Qwen/Qwen3-30B-A3B
  train_global_batch_size: 256
  train_micro_batch_size: 2
  max_total_sequence_length: 4096
  dtensor_cfg: {enabled: false}
  megatron_cfg:
    enabled: true
    tensor_model_parallel_size: 2
    expert_model_parallel_size: 4
    sequence_parallel: true
    optimizer: {lr: 3.0e-7, min_lr: 3.0e-8}
    scheduler: {lr_warmup_iters: 10, lr_decay_style: linear}
  sequence_packing:
    enabled: true
    train_mb_tokens: ${mul:${policy.max_total_sequence_length}, ${policy.train_micro_batch_size}}
  generation:
    backend: vllm
    vllm_cfg: {tensor_parallel_size: 4}
    colocated: {enabled: false, resources: {num_nodes: 1, gpus_per_node: 8}}
data: {train: {dataset_name: OpenMathInstruct-2}}
cluster: {gpus_per_node: 8, num_nodes: 2}
logger: {wandb_enabled: true}
"""
OURS = """\
experiment_name: math
trial_name: first
seed: 7
device: cuda
total_train_epochs: 3
total_train_steps: 50
tokenizer_path: some/tokenizer
cluster: {fileroot: /runs, n_gpus_per_node: 16}
rollout: {backend: "vllm:d4t2", max_head_offpolicyness: 1, max_concurrent_rollouts: 32, dump_to_file: true}
gconfig: {n_samples: 8, max_new_tokens: 512, max_tokens: 2048, temperature: 0.8, top_p: 0.9, top_k: 40, stop: ["##"]}
eval_gconfig: {n_samples: 2, max_new_tokens: 512, temperature: 0.5}
actor:
  backend: "megatron:d2t2p2e2"
  path: some/model
  disable_dropout: true
  gradient_checkpointing: true
  mb_spec: {max_tokens_per_mb: 8192}
  optimizer:
    {lr: 2e-6, weight_decay: 0.1, beta2: 0.95, eps: 1e-7, min_lr_ratio: 0.1, lr_scheduler_type: cosine,
     warmup_steps_proportion: 0.2, gradient_clipping: 0.5}
  megatron:
    ddp: {grad_reduce_in_fp32: false, overlap_grad_reduce: true, overlap_param_gather: true, bucket_size: 1000}
    recompute_granularity: full
    recompute_method: block
    recompute_num_layers: 2
    moe_token_dispatcher_type: allgather
    moe_router_dtype: fp64
    use_deterministic_algorithms: true
  reward_norm: {mean_level: group, std_level: group, eps: 1e-3, std_unbiased: false, mean_leave1out: true}
  adv_norm: {}
  reward_scaling: 2.0
  eps_clip: 0.3
  eps_clip_higher: 0.4
  c_clip: 2.0
  kl_ctl: 0.01
  kl_estimator: k2
  entropy_coeff: 0.01
  ppo_n_minibatches: 2
  use_decoupled_loss: true
  recompute_logprob: true
  importance_sampling_level: sequence
  rejection_sampling: {level: sequence, action: clamp, upper: 3.0, lower: 0.5, agg: sum}
ref: {}
train_dataset: {path: some/data, name: main, batch_size: 64, max_length: 1000, shuffle: false}
valid_dataset: {path: other/data, batch_size: 32}
saver: {freq_steps: 10}
evaluator: {freq_steps: 5}
vllm: {max_num_seqs: 7}
"""
FLAGS = (
    "torchrun --nnodes 1 --nproc-per-node 16 train_rl.py --perform-rl-step --tensor-model-parallel-size 2 "
    "--pipeline-model-parallel-size 2 --expert-model-parallel-size 4 --num-experts 128 --num-layers 48 "
    "--num-layers-per-virtual-pipeline-stage 12 --sequence-parallel --bf16 --lr 1e-6 --min-lr 1e-7 "
    "--lr-decay-style cosine --adam-beta2=0.95 --grpo-group-size 16 --grpo-prompts-per-step 64 "
    "--grpo-iterations 1 --grpo-clamp-eps-lower 0.2 --grpo-clamp-eps-upper 0.28 --grpo-kl-beta 0.0 "
    "--global-batch-size 512 --micro-batch-size 2 --seq-length 4096 --rl-partial-rollouts --rl-generation-lag 2 "
    "--rl-inference-tensor-model-parallel-size 4 --rl-inference-logprobs-is-correction "
    "--rl-importance-sampling-truncation-coef 10 --use-distributed-optimizer --recompute-activations "
    "--attention-dropout 0.0 --hidden-dropout 0.0 --load /checkpoints/base"
)
