"""mbridge behind the bridge protocol.

From mbridge come the configuration, the names and the formats (fused QKV, gated halves, splits over tensor ranks).
Building, loading and exporting are done here, because mbridge's own versions take the process groups from Megatron's
globals, hold two stages' communication together by object broadcasts a tensor, and know TransformerEngine's names only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from mbridge.core.bridge import _MODEL_REGISTRY
from mbridge.core.parallel_states import ParallelStates
from torch import Tensor
from transformers import AutoConfig

from areal_like.engines.megatron.bridges.base import refuse_unsupported
from areal_like.engines.megatron.bridges.checkpoint import HuggingFaceFolder
from areal_like.engines.megatron.bridges.names import VALUE_HEAD, canonical_name, parameter_names
from areal_like.engines.megatron.experts import Weight, expert_weights
from areal_like.engines.megatron.fp8 import readable
from areal_like.engines.megatron.model import build_chunks, chunk_layers
from areal_like.engines.megatron.process_groups import ModelGroups, gather_shards
from areal_like.spec import AttentionBackend, ModelSpec

__all__ = ["MBridge"]


class MBridge:
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
            settings: fields of Megatron's `TransformerConfig` that override mbridge's.

        Raises:
            CheckpointError: the architecture, or a feature of the checkpoint, is not supported.
        """
        self.spec = ModelSpec.from_path(path)
        refuse_unsupported(self.spec, path, bridge="mbridge", known=self.spec.architecture in _MODEL_REGISTRY)
        self.groups, self.device, self.stages = groups, device, stages
        self.use_transformer_engine, self.attention = use_transformer_engine, attention
        mesh = groups.mesh
        hf_config = AutoConfig.from_pretrained(path)
        if not hasattr(hf_config, "rope_theta"):
            # Transformers 5 moved it; mbridge 0.15.1 reads the old place.
            hf_config.rope_theta = hf_config.rope_parameters["rope_theta"]
        here = mesh.coordinates(groups.rank)
        states = ParallelStates(
            tp_size=mesh.size("tp"),
            tp_rank=here.tp,
            pp_size=mesh.size("pp"),
            pp_rank=here.pp,
            vpp_size=len(stages) // mesh.size("pp") if len(stages) > mesh.size("pp") else None,
            cp_size=mesh.size("cp"),
            cp_rank=here.cp,
            ep_size=mesh.size("ep"),
            ep_rank=here.ep,
            etp_size=mesh.size("etp"),
            etp_rank=here.etp,
        )
        self._bridge = _MODEL_REGISTRY[self.spec.architecture](
            hf_config, dtype=dtype, parallel_states=states, make_vocab_size_divisible_by=mesh.size("tp")
        )
        # mbridge initialises every model with Megatron-Core's standard deviation.
        self._bridge.set_extra_args(init_method_std=hf_config.initializer_range, **settings)
        self.vocab_size = self._bridge.vocab_size = self.spec.vocab_size
        tp = mesh.size("tp")
        self._bridge.padded_vocab_size = -(-self.vocab_size // tp) * tp
        # mbridge keeps this mapping on the class: a tied model would change it for every later model of the process;
        # and its Llama bridge does not map the output layer of a tied model at all.
        output = "model.embed_tokens.weight" if self.spec.tied_embeddings else "lm_head.weight"
        self._bridge._DIRECT_MAPPING = {**type(self._bridge)._DIRECT_MAPPING, "output_layer.weight": output}
        self._experts_per_rank = self.spec.num_experts // mesh.size("ep") if self.spec.is_moe else 0

    @property
    def config(self) -> Any:
        """Megatron's TransformerConfig that the model is built from."""
        return self._bridge.config

    def build(self) -> list[torch.nn.Module]:
        arguments = self._bridge._get_gptmodel_args()
        arguments["vocab_size"] = self._bridge.padded_vocab_size
        arguments["share_embeddings_and_output_weights"] = self.spec.tied_embeddings
        return build_chunks(
            self.config,
            self.groups,
            arguments,
            device=self.device,
            transformer_engine=self.use_transformer_engine,
            attention=self.attention,
        )

    def load(self, chunks: list[torch.nn.Module], path: Path) -> None:
        folder = HuggingFaceFolder(path, self.spec)
        here = self.groups.mesh.coordinates(self.groups.rank)
        for name, weight in self._weights(chunks):
            tensors = [folder.tensor(n) for n in self._bridge._weight_name_mapping_mcore_to_hf(name)]
            if _is_expert(name):
                size, rank = self.groups.mesh.size("etp"), here.etp
            else:
                size, rank = self.groups.mesh.size("tp"), here.tp
            whole = self._bridge._weight_to_mcore_format(name, tensors)
            weight.tensor.copy_(self._bridge._weight_split_across_tp(name, whole, weight.tensor, size)[rank])

    def export(
        self, chunks: list[torch.nn.Module], value: Callable[[torch.nn.Parameter], Tensor] = readable
    ) -> Iterator[tuple[str, Tensor]]:
        collection = self.groups.collection
        for name, weight in self._weights(chunks):
            if name == "output_layer.weight" and self.spec.tied_embeddings:
                continue  # the first stage exports the same tensor as the embedding
            shard = weight.of(value(weight.parameter))
            if _is_expert(name):
                whole = self._merge(name, gather_shards(shard, collection.expt_tp))
                for rank, expert in enumerate(gather_shards(whole, collection.ep)):
                    prefix, local = name.rsplit(".weight", 1)
                    number = int(local) % self._experts_per_rank + rank * self._experts_per_rank
                    yield from self._to_hugging_face(f"{prefix}.weight{number}", expert)
            elif getattr(weight.parameter, "tensor_model_parallel", False):
                yield from self._to_hugging_face(name, self._merge(name, gather_shards(shard, collection.tp)))
            else:
                yield from self._to_hugging_face(name, shard)

    def tensor_names(self) -> list[str]:
        return [hf for name in parameter_names(self.spec) for hf in self._bridge._weight_name_mapping_mcore_to_hf(name)]

    def _weights(self, chunks: list[torch.nn.Module]) -> Iterator[tuple[str, Weight]]:
        """This rank's parameters, expert by expert, under their names in the whole model (`names.canonical_name`)."""
        here = self.groups.mesh.coordinates(self.groups.rank)
        layers = chunk_layers(self.stages, self.groups.mesh.size("pp"), here.pp)
        for chunk, its_layers in zip(chunks, layers, strict=True):
            for weight in expert_weights(chunk):
                if weight.name == VALUE_HEAD:
                    continue
                yield (
                    canonical_name(
                        weight.name,
                        first_layer=its_layers.start,
                        first_expert=here.ep * self._experts_per_rank,
                        is_moe=self.spec.is_moe,
                    ),
                    weight,
                )

    def _merge(self, name: str, shards: list[Tensor]) -> Tensor:
        if len(shards) == 1:
            return shards[0]
        if "linear_fc1." in name:  # each shard holds its part of the gate above its part of the up projection
            halves = [s.chunk(2) for s in shards]
            return torch.cat([h[0] for h in halves] + [h[1] for h in halves])
        if "linear_qkv." in name or "word_embeddings" in name or name == "output_layer.weight":
            return torch.cat(shards)
        return torch.cat(shards, dim=1)  # row-parallel: linear_proj and linear_fc2 of either kind

    def _to_hugging_face(self, name: str, whole: Tensor) -> Iterator[tuple[str, Tensor]]:
        hf_names, tensors = self._bridge._weight_to_hf_format(name, whole)
        yield from zip(hf_names, tensors, strict=True)


def _is_expert(name: str) -> bool:
    return ".mlp.experts.linear_fc" in name
