"""Building Megatron-Core's GPTModel for one pipeline stage, with TransformerEngine's layers or with local ones."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.enums import ModelType
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import set_defaults_if_not_set_tensor_model_parallel_attributes
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.moe_layer import MoESubmodules
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from areal_like.engines.megatron.activation import SwiGLU
from areal_like.engines.megatron.attention import PackedAttention, PackedRotaryEmbedding
from areal_like.engines.megatron.document_attention import use_document_attention
from areal_like.engines.megatron.experts import GroupedExperts, has_grouped_products
from areal_like.engines.megatron.linear import ColumnProjection, RowProjection
from areal_like.engines.megatron.norm import ResidualRMSNorm, RMSNorm
from areal_like.engines.megatron.process_groups import ModelGroups
from areal_like.engines.megatron.rotary import use_rotated_attention
from areal_like.spec import AttentionBackend, choose_attention

__all__ = ["StageLayout", "build_chunks", "chunk_layers"]


def chunk_layers(stages: list[int], pp: int, rank: int) -> list[range]:
    """Numbers of the layers in each model chunk of a pipeline rank.

    Args:
        stages: layers of each stage in the order of the model, virtual stages included.
        pp: pipeline ranks; rank r holds stages r, r + pp, r + 2 pp, ...
    """
    starts = [sum(stages[:i]) for i in range(len(stages))]
    return [range(starts[i], starts[i] + stages[i]) for i in range(rank, len(stages), pp)]


class StageLayout(PipelineParallelLayerLayout):
    """Megatron's description of which stage holds what, bound to one rank.

    Megatron-Core 0.19.2 asks its module globals for the rank in places that do not pass it on; a layout that knows its
    own rank answers without them.
    """

    def __init__(self, stages: list[int], pp: int, rank: int) -> None:
        """See `chunk_layers`."""
        layout = [["decoder"] * n for n in stages]
        layout[0].insert(0, "embedding")
        layout[-1].append("loss")
        super().__init__(layout=layout, pipeline_model_parallel_size=pp)
        self.stages, self.rank = list(stages), rank

    def get_num_layers_to_build(
        self, layer_type: LayerType = LayerType.decoder, vp_stage: int | None = None, pp_rank: int | None = None
    ) -> int:
        rank = self.rank if pp_rank is None else pp_rank
        return self.layout[rank][self._chunk(vp_stage)].count(layer_type)

    def get_layer_offset(
        self, layer_type: LayerType = LayerType.decoder, vp_stage: int | None = None, pp_rank: int | None = None
    ) -> int:
        rank = self.rank if pp_rank is None else pp_rank
        before = self._chunk(vp_stage) * self.pipeline_model_parallel_size + rank
        return sum(self._stage(i).count(layer_type) for i in range(before))

    def _stage(self, index: int) -> list[LayerType]:
        chunk, rank = divmod(index, self.pipeline_model_parallel_size)
        return self.layout[rank][chunk]

    def _chunk(self, vp_stage: int | None) -> int:
        if vp_stage is None and self.virtual_pipeline_model_parallel_size > 1:
            raise ValueError("which of the rank's model chunks is meant? (vp_stage is None)")
        return vp_stage or 0


def build_chunks(
    config: TransformerConfig,
    groups: ModelGroups,
    arguments: dict[str, Any],
    *,
    device: torch.device,
    transformer_engine: bool,
    attention: AttentionBackend,
) -> list[torch.nn.Module]:
    """The model chunks of this rank on `device`, one for each virtual stage.

    Args:
        arguments: of GPTModel: vocab_size (padded), max_sequence_length, rotary_base, tied embeddings ...
        attention: `attention_backend`.

    Raises:
        ValueError: an attention that this process, or this model, cannot have.
    """
    if attention != "auto" and not transformer_engine:
        raise ValueError(f"megatron.attention_backend: {attention} needs a GPU and TransformerEngine; set it to auto")
    virtual = config.virtual_pipeline_model_parallel_size
    numbers: list[int | None] = [None] if virtual is None else list(range(virtual))
    return [_build_chunk(config, groups, arguments, n, device, transformer_engine, attention) for n in numbers]


def _build_chunk(
    config: TransformerConfig,
    groups: ModelGroups,
    arguments: dict[str, Any],
    number: int | None,
    device: torch.device,
    transformer_engine: bool,
    attention: AttentionBackend,
) -> torch.nn.Module:
    rank = groups.mesh.coordinates(groups.rank).pp
    last = (config.virtual_pipeline_model_parallel_size or 1) - 1
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=transformer_engine, vp_stage=number, pp_rank=rank)
    _use_own_norms(spec, config)
    _choose_projections(spec, config, transformer_engine)
    if not transformer_engine:
        _use_own_attention(spec)
    else:
        if arguments.get("position_embedding_type") == "rope":
            use_rotated_attention(spec, config)
        if _attention(config, attention) == "flex":
            use_document_attention(spec)
    if config.moe_grouped_gemm and not config.fp8 and has_grouped_products(device, config.params_dtype):
        _use_grouped_experts(spec)
    model = GPTModel(
        config=config,
        transformer_layer_spec=spec,
        pre_process=groups.is_first_stage and not number,
        post_process=groups.is_last_stage and (number or 0) == last,
        pg_collection=groups.collection,
        vp_stage=number,
        **arguments,
    )
    if not transformer_engine:
        model.rotary_pos_emb = PackedRotaryEmbedding(model.rotary_pos_emb)
    model.model_type = ModelType.encoder_or_decoder
    for parameter in model.parameters():
        set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
    return model.to(device)


def _attention(config: TransformerConfig, asked: AttentionBackend) -> str:
    return choose_attention(
        asked,
        deterministic=config.deterministic_mode,
        cp=config.context_parallel_size,
        dropout=config.attention_dropout > 0,
        float32=config.params_dtype is torch.float32,
    )


def _use_own_norms(block: TransformerBlockSubmodules, config: TransformerConfig) -> None:
    """Our norm for Megatron's local one, which refuses packing and sequence parallelism, and for TransformerEngine's,
    which takes more than twice the time at widths that it is not tuned for."""
    frees_norms = config.recompute_granularity == "selective" and "layernorm" in config.recompute_modules
    before = RMSNorm if frees_norms else ResidualRMSNorm
    block.layer_norm = RMSNorm
    for layer in block.layer_specs:
        parts = layer.submodules
        parts.input_layernorm = before
        parts.pre_mlp_layernorm = before
        attention = parts.self_attention.submodules
        for name in ("q_layernorm", "k_layernorm"):
            if getattr(attention, name) is not IdentityOp:
                setattr(attention, name, RMSNorm)


def _use_own_attention(block: TransformerBlockSubmodules) -> None:
    """Our attention for Megatron's local one, which refuses packing."""
    for layer in block.layer_specs:
        layer.submodules.self_attention.submodules.core_attention = PackedAttention


