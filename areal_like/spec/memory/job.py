"""`MemoryJob`: what memory depends on besides the model and the layout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from areal_like.alloc import ModelAllocation
from areal_like.spec.attention import AttentionBackend

__all__ = ["BYTES", "GIB", "PARTS", "LoRA", "MemoryJob"]

GIB = 2**30
BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
"""Of one element in each dtype a model may have."""
MOMENT_BYTES = BYTES | {"uint8": 1}
"""Of one element in each dtype that a moment of Adam may have; uint8 stands for FP8."""
PARTS = {"parameters": "weights", "gradients": "gradients", "optimizer": "optimizer"}
"""What can be offloaded, and its row in a table of phases."""


Dtype = Literal["bfloat16", "float16", "float32"]
Moment = Literal["bfloat16", "float16", "float32", "uint8"]


@dataclass(frozen=True)
class LoRA:
    """Adapters that are trained instead of the model.

    Attributes:
        rank: `lora_rank`.
        targets: `target_modules`.
        dtype: `lora_dtype`.
    """

    rank: int
    targets: tuple[str, ...] = ("all-linear",)
    dtype: Dtype = "bfloat16"

    @property
    def element(self) -> int:
        """Bytes of one number."""
        return BYTES[self.dtype]


@dataclass(frozen=True)
class MemoryJob:
    """One trained model and, if it shares a job with a rollout engine, that engine.

    Attributes:
        micro_tokens: most tokens of a micro-batch (`mb_spec.max_tokens_per_mb`).
        seq: tokens of the longest sequence, prompt and answer.
        micro_batches: of a step on each data-parallel rank.
        dtype: of parameters and arithmetic.
        recompute: what the backward pass computes again (`gradient_checkpointing`, `recompute_granularity`).
        recompute_method: of "full": groups of layers, or the first layers of each stage.
        recompute_layers: layers of a recomputed group or block (`recompute_num_layers`).
        recompute_modules: of "selective": what is recomputed.
        lora: adapters are trained, and the model stays as it is; None trains the model.
        fp8: recipe of FP8 products; None for none. `fp8_param`: the weights themselves are FP8.
        optimizer: "adam", "sgd", or None for a model that is not trained.
        distributed_optimizer: optimizer state is sharded over data-parallel ranks.
        gradient_accumulation_fusion: products add weight gradients to the buffer (TransformerEngine's layers).
        precision_aware: the optimizer keeps 16 bits of each float32 copy (`use_precision_aware_optimizer`).
        exp_avg, exp_avg_sq: types of Adam's moments.
        grad_reduce_in_fp32: gradients are kept in float32 whatever the dtype.
        imbalance: rows that the busiest expert rank receives, as a multiple of the mean. None: 1 when a rank holds all
            experts (then it is exact), else `activations.IMBALANCE`.
        offload: what leaves the GPU while the model does not need it: "parameters", "gradients", "optimizer".
        transformer_engine: TransformerEngine's layers are used (on CUDA).
        attention_backend, deterministic: which attention is used then (`choose_attention`).
        hopper: GPUs of compute capability 9.0 and more, where GEMM workspaces are larger.
        rollout: layout of the rollout engine, to predict its memory too.
        colocated: the rollout engine lives on the trainer's GPUs.
        rollout_sequences: that the rollout engine generates at once on each replica.
        gpu_memory: bytes of a GPU; None when not known.
        gpus_per_node: for host memory.
        pipeline_layout: layers of each stage; None balances compute.
        recovery: recovery checkpoints are written.
    """

    micro_tokens: int
    seq: int
    micro_batches: int = 4
    dtype: Dtype = "bfloat16"
    recompute: Literal["none", "selective", "full"] = "none"
    recompute_method: Literal["uniform", "block"] = "uniform"
    recompute_layers: int = 1
    recompute_modules: tuple[str, ...] = ("core_attn",)
    lora: LoRA | None = None
    fp8: str | None = None
    fp8_param: bool = False
    optimizer: Literal["adam", "sgd"] | None = "adam"
    distributed_optimizer: bool = True
    gradient_accumulation_fusion: bool = True
    precision_aware: bool = False
    exp_avg: Moment = "float32"
    exp_avg_sq: Moment = "float32"
    grad_reduce_in_fp32: bool = True
    imbalance: float | None = None
    offload: frozenset[str] = frozenset()
    transformer_engine: bool = True
    attention_backend: AttentionBackend = "auto"
    deterministic: bool = False
    hopper: bool = True
    rollout: ModelAllocation | None = None
    colocated: bool = False
    rollout_sequences: int = 256
    gpu_memory: int | None = None
    gpus_per_node: int = 8
    pipeline_layout: tuple[int, ...] | None = None
    recovery: bool = False

    def __post_init__(self) -> None:
        for name in ("micro_tokens", "seq", "micro_batches", "recompute_layers", "rollout_sequences", "gpus_per_node"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if unknown := self.offload - set(PARTS):
            raise ValueError(f"offload knows {', '.join(PARTS)}; not {', '.join(sorted(unknown))}")
        if self.colocated and self.rollout is None:
            raise ValueError("colocated needs a rollout layout")

    @property
    def fuses_gradients(self) -> bool:
        """Whether the gradients of weights go from the product into the buffer."""
        trains_weights = self.optimizer is not None and self.lora is None
        return self.gradient_accumulation_fusion and self.transformer_engine and trains_weights

    @property
    def grouped_products(self) -> bool:
        """Whether experts are computed by torch's grouped products, not by TransformerEngine."""
        return self.transformer_engine and self.hopper and self.dtype == "bfloat16" and self.fp8 is None

    @property
    def element(self) -> int:
        """Bytes of one parameter or activation."""
        return BYTES[self.dtype]
