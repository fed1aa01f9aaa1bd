"""Keys of AReaL that are not in this schema, so that a file written for it gets a better answer than "unknown key"."""

from __future__ import annotations

from typing import Any

_ENGINE = (
    "attn_impl use_kernels pad_to_maximum grad_reduce_dtype optimizer_dtype fsdp archon offload "
    "_version admin_api_key log_level request_timeout "
    "setup_timeout"
)

_NOT_HERE: dict[str, str] = {
    "RLConfig": "teacher dynamic_bs memory_profiler",
    "GenerationConfig": "skip_special_tokens lora_name use_beam_search",
    "MicroBatchConfig": "",
    "OptimizerConfig": "offload",
    "DDPConfig": "align_param_gather",
    "MegatronConfig": (
        "wrap_with_ddp use_torch_fsdp2 use_custom_fsdp overlap_param_gather_with_optimizer_step "
        "use_mbridge_save use_bridge_for_update_weights"
    ),
    "TrainEngineConfig": _ENGINE,
    "ActorConfig": (
        "group_size dynamic_sampling m2_threshold overlong_reward_penalty overlong_tokens overlong_penalty_factor "
        "use_sapo_loss sapo_tau_pos sapo_tau_neg log_agent_stats_keys enable_kpop kpop_phi"
    ),
    "RolloutConfig": (
        "check_trajectory_format return_routed_experts openai _version model routing_strategy poll_interval "
        "admin_api_key api_url provider_api_key log_level"
    ),
    "TrainDatasetConfig": "num_dataset_workers setup_timeout",
    "RecoverConfig": "no_save_optim no_load_optim",
    "ClusterConfig": "gpu_type mount default_mount",
    "SchedulerConfig": (
        "endpoint deploy_mode functioncall_service_domain reward_functioncall_config reward_model_path "
        "reward_model_service_url"
    ),
}


def without_counterpart(model: type[Any], name: str) -> bool:
    """Whether AReaL has this key in the section of `model`, and this schema has nothing for it."""
    return any(name in _NOT_HERE.get(base.__name__, "").split() for base in model.__mro__)
