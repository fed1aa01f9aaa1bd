"""megatron-bridge behind the bridge protocol.

From megatron-bridge come the configuration (its "provider"), the names, the formats, and how a tensor is cut into the
ranks' shards and put together again. Building is done here, because its own takes the stages from Megatron's globals;
so is the order of loading and exporting, because its own makes every rank take part in every tensor of every stage.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from areal_like.engines.megatron import cpu
from areal_like.engines.megatron.bridges.base import CheckpointError, refuse_unsupported
from areal_like.engines.megatron.bridges.checkpoint import HuggingFaceFolder
from areal_like.engines.megatron.bridges.names import VALUE_HEAD, parameter_names, whole_name
from areal_like.engines.megatron.bridges.reading import FolderMapping, each_rank_takes_its_own
from areal_like.engines.megatron.bridges.upstream import import_megatron_bridge, quiet
from areal_like.engines.megatron.experts import Weight, expert_weights
from areal_like.engines.megatron.fp8 import readable
from areal_like.engines.megatron.linear import ColumnProjection, RowProjection
from areal_like.engines.megatron.model import build_chunks, chunk_layers
from areal_like.engines.megatron.output_head import LogProbHead
from areal_like.engines.megatron.process_groups import ModelGroups
from areal_like.engines.megatron.router import PackedRouter
from areal_like.spec import AttentionBackend, ModelSpec

__all__ = ["MegatronBridge"]

_EMBEDDING, _OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"


class MegatronBridge:
    """See `bridges.base.Bridge`."""

    def __init__(
        self,
        path: Path,
        groups: ModelGroups,
        *,
        dtype: torch.dtype,
        device: torch.device,
        stages: list[int],
        settings: dict[str, Any],
        use_transformer_engine: bool,
        attention: AttentionBackend = "auto",
    ) -> None:
        """
        Args:
            path: Hugging Face folder whose `config.json` describes the model.
            stages: layers of each pipeline stage, virtual ones included.
            settings: fields of Megatron's `TransformerConfig` that override megatron-bridge's.

        Raises:
            CheckpointError: the architecture, or a feature of the checkpoint, is not supported.
            MegatronBridgeMissing: megatron-bridge is not installed.
        """
        import_megatron_bridge()
        if device.type != "cuda":
            cpu.install()  # that imported more of Megatron
        from megatron.bridge.models.conversion.model_bridge import get_model_bridge
        from megatron.bridge.models.conversion.param_mapping import AutoMapping

        # It knows by the name of a class how its parameters are split.
        AutoMapping.register_module_type(PackedRouter.__name__, "replicated")
        AutoMapping.register_module_type(ColumnProjection.__name__, "column")
        AutoMapping.register_module_type(RowProjection.__name__, "row")
        AutoMapping.register_module_type(LogProbHead.__name__, "column")
        self.spec = ModelSpec.from_path(path)
        self._hf_config = AutoConfig.from_pretrained(path)
        source: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(self._hf_config), None)
        refuse_unsupported(self.spec, path, bridge="megatron-bridge", known=_has_bridge(get_model_bridge, source))
        self.groups, self.device, self.stages = groups, device, stages
        self.use_transformer_engine, self.attention = use_transformer_engine, attention
        self.vocab_size = self.spec.vocab_size
        self._bridge = get_model_bridge(source, hf_config=self._hf_config)
        with quiet(logging.WARNING):  # of fusions that it would have used
            self.config = self._bridge.provider_bridge(SimpleNamespace(config=self._hf_config))
        for name, value in {**_DEFAULTS, **_layout(groups, stages), **_types(dtype), **settings}.items():
            if not hasattr(self.config, name):
                raise TypeError(f"Megatron's TransformerConfig has no field {name!r}")
            setattr(self.config, name, value)
        self.config.finalize()
        # Every stage is exported for itself, so a tensor's owner is always this rank: no pipeline group.
        collection = groups.collection
        self._registry = self._bridge.mapping_registry()
        self._registry.set_process_groups_from_pg_collection(
            SimpleNamespace(pp=None, ep=collection.ep, tp=collection.tp, expt_tp=collection.expt_tp)
        )
        self._experts_per_rank = self.spec.num_experts // groups.mesh.size("ep") if self.spec.is_moe else 0

    def build(self) -> list[torch.nn.Module]:
        tp = self.groups.mesh.size("tp")
        arguments = {
            "vocab_size": -(-self.vocab_size // tp) * tp,
            "max_sequence_length": self.config.seq_length,
            "position_embedding_type": "rope",
            "rotary_base": self.config.rotary_base,
            "share_embeddings_and_output_weights": self.spec.tied_embeddings,
        }
        chunks = build_chunks(
            self.config,
            self.groups,
            arguments,
            device=self.device,
            transformer_engine=self.use_transformer_engine,
            attention=self.attention,
        )
        if self.spec.rope_scaling != "default":
            for chunk in chunks:
                _scale_positions(chunk, self._hf_config)
        return chunks

    def load(self, chunks: list[torch.nn.Module], path: Path) -> None:
        folder = FolderMapping(HuggingFaceFolder(path, self.spec))
        mesh, here = self.groups.mesh, self.groups.mesh.coordinates(self.groups.rank)
        with each_rank_takes_its_own(tp=(mesh.tp, here.tp), etp=(mesh.etp, here.etp)) as groups:
            for name, module, weight in self._weights(chunks):
                # On the last stage a tied output layer is a copy of the first stage's embedding.
                mapping = self._mapping(_EMBEDDING if name == _OUTPUT and self.spec.tied_embeddings else name)
                mapping.set_process_groups_from_pg_collection(groups)
                tensors = self._bridge.maybe_modify_loaded_hf_weight(mapping.hf_param, folder)
                weight.tensor.copy_(mapping.hf_to_megatron(tensors, module))

    def export(
        self, chunks: list[torch.nn.Module], value: Callable[[torch.nn.Parameter], Tensor] = readable
    ) -> Iterator[tuple[str, Tensor]]:
        for name, module, weight in self._weights(chunks):
            if name == _OUTPUT and self.spec.tied_embeddings:
                continue  # the first stage exports the same tensor as the embedding
            tensors = self._mapping(name).megatron_to_hf(weight.of(value(weight.parameter)), module)
            for hf_name, tensor in tensors.items():
                # Without the rows that make the vocabulary divide over the tensor ranks.
                yield hf_name, tensor[: self.vocab_size] if name in (_EMBEDDING, _OUTPUT) else tensor

    def tensor_names(self) -> list[str]:
        mappings = [self._mapping(name).hf_param for name in parameter_names(self.spec)]
        return [name for hf in mappings for name in ([hf] if isinstance(hf, str) else hf.values())]

    def _mapping(self, name: str) -> Any:
        mapping = self._registry.megatron_to_hf_lookup(name)
        if mapping is None:
            raise LookupError(f"megatron-bridge has no Hugging Face name for {name}")
        return mapping

    def _weights(self, chunks: list[torch.nn.Module]) -> Iterator[tuple[str, torch.nn.Module, Weight]]:
        """Name in the whole model, module and weight of all that this rank holds of the folder's model."""
        here = self.groups.mesh.coordinates(self.groups.rank)
        layers = chunk_layers(self.stages, self.groups.mesh.size("pp"), here.pp)
        for chunk, its_layers in zip(chunks, layers, strict=True):
            for weight in expert_weights(chunk):
                if ".adapter." in weight.name or weight.name == VALUE_HEAD:
                    continue
                whole = whole_name(
                    weight.name.replace(".to_wrap.", "."),
                    first_layer=its_layers.start,
                    first_expert=here.ep * self._experts_per_rank,
                )
                yield whole, chunk.get_submodule(weight.name.rpartition(".")[0]), weight


