"""The reference with adapters: PEFT on Transformers' model, with one A where Megatron-Core has one matrix."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora.layer import ParamWrapper
from torch import Tensor
from transformers import AutoModelForCausalLM

from areal_like.config import TrainEngineConfig
from areal_like.spec import ModelSpec
from areal_like.spec.lora import AdapterMatrix, adapter_matrices
from areal_like.trainers.reference import ReferenceModel, saved_weights

__all__ = ["AdapterReference", "logits_of_folder"]

PREFIX, ADAPTER = "base_model.model.", "default"


class AdapterReference(ReferenceModel):
    """PEFT and torch's AdamW, from given adapters.

    PEFT has an A for each of queries, keys and values, and for gate and up projection; here each such set shares one
    parameter, as Megatron-Core's fused matrices do. Experts, one tensor in Transformers, are `ParamWrapper`s.

    Args:
        config: of the engine; its `target_modules`, `lora_rank` and `lora_alpha`.
        adapters: by PEFT's names, as the engine exports them.
    """

    def __init__(
        self, config: TrainEngineConfig, adapters: dict[str, Tensor], *, dtype: torch.dtype, device: str
    ) -> None:
        assert config.optimizer is not None
        self.config, self.initial = config, adapters
        self.matrices = adapter_matrices(ModelSpec.from_path(config.path), config.target_modules)
        super().__init__(Path(config.path), config.optimizer, dtype=dtype, device=device)

    def load(self, path: Path, dtype: torch.dtype) -> Any:
        base = super().load(path, dtype)
        parts = {name for m in self.matrices if m.expert is None for name, _ in m.parts}
        experts = {m.target for m in self.matrices if m.expert is not None}
        fused = {"linear_fc1": "mlp.experts.gate_up_proj", "linear_fc2": "mlp.experts.down_proj"}
        settings = LoraConfig(
            r=self.config.lora_rank,
            lora_alpha=self.config.lora_alpha,  # type: ignore[arg-type]
            target_modules=sorted(parts),
            target_parameters=[fused[target] for target in sorted(experts)] or None,
        )
        model = get_peft_model(base, settings, autocast_adapter_dtype=False)
        for matrix in self.matrices:
            if matrix.expert is None:
                modules: list[Any] = [model.get_submodule(PREFIX + name) for name, _ in matrix.parts]
                first, *others = modules
                for other in others:
                    other.lora_A[ADAPTER].weight = first.lora_A[ADAPTER].weight
        self.places = {m: list(_places(model, m)) for m in self.matrices}
        for name, ours in self._named():
            ours.copy_(self.initial[name])
        return model

    def adapters(self) -> dict[str, Tensor]:
        """By PEFT's names, each expert for itself."""
        return {name: tensor.detach().cpu().clone() for name, tensor in self._named()}

    def weights(self) -> dict[str, Tensor]:
        """With the adapters merged by PEFT."""
        return saved_weights(copy.deepcopy(self.model).merge_and_unload())

    def _named(self) -> Iterator[tuple[str, Tensor]]:
        for matrix, places in self.places.items():
            for (name, _), (a, b) in zip(matrix.parts, places, strict=True):
                yield f"{PREFIX}{name}.lora_A.weight", a
                yield f"{PREFIX}{name}.lora_B.weight", b


def _places(model: Any, matrix: AdapterMatrix) -> Iterator[tuple[Tensor, Tensor]]:
    """Views of A and B in PEFT's parameters for each part of a matrix."""
    if matrix.expert is None:
        for name, _ in matrix.parts:
            module = model.get_submodule(PREFIX + name)
            yield module.lora_A[ADAPTER].weight.data, module.lora_B[ADAPTER].weight.data
        return
    wanted = "gate_up_proj" if matrix.target == "linear_fc1" else "down_proj"
    module = model.get_submodule(f"{PREFIX}model.layers.{matrix.layer}.mlp.experts")
    while module.parameter_name != wanted:  # the wrappers of the two tensors are nested
        module = module.base_layer
        assert isinstance(module, ParamWrapper)
    a, b, experts = module.lora_A[ADAPTER].weight.data, module.lora_B[ADAPTER].weight.data, module.num_experts
    own_a = a.view(experts, -1, a.shape[1])[matrix.expert]
    own_b = b.view(b.shape[0], -1, experts)[:, :, matrix.expert]
    for rows in own_b.split([rows for _, rows in matrix.parts]):
        yield own_a, rows


def logits_of_folder(base: Path, adapter: Path, sequences: list[Tensor], dtype: torch.dtype) -> Tensor:
    """float32 `[tokens, vocabulary]`: what PEFT makes of an adapter's folder."""
    model: Any = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype=dtype), str(adapter))
    with torch.no_grad():
        return torch.cat([model(ids[None], use_cache=False).logits[0].float() for ids in sequences])
