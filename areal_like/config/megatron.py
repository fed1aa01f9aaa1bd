"""Options of the Megatron engine that the allocation does not say. Names are AReaL's where it has them."""

from __future__ import annotations

from typing import Literal

from areal_like.config.fields import Section, key

RecomputedPart = Literal["core_attn", "mlp", "moe", "moe_act", "shared_experts", "layernorm", "mla_up_proj"]


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
    fp8_param_gather: bool = key(
        False, "Gather parameters in FP8.", no_effect="they are gathered as they are kept: fp8_config.param decides"
    )


class FP8Config(Section):
    """Matrix products in FP8, by TransformerEngine."""

    mode: Literal["e4m3", "hybrid"] = key(
        "hybrid", "Format: e4m3 everywhere, or hybrid: e4m3 forward and e5m2 for gradients (wider range)."
    )
    recipe: Literal["delayed", "tensorwise", "blockwise", "mxfp8"] = key(
        "tensorwise",
        "Scaling: delayed and tensorwise have one scale a tensor (of past or present values), blockwise one for 128"
        " values or 128 x 128 weights, mxfp8 one for 32 values (Blackwell).",
    )
    param: bool = key(False, "Keep the parameters themselves in FP8; the optimizer's float32 copies stay.")
    margin: int = key(0, "Recipe delayed: scales leave this many powers of two of headroom.", ge=0)
    amax_history_len: int = key(1024, "Recipe delayed: past steps whose largest values are kept.", unit="steps", ge=1)
    amax_compute_algo: Literal["max", "most_recent"] = key(
        "max", "Recipe delayed: which of the past largest values sets the scale."
    )
    wgrad: bool = key(True, "Recipe delayed: weight gradients in FP8 too.")
    dot_product_attention: bool = key(
        False,
        "Attention in FP8.",
        unsupported_unless=(False,),
        why="TransformerEngine's FP8 attention does not take packed sequences",
    )
    multi_head_attention: bool = key(
        False,
        "Attention in FP8, with its inputs and outputs.",
        unsupported_unless=(False,),
        why="TransformerEngine's FP8 attention does not take packed sequences",
    )
    direct_convert: bool = key(
        True,
        "Read and write FP8 checkpoints without dequantising.",
        no_effect="checkpoints and weight transfers are bfloat16",
    )
    tp_only_amax_red: bool = key(False, "Recipe delayed: largest values are shared by tensor-parallel ranks alone.")
    first_last_layers_bf16: bool = key(False, "Keep the outermost layers in bfloat16.")
    num_layers_at_start_in_bf16: int = key(1, "With first_last_layers_bf16: layers at the start.", unit="layers", ge=0)
    num_layers_at_end_in_bf16: int = key(1, "With first_last_layers_bf16: layers at the end.", unit="layers", ge=0)