def _choose_projections(block: TransformerBlockSubmodules, config: TransformerConfig, transformer_engine: bool) -> None:
    """Projections without the norm that TransformerEngine joins to them, and our SwiGLU between those of an MLP.

    They are TransformerEngine's where it has something to do: FP8, or communication to overlap.
    """
    column: Any = ColumnProjection
    row: Any = RowProjection
    if config.fp8 or config.tensor_model_parallel_size > 1:
        if not transformer_engine:
            return  # Megatron-Core's own stay
        from megatron.core.extensions.transformer_engine import TEColumnParallelLinear, TERowParallelLinear

        column, row = TEColumnParallelLinear, TERowParallelLinear
    for layer in block.layer_specs:
        parts = layer.submodules
        attention = parts.self_attention.submodules
        attention.linear_qkv, attention.linear_proj = column, row
        mlp = getattr(parts.mlp, "keywords", {}).get("submodules")
        if isinstance(mlp, MLPSubmodules):  # else the layer has experts
            mlp.linear_fc1, mlp.linear_fc2 = column, row
            if config.use_te_activation_func:
                mlp.activation_func = SwiGLU


def _use_grouped_experts(block: TransformerBlockSubmodules) -> None:
    """Our experts for TransformerEngine's, which launch a product for each expert, or for Megatron's one by one."""
    for layer in block.layer_specs:
        parts = getattr(layer.submodules.mlp, "keywords", {}).get("submodules")
        if isinstance(parts, MoESubmodules):
            parts.experts = GroupedExperts
