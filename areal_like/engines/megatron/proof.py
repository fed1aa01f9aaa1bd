"""Any rank of a large world, for real, on one machine: Megatron-Core's own groups and the rank's own parameters.

PyTorch's fake process group lets one process be one rank of a world that does not exist. In it Megatron-Core's
`initialize_model_parallel` creates every group of that world; each is compared with the `Mesh`, and so are the groups
that the engine creates from the Mesh. Then the engine's own code builds the rank's model on the meta device (shapes
without memory), and every parameter is compared with the prediction of `spec.shards`.
"""

from __future__ import annotations

import json
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

from areal_like.alloc import AllocationError, Diagnostic, DiagnosticError, Mesh, ModelAllocation
from areal_like.config import TrainEngineConfig
from areal_like.preflight import check_layout
from areal_like.spec import ModelSpec, stage_sizes
from areal_like.spec.shards import rank_parameters

__all__ = ["Proof", "prove"]

MESH_NAMES = {
    "TENSOR_MODEL_PARALLEL_GROUP": "tp",
    "PIPELINE_MODEL_PARALLEL_GROUP": "pp",
    "CONTEXT_PARALLEL_GROUP": "cp",
    "DATA_PARALLEL_GROUP": "dp",
    "DATA_PARALLEL_GROUP_WITH_CP": "dp-cp",
    "MODEL_PARALLEL_GROUP": "tp-pp",
    "TENSOR_AND_CONTEXT_PARALLEL_GROUP": "tp-cp",
    "TENSOR_AND_DATA_PARALLEL_GROUP": "tp-dp",
    "TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP": "tp-dp-cp",
    "EXPERT_MODEL_PARALLEL_GROUP": "ep",
    "EXPERT_TENSOR_PARALLEL_GROUP": "etp",
    "EXPERT_DATA_PARALLEL_GROUP": "edp",
    "EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP": "etp-ep",
    "EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP": "etp-ep-pp",
    "EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP_WITH_EGTP": "etp-ep-pp",
}
"""Megatron-Core 0.19's description of a group: the Mesh's name."""
COLLECTION_NAMES = {
    "tp": "tp",
    "pp": "pp",
    "cp": "cp",
    "dp": "dp",
    "dp_cp": "dp-cp",
    "tp_cp": "tp-cp",
    "mp": "tp-pp",
    "tp_dp_cp": "tp-dp-cp",
    "ep": "ep",
    "expt_tp": "etp",
    "expt_dp": "edp",
    "tp_ep": "etp-ep",
    "tp_ep_pp": "etp-ep-pp",
}
"""Field of Megatron-Core's ProcessGroupCollection: the Mesh's name."""
EXAMPLES = 5

Groups = list[tuple[int, ...]]


@dataclass
class Proof:
    """What was compared, and what differs (nothing, if all is well)."""

    allocation: str
    rank: int
    world_size: int
    groups: int = 0
    parameters: int | None = None
    predicted: int | None = None
    tensors: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    differences: list[str] = field(default_factory=list)

    @property
    def holds(self) -> bool:
        return not self.differences

    def render(self) -> str:
        """For a person."""
        took = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in self.seconds.items())
        lines = [f"{self.allocation}: rank {self.rank} of {self.world_size} ranks ({took})"]
        lines.append(f"{self.groups} groups created by Megatron-Core compared with the mesh")
        if self.parameters is not None:
            lines.append(
                f"{self.parameters:,} parameters in {self.tensors} tensors built on the meta device; "
                f"{self.predicted:,} predicted"
            )
        lines += [f"DIFFERENT: {text}" for text in self.differences[:EXAMPLES]]
        if len(self.differences) > EXAMPLES:
            lines.append(f"... and {len(self.differences) - EXAMPLES} more differences")
        return "\n".join([*lines, "equal" if self.holds else "not equal"])

    def to_json(self) -> str:
        """The same as one JSON object."""
        return json.dumps({**vars(self), "holds": self.holds})


