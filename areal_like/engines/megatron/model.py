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
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from areal_like.engines.megatron.attention import PackedAttention, PackedRotaryEmbedding, RMSNorm
from areal_like.engines.megatron.process_groups import ModelGroups

__all__ = ["StageLayout", "build_chunks", "stage_layers"]


def stage_layers(stages: list[int], stage: int) -> range:
    """Numbers of the layers that a stage holds."""
    first = sum(stages[:stage])
    return range(first, first + stages[stage])


class StageLayout(PipelineParallelLayerLayout):
    """Megatron's description of which stage holds what, bound to one rank.

    Megatron-Core 0.19.2 asks its module globals for the rank in places that do not pass it on; a layout that knows its
    own rank answers without them.
    """

    def __init__(self, stages: list[int], rank: int) -> None:
        layout = [["decoder"] * n for n in stages]
        layout[0].insert(0, "embedding")
        layout[-1].append("loss")
        super().__init__(layout=layout, pipeline_model_parallel_size=len(stages))
        self.rank = rank

    def get_num_layers_to_build(
        self, layer_type: LayerType = LayerType.decoder, vp_stage: int | None = None, pp_rank: int | None = None
    ) -> int:
        return self.layout[self.rank if pp_rank is None else pp_rank][0].count(layer_type)

    def get_layer_offset(
        self, layer_type: LayerType = LayerType.decoder, vp_stage: int | None = None, pp_rank: int | None = None
    ) -> int:
        rank = self.rank if pp_rank is None else pp_rank
        return sum(stage[0].count(layer_type) for stage in self.layout[:rank])


def build_chunks(
    config: TransformerConfig,
    groups: ModelGroups,
    arguments: dict[str, Any],
    *,
    device: torch.device,
    transformer_engine: bool,
) -> list[torch.nn.Module]:
    """The model chunks of this rank on `device`.

    Args:
        arguments: of GPTModel: vocab_size (padded), max_sequence_length, rotary_base, tied embeddings ...
    """
    rank = groups.mesh.coordinates(groups.rank).pp
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=transformer_engine, pp_rank=rank)
    if not transformer_engine:
        _use_own_modules(spec)
    model = GPTModel(
        config=config,
        transformer_layer_spec=spec,
        pre_process=groups.is_first_stage,
        post_process=groups.is_last_stage,
        pg_collection=groups.collection,
        **arguments,
    )
    if not transformer_engine:
        model.rotary_pos_emb = PackedRotaryEmbedding(model.rotary_pos_emb)
    model.model_type = ModelType.encoder_or_decoder
    for parameter in model.parameters():
        set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
    return [model.to(device)]


def _use_own_modules(block: TransformerBlockSubmodules) -> None:
    """Our norm and attention for Megatron's local ones, which refuse packing and sequence parallelism."""
    block.layer_norm = RMSNorm
    for layer in block.layer_specs:
        parts = layer.submodules
        parts.input_layernorm = RMSNorm
        parts.pre_mlp_layernorm = RMSNorm
        attention = parts.self_attention.submodules
        attention.core_attention = PackedAttention
        for name in ("q_layernorm", "k_layernorm"):
            if getattr(attention, name) is not IdentityOp:
                setattr(attention, name, RMSNorm)