_DEFAULTS = {
    "variable_seq_lengths": True,
    "moe_token_dispatcher_type": "alltoall",
    # megatron-bridge has other values here than Megatron-Core, for its own training loop.
    "attention_softmax_in_fp32": True,
    "cross_entropy_loss_fusion": False,
    "deallocate_pipeline_outputs": False,
}
"""What the two bridges would have differently."""


def _layout(groups: ModelGroups, stages: list[int]) -> dict[str, Any]:
    mesh = groups.mesh
    virtual = len(stages) // mesh.pp
    return {
        "tensor_model_parallel_size": mesh.tp,
        "pipeline_model_parallel_size": mesh.pp,
        "virtual_pipeline_model_parallel_size": virtual if virtual > 1 else None,
        "context_parallel_size": mesh.cp,
        "expert_model_parallel_size": mesh.ep,
        "expert_tensor_parallel_size": mesh.etp,
        "sequence_parallel": mesh.tp > 1,
        "overlap_p2p_comm": virtual > 1 and mesh.pp > 1,
        "batch_p2p_comm": False,
    }


def _types(dtype: torch.dtype) -> dict[str, Any]:
    return {
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "autocast_dtype": dtype,
        "bf16": dtype is torch.bfloat16,
        "fp16": dtype is torch.float16,
    }


def _has_bridge(get_model_bridge: Any, source: Any) -> bool:
    if source is None:
        return False
    try:
        get_model_bridge(source)
    except NotImplementedError:
        return False
    return True


def _scale_positions(chunk: torch.nn.Module, hf_config: Any) -> None:
    """Give the chunk the rotary frequencies that Transformers computes.

    Megatron-Core 0.19.2 has Llama 3's scaling, with every number but the factor fixed to those of Llama 3.1.
    """
    rotary = getattr(chunk, "rotary_pos_emb", None)
    if rotary is None:
        return
    rotary = getattr(rotary, "inner", rotary)
    frequencies, factor = ROPE_INIT_FUNCTIONS[hf_config.rope_parameters["rope_type"]](hf_config, rotary.inv_freq.device)
    if factor != 1.0:
        raise CheckpointError(f"rotary scaling {hf_config.rope_parameters} also scales the attention: not supported")
    rotary.inv_freq = frequencies