def prove(
    allocation: ModelAllocation,
    *,
    rank: int,
    spec: ModelSpec | None = None,
    pipeline_layout: tuple[int, ...] | None = None,
) -> Proof:
    """Be `rank` of the whole world, and compare.

    Without a spec only the groups are compared. The process must not have a process group of its own, and must not see
    a GPU (`CUDA_VISIBLE_DEVICES=`).

    Raises:
        AllocationError: AL110 for a rank outside the world, AL205 for a backend that is not built with Megatron-Core.
        DiagnosticError: the engine cannot cut this model so.
        PipelineLayoutError: the model has no such split over the stages.
    """
    mesh = allocation.mesh()
    mesh.coordinates(rank)
    _refuse(allocation, spec)
    proof = Proof(str(allocation), rank, mesh.world_size)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Megatron-Core's, that there is no Apex and no TransformerEngine
        with _stopwatch(proof, "import"):
            import_module("areal_like.engines.megatron.bridges.mbridge")
        with _fake_world(rank, mesh.world_size):
            with _stopwatch(proof, "groups"):
                _compare_groups(mesh, rank, proof)
            if spec is not None:
                with _stopwatch(proof, "model"):
                    _compare_model(allocation, spec, mesh, rank, proof, pipeline_layout)
    return proof


def _refuse(allocation: ModelAllocation, spec: ModelSpec | None) -> None:
    allocation.descriptor.require_role("train", source=str(allocation))
    if not allocation.descriptor.engine.startswith(f"{__package__}."):
        message = f"backend {allocation.backend!r} does not build its model with Megatron-Core"
        raise AllocationError([Diagnostic("AL205", "error", message, help="use --build with megatron")])
    found = [] if spec is None else check_layout(allocation, spec)
    if errors := [d for d in found if d.severity == "error"]:
        raise DiagnosticError(errors)


@contextmanager
def _stopwatch(proof: Proof, name: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    proof.seconds[name] = round(time.perf_counter() - start, 3)


@contextmanager
def _fake_world(rank: int, world_size: int) -> Iterator[None]:
    """A default process group in which nothing is ever sent; it ends with the context, and with it all groups."""
    import torch.distributed as dist
    from megatron.core import parallel_state
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def _compare_groups(mesh: Mesh, rank: int, proof: Proof) -> None:
    """Every group that Megatron-Core creates, then the ones that the engine creates, with the Mesh's."""
    import torch.distributed as dist
    from megatron.core import parallel_state

    from areal_like.engines.megatron.process_groups import create_process_groups

    for name, theirs in _megatron_groups(mesh).items():
        proof.groups += len(theirs)
        ours = _expected(mesh, name)
        if ours is None:
            proof.differences.append(f"Megatron-Core has groups {name}, which the mesh does not know")
        elif theirs != ours:
            proof.differences.append(_first_difference(name, theirs, ours))
    parallel_state.destroy_model_parallel()
    collection = create_process_groups(mesh).collection
    for name, dim in COLLECTION_NAMES.items():
        group = tuple(dist.get_process_group_ranks(getattr(collection, name)))
        if group != mesh.group(dim, rank):
            proof.differences.append(f"the engine's group {name} of rank {rank} is {group}")


def _megatron_groups(mesh: Mesh) -> dict[str, Groups]:
    """All groups of the world by Megatron-Core's description, in the order in which it creates them."""
    from megatron.core import parallel_state

    created: dict[str, Groups] = {}
    create = parallel_state.create_group

    def recorded(ranks: list[int], *args: Any, group_desc: str = "", **options: Any) -> Any:
        created.setdefault(group_desc, []).append(tuple(ranks))
        return create(ranks, *args, group_desc=group_desc, **options)

    with patch.object(parallel_state, "create_group", recorded):
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=mesh.tp,
            pipeline_model_parallel_size=mesh.pp,
            context_parallel_size=mesh.cp,
            expert_model_parallel_size=mesh.ep,
            expert_tensor_parallel_size=mesh.etp,
            create_gloo_process_groups=False,
        )
    return created


def _expected(mesh: Mesh, name: str) -> Groups | None:
    if name in MESH_NAMES:
        return list(mesh.groups(MESH_NAMES[name]))
    pipelines = list(mesh.groups("pp"))
    if name == "EMBEDDING_GROUP":  # first and last stage
        return [(group[0], group[-1]) if len(group) > 1 else group for group in pipelines]
    if name == "POSITION_EMBEDDING_GROUP":
        return [group[:1] for group in pipelines]
    if name in ("GTP_WEIGHT_REMAT_GROUP", "EXPERT_GTP_WEIGHT_REMAT_GROUP"):  # a dimension of size 1 here
        return [(rank,) for rank in range(mesh.world_size)]
    if name == "INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP":  # one optimizer instance: the world, replica by replica
        return [tuple(rank for group in mesh.groups("etp-ep-pp") for rank in group)]
    return None


