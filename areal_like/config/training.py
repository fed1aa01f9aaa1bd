"""One trained model: its layout, weights, micro-batches, optimizer, and the options of the Megatron engine."""

from __future__ import annotations

from typing import Any, Literal

from areal_like.config.fields import REQUIRED, Section, key, run_name, trial_name

_PLACED_BY_LAYOUT = "processes and GPUs follow from `backend`; nothing else is scheduled"


class MicroBatchConfig(Section):
    """How the sequences of a rank are cut into micro-batches."""

    max_tokens_per_mb: int | None = key(
        None, "Most tokens in a micro-batch; null sets no limit. A longer sequence is an error.", unit="tokens", ge=1
    )
    n_mbs: int | None = key(
        1, "Fewest micro-batches of a step on each rank; null and 1 leave the number to the token limit.", ge=1
    )
    granularity: int = key(
        1,
        "Neighbouring sequences that stay together.",
        unit="sequences",
        ge=1,
        unsupported_unless=(1,),
        why="sequences are packed one by one",
    )
    n_mbs_divisor: int = key(
        1,
        "Number that divides the count of micro-batches.",
        ge=1,
        unsupported_unless=(1,),
        why="the divisor follows from the pipeline of `backend`",
    )
    packing_algorithm: Literal["ffd", "kk"] = key(
        "ffd", "How sequences are packed.", no_effect="one packing is used, balanced over micro-batches"
    )


class OptimizerConfig(Section):
    """The optimizer and its learning-rate schedule."""

    type: Literal["adam", "sgd"] = key("adam", "`adam` is AdamW (decoupled weight decay); `sgd` has no momentum.")
    lr: float = key(REQUIRED, "Learning rate after warm-up.", gt=0.0)
    weight_decay: float = key(0.01, "Decoupled weight decay, times the learning rate; not of biases and norms.", ge=0.0)
    beta1: float = key(0.9, "Decay of Adam's running mean of gradients.", ge=0.0, lt=1.0)
    beta2: float = key(0.999, "Decay of Adam's running mean of squared gradients.", ge=0.0, lt=1.0)
    eps: float = key(1e-8, "Added to Adam's denominator.", gt=0.0)
    min_lr_ratio: float = key(0.0, "Learning rate at the end of a decay, as a share of lr.", ge=0.0, le=1.0)
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = key(
        "constant", "Course of the learning rate from warm-up to the last step."
    )
    warmup_steps_proportion: float = key(
        0.001, "Share of all steps in which the learning rate rises from 0.", ge=0.0, le=1.0
    )
    gradient_clipping: float = key(
        1.0, "Gradients are scaled down to this global L2 norm; 0 switches clipping off.", ge=0.0
    )


class DDPConfig(Section):
    """Megatron-Core's gradient buffers and data-parallel communication."""

    grad_reduce_in_fp32: bool = key(True, "Keep and reduce gradients in float32.")
    overlap_grad_reduce: bool = key(False, "Reduce gradients during the backward pass.")
    overlap_param_gather: bool = key(False, "Gather parameters during the forward pass (needs overlap_grad_reduce).")
    use_distributed_optimizer: bool = key(True, "Shard optimizer state over the data-parallel ranks.")
    bucket_size: int | None = key(
        None, "Parameters in one communication bucket; null takes Megatron-Core's choice.", unit="parameters", ge=1
    )
    average_in_collective: bool = key(
        False,
        "Let the collective average instead of scaling before it.",
        unsupported_unless=(False,),
        why="gradients are summed: the loss is already divided by the loss tokens of the global batch",
    )
    check_for_nan_in_grad: bool = key(False, "Stop when a gradient is not finite before it is reduced.")


class MegatronConfig(Section):
    """Options of the Megatron engine that the allocation does not say."""

    bridge_type: Literal["mbridge", "megatron-bridge"] = key(
        "mbridge",
        "Package that maps Hugging Face weights to Megatron-Core.",
        unsupported_unless=("mbridge",),
        why="only mbridge is built in",
    )
    ddp: DDPConfig = key(DDPConfig, "Gradient buffers and data-parallel communication.")
    virtual_pipeline_parallel_size: int = key(
        1,
        "Pipeline stages a rank holds.",
        unit="stages",
        ge=1,
        unsupported_unless=(1,),
        why="a parallel size is said once, in `backend`: write the letter v there, as in megatron:p2v2",
    )
    recompute_granularity: Literal["full", "selective"] | None = key(
        "full", "What is recomputed in the backward pass when gradient_checkpointing is on."
    )
    recompute_method: Literal["uniform", "block"] | None = key(
        "uniform", "Which layers are recomputed: groups of equal size, or the first layers of a stage."
    )
    recompute_num_layers: int | None = key(1, "Layers of one recomputed group or block.", unit="layers", ge=1)
    moe_token_dispatcher_type: Literal["allgather", "alltoall", "flex"] = key(
        "alltoall", "How tokens reach the ranks of their experts."
    )
    moe_router_dtype: Literal["fp32", "fp64"] | None = key(
        "fp32", "Type of the router's arithmetic; null takes that of the model."
    )
    use_deterministic_algorithms: bool = key(False, "Ask torch and Megatron-Core for bit-reproducible kernels.")
    fp8_config: dict[str, Any] | None = key(
        None, "Training in FP8.", unsupported_unless=(None,), why="this version trains in float32 or bfloat16"
    )


class TrainEngineConfig(Section):
    """A model held by a training engine."""

    experiment_name: str = run_name()
    trial_name: str = trial_name()
    backend: str = key(REQUIRED, "Engine and layout in the allocation language, as in megatron:d2t2.", role="train")
    path: str = key(
        REQUIRED, "Hugging Face folder, name on the Hub, or `demo:` and the name of an embedded model.", min_length=1
    )
    init_from_scratch: bool = key(False, "Start from random weights of the same architecture.")
    disable_dropout: bool = key(False, "Train without dropout, whatever the model's configuration says.")
    gradient_checkpointing: bool = key(False, "Recompute activations in the backward pass to save memory.")
    dtype: Literal["float32", "bfloat16"] = key("bfloat16", "Type of parameters and arithmetic.")
    mb_spec: MicroBatchConfig = key(MicroBatchConfig, "Micro-batches of a step.")
    optimizer: OptimizerConfig | None = key(None, "Optimizer; null for a model that is not trained.")
    megatron: MegatronConfig = key(MegatronConfig, "Options of the Megatron engine.")
    weight_update_mode: Literal["xccl", "disk"] = key(
        "xccl",
        "How new weights reach the rollout engine.",
        unsupported_unless=("xccl",),
        why="weights are streamed to the rollout workers and never go through a file",
    )
    use_lora: bool = key(
        False, "Train adapters only.", unsupported_unless=(False,), why="this version trains all weights"
    )
    scheduling_spec: tuple[dict[str, Any], ...] = key(
        (), "Ports, cores, memory, image and command of AReaL's workers.", no_effect=_PLACED_BY_LAYOUT, strict=False
    )
    scheduling_strategy: dict[str, Any] | None = key(
        None, "Placement of AReaL's workers beside another role.", no_effect=_PLACED_BY_LAYOUT
    )
