"""One trained model: its layout, weights, micro-batches, optimizer, and the options of the Megatron engine."""

from __future__ import annotations

from typing import Any, Literal

from areal_like.config.fields import REQUIRED, Section, key, run_name, trial_name
from areal_like.config.megatron import MegatronConfig

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
    initial_loss_scale: float = key(
        2.0**32, "With dtype float16: the first factor of the loss; halved until gradients are finite.", gt=0.0
    )
    min_loss_scale: float = key(1.0, "With dtype float16: the loss scale never falls below it.", gt=0.0)
    loss_scale_window: int = key(
        1000, "With dtype float16: steps with finite gradients after which the scale doubles.", unit="steps", ge=1
    )
    hysteresis: int = key(2, "With dtype float16: steps with infinite gradients before the scale halves.", ge=1)


class ProfilerConfig(Section):
    """A trace of what ranks do, by torch.profiler. A step is an optimizer step; of a reference, a pass."""

    ranks: tuple[int, ...] = key((0,), "Ranks that record.", strict=False, min_length=1)
    step_start: int = key(2, "First step that is recorded, counted from 1.", unit="steps", ge=1)
    step_end: int = key(2, "Last step that is recorded.", unit="steps", ge=1)
    save_path: str | None = key(
        None, "Folder of the traces; null is `profile` in the folder of the run. Each role has its own in it."
    )
    with_stack: bool = key(False, "Record the Python lines as well; slower.")
    memory: bool = key(False, "On GPUs: write a snapshot of the memory's history in these steps beside the trace.")


class TrainEngineConfig(Section):
    """A model held by a training engine."""

    experiment_name: str = run_name()
    trial_name: str = trial_name()
    backend: str = key(REQUIRED, "Engine and layout in the allocation language, as in megatron:d2t2.", role="train")
    path: str = key(
        REQUIRED, "Hugging Face folder, name on the Hub, or `demo:` and the name of an embedded model.", min_length=1
    )
    is_critic: bool = key(False, "Predict a value for each token instead of the next token; the head starts at 0.")
    init_from_scratch: bool = key(False, "Start from random weights of the same architecture.")
    disable_dropout: bool = key(False, "Train without dropout, whatever the model's configuration says.")
    enable_tree_training: bool = key(
        False, "Compute once what sequences of a micro-batch share at their beginning, as the answers to one prompt do."
    )
    gradient_checkpointing: bool = key(False, "Recompute activations in the backward pass to save memory.")
    dtype: Literal["float32", "bfloat16", "float16"] = key("bfloat16", "Type of parameters and arithmetic.")
    mb_spec: MicroBatchConfig = key(MicroBatchConfig, "Micro-batches of a step.")
    optimizer: OptimizerConfig | None = key(None, "Optimizer; null for a model that is not trained.")
    megatron: MegatronConfig = key(MegatronConfig, "Options of the Megatron engine.")
    weight_update_mode: Literal["xccl", "disk"] = key(
        "xccl",
        "How new weights reach the rollout engine.",
        unsupported_unless=("xccl",),
        why="weights are streamed to the rollout workers and never go through a file",
    )
    use_lora: bool = key(False, "Train low-rank adapters; the model's own weights stay as they are.")
    peft_type: Literal["lora"] = key("lora", "Kind of adapter.")
    lora_rank: int = key(32, "Rank of the adapters: rows of A, columns of B.", ge=1)
    lora_alpha: float = key(16.0, "An adapter adds lora_alpha / lora_rank * B A to its weight.", gt=0.0)
    lora_dropout: float = key(0.0, "Dropout on what enters an adapter, in training.", ge=0.0, lt=1.0)
    lora_dtype: Literal["float32", "bfloat16", "float16"] | None = key(
        None, "Type of the adapters; that of the model when null."
    )
    target_modules: tuple[str, ...] = key(
        ("all-linear",),
        "Modules that get an adapter: linear_qkv, linear_proj, linear_fc1, linear_fc2, or all-linear for these four.",
        strict=False,
        min_length=1,
    )
    profiler: ProfilerConfig | None = key(None, "Record a trace of some steps; null records none.")
    scheduling_spec: tuple[dict[str, Any], ...] = key(
        (), "Ports, cores, memory, image and command of AReaL's workers.", no_effect=_PLACED_BY_LAYOUT, strict=False
    )
    scheduling_strategy: dict[str, Any] | None = key(
        None, "Placement of AReaL's workers beside another role.", no_effect=_PLACED_BY_LAYOUT
    )
