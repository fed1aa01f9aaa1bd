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