def _first_difference(name: str, theirs: Groups, ours: Groups) -> str:
    if len(theirs) != len(ours):
        return f"Megatron-Core has {len(theirs)} groups {name}, the mesh {len(ours)}"
    mine, other = next((a, b) for a, b in zip(ours, theirs, strict=True) if a != b)
    return f"group {name}: Megatron-Core {other[:16]}, the mesh {mine[:16]}"


def _compare_model(
    allocation: ModelAllocation,
    spec: ModelSpec,
    mesh: Mesh,
    rank: int,
    proof: Proof,
    layout: tuple[int, ...] | None,
) -> None:
    """Every parameter of the rank's model, by name and size, with the prediction."""
    built = _build(allocation, spec, mesh, rank, stage_sizes(spec, allocation, layout))
    predicted = {shard.name: shard.elements for shard in rank_parameters(spec, allocation, rank, layout)}
    proof.parameters, proof.predicted, proof.tensors = sum(built.values()), sum(predicted.values()), len(built)
    for name in [*built, *(n for n in predicted if n not in built)]:
        if built.get(name) != predicted.get(name):
            proof.differences.append(f"{name}: {built.get(name)} elements built, {predicted.get(name)} predicted")


def _build(allocation: ModelAllocation, spec: ModelSpec, mesh: Mesh, rank: int, stages: list[int]) -> dict[str, int]:
    """Elements by name, numbered as in the whole model, of the model that the engine would build as this rank."""
    import torch

    from areal_like.engines.megatron import cpu
    from areal_like.engines.megatron.bridges import create_bridge
    from areal_like.engines.megatron.bridges.names import whole_name
    from areal_like.engines.megatron.model import chunk_layers
    from areal_like.engines.megatron.process_groups import create_process_groups
    from areal_like.engines.megatron.settings import transformer_settings

    cpu.install()
    here = mesh.coordinates(rank)
    meta = torch.device("meta")
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(_hugging_face_config(spec)), encoding="utf-8")
        config = TrainEngineConfig(backend=str(allocation), path=folder)
        settings = transformer_settings(
            config,
            device="cpu",
            stages=stages,
            pp=mesh.pp,
            stage=here.pp,
            is_moe=spec.is_moe,
            transformer_engine=False,
        )
        bridge = create_bridge(
            config.megatron.bridge_type,
            Path(folder),
            create_process_groups(mesh),
            dtype=torch.bfloat16,
            device=meta,
            stages=stages,
            settings=settings,
            use_transformer_engine=False,
        )
        with meta:
            chunks = bridge.build()
    first_expert = here.ep * (spec.num_experts // mesh.ep) if spec.is_moe else 0
    return {
        whole_name(name, first_layer=layers.start, first_expert=first_expert): parameter.numel()
        for chunk, layers in zip(chunks, chunk_layers(stages, mesh.pp, here.pp), strict=True)
        for name, parameter in chunk.named_parameters()
    }


def _hugging_face_config(spec: ModelSpec) -> dict[str, Any]:
    """A `config.json` of these numbers, for the architectures that the engine builds."""
    config: dict[str, Any] = {
        "model_type": spec.architecture,
        "num_hidden_layers": spec.num_layers,
        "hidden_size": spec.hidden_size,
        "num_attention_heads": spec.num_attention_heads,
        "num_key_value_heads": spec.num_key_value_heads,
        "head_dim": spec.head_dim,
        "intermediate_size": spec.intermediate_size,
        "vocab_size": spec.vocab_size,
        "tie_word_embeddings": spec.tied_embeddings,
        "max_position_embeddings": spec.max_position_embeddings,
    }
    if spec.is_moe:
        config |= {
            "num_experts": spec.num_experts,
            "num_experts_per_tok": spec.experts_per_token,
            "moe_intermediate_size": spec.moe_intermediate_size,
            "norm_topk_prob": True,
        }
    return config