class MegatronConfig(Section):
    """Options of the Megatron engine that the allocation does not say."""

    bridge_type: Literal["mbridge", "megatron-bridge"] = key(
        "mbridge", "Package that maps Hugging Face weights to Megatron-Core; adapters need megatron-bridge."
    )
    ddp: DDPConfig = key(DDPConfig, "Gradient buffers and data-parallel communication.")
    virtual_pipeline_parallel_size: int | None = key(
        None,
        "Pipeline stages a rank holds, said again: must agree with the letter v of `backend`.",
        unit="stages",
        ge=1,
    )
    pipeline_layout: tuple[int, ...] | None = key(
        None,
        "Layers of each pipeline stage, virtual ones included, in the order of the model; null balances compute.",
        unit="layers",
        strict=False,
    )
    recompute_granularity: Literal["full", "selective"] | None = key(
        "full", "What is recomputed in the backward pass when gradient_checkpointing is on."
    )
    recompute_method: Literal["uniform", "block"] | None = key(
        "uniform", "Which layers are recomputed: groups of equal size, or the first layers of a stage."
    )
    recompute_num_layers: int | None = key(1, "Layers of one recomputed group or block.", unit="layers", ge=1)
    recompute_modules: tuple[RecomputedPart, ...] | None = key(
        None,
        "With granularity selective: core_attn, mlp, moe, moe_act, shared_experts, layernorm, mla_up_proj; null takes"
        " core_attn.",
        strict=False,
        min_length=1,
    )
    distribute_saved_activations: bool = key(
        False,
        "With full recomputation: split what is saved over tensor-parallel ranks.",
        unsupported_unless=(False,),
        why="with t above 1 sequences are split over these ranks, and what is saved with them",
    )
    moe_token_dispatcher_type: Literal["allgather", "alltoall", "flex"] = key(
        "alltoall",
        "How tokens reach the ranks of their experts. allgather pads the micro-batches of data-parallel ranks to one"
        " length; flex is DeepEP.",
    )
    moe_grouped_gemm: bool | None = key(
        None, "One matrix product for all experts of a rank; null is true where TransformerEngine is installed."
    )
    moe_permute_fusion: bool | None = key(
        None, "One kernel for sorting tokens by expert (TransformerEngine); null is true where it is installed."
    )
    moe_router_fusion: bool = key(False, "One kernel for the router's softmax and choice (TransformerEngine).")
    moe_shared_expert_overlap: bool = key(False, "Compute shared experts while tokens travel (alltoall).")
    moe_router_dtype: Literal["fp32", "fp64"] | None = key(
        "fp32", "Type of the router's arithmetic; null takes that of the model."
    )
    moe_router_load_balancing_type: Literal["none", "aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn"] = key(
        "none",
        "A loss that keeps tokens spread over the experts: aux_loss (of a micro-batch) or global_aux_loss (shares of"
        " the global batch); none adds no loss. seq_aux_loss and sinkhorn are refused.",
    )
    moe_aux_loss_coeff: float = key(0.0, "Factor of the load-balancing loss.", ge=0.0)
    moe_z_loss_coeff: float | None = key(None, "Factor of the loss on large router scores; null adds none.", gt=0.0)
    moe_router_bias_update_rate: float = key(
        0.0, "Step of the expert bias that balances the load without a loss (arXiv 2408.15664); 0 has no bias.", ge=0.0
    )
    gradient_accumulation_fusion: bool | None = key(
        None,
        "Matrix products add weight gradients to the gradient buffer themselves (TransformerEngine); null is true"
        " where they can.",
    )
    attention_backend: Literal["auto", "fused", "flex"] = key(
        "auto",
        "Attention on GPUs: fused (TransformerEngine, cuDNN), flex (compiled FlexAttention), or auto: the faster of the"
        " two as measured, among those that can do what is asked.",
    )
    use_precision_aware_optimizer: bool = key(
        False,
        "Keep 16 bits beside each bfloat16 parameter instead of its float32 copy (exact), and moments in the types"
        " below (TransformerEngine).",
    )
    main_grads_dtype: Literal["float32", "bfloat16"] | None = key(
        None,
        "With use_precision_aware_optimizer: type of the gradients that the optimizer reads; null is that of their"
        " buffer, which ddp.grad_reduce_in_fp32 decides, and anything else contradicts it.",
    )
    main_params_dtype: Literal["float32", "float16"] = key(
        "float32",
        "Type of the optimizer's copies of the parameters.",
        unsupported_unless=("float32",),
        why="with use_precision_aware_optimizer float32 takes as little: 16 bits beside the parameter's own",
    )
    exp_avg_dtype: Literal["float32", "bfloat16", "float16", "uint8"] = key(
        "float32",
        "With use_precision_aware_optimizer: type of Adam's mean of gradients.",
        unsupported_unless=("float32", "bfloat16"),
        why="float16 and FP8 (uint8) moments have a scale a shard, which another layout could not take over",
    )
    exp_avg_sq_dtype: Literal["float32", "bfloat16", "float16", "uint8"] = key(
        "float32",
        "With use_precision_aware_optimizer: type of Adam's mean of squared gradients. In bfloat16 it cannot fall with"
        " beta2 above 0.998.",
        unsupported_unless=("float32", "bfloat16"),
        why="float16 and FP8 (uint8) moments have a scale a shard, which another layout could not take over",
    )
    use_deterministic_algorithms: bool = key(False, "The same batch gives the same bits again.")
    fp8_config: FP8Config | None = key(None, "Matrix products in FP8; null computes in `dtype`.")
    param_offload: bool = key(
        False, "Parameters wait in host memory between a step's last use of the model and the next."
    )
    grad_offload: bool = key(False, "Gradient buffers are freed outside the update.")
    optimizer_offload: bool = key(False, "Optimizer states wait in host memory outside the update.")
    async_save: bool = key(False, "Write recovery checkpoints beside the training.")
    use_checkpoint_opt_param_scheduler: bool = key(
        True, "A resumed run takes the learning-rate schedule of the checkpoint, not of the file."
    )
