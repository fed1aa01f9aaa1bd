"""The optimizer's tensors, independent of how they are spread over ranks.

Each trained parameter has a float32 copy (unless it is float32 itself) and Adam's two moments, which are stored in
float32 however the optimizer keeps them (`precision_aware`): a checkpoint fits either. They are stored as whole
parameters under `optimizer.state.KIND.NAME`, sharded like the parameter: Megatron-Core's `fully_reshardable` format.

Megatron-Core's own route through `sharded_state_dict` and `load_state_dict` of the optimizer is not taken. It stores
beside the tensors a dictionary for each optimizer of the chain, and their number depends on the layout (experts have an
optimizer of their own only where they have groups of their own: KeyError 'optimizer' from e2 to e1); it needs the step
of an optimizer that has made none (KeyError 'step'); it hands all parameters one `step` tensor, which every one of them
then increments; and it keeps the state of all data-parallel ranks in the memory of each. Here the rank with the largest
part of a parameter collects the rest of it, so that only parameters that lie across a border travel.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

from areal_like.engines.megatron.checkpoint.model_state import Sharded
from areal_like.engines.megatron.precision_aware import MAIN_COPY, keeps_remainders, main_copy, remainder
from areal_like.spec.checkpoint import CheckpointFault

__all__ = ["chain", "gathered", "load_tensors", "requested"]

PREFIX = "optimizer.state"
MAIN = "fp32_param"
MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass
class Piece:
    """What this rank keeps of one parameter: elements `start` to `end` of the flattened parameter.

    Attributes:
        number: of the parameter among those of its optimizer, the same on all ranks that share its state.
        tensors: the main parameter and the moments, views of the optimizer's own tensors.
        shard: of the parameter, where the optimizer keeps remainders of it instead of a main parameter.
    """

    number: int
    parameter: torch.nn.Parameter
    start: int
    end: int
    tensors: dict[str, Tensor]
    shard: Tensor | None = None

    def read(self, kind: str) -> Tensor:
        """float32 values; the optimizer's own tensor where it is float32, else a copy in host memory."""
        tensor = self.tensors[kind]
        if kind == MAIN and self.shard is not None:
            return main_copy(self.shard, tensor).cpu()
        return tensor if tensor.dtype is torch.float32 else tensor.to("cpu", torch.float32)

    def write(self, kind: str, values: Tensor) -> None:
        """Take over float32 values; the parameter has its own already.

        Raises:
            CheckpointFault: they are not those of the parameter.
        """
        if kind == MAIN and self.shard is not None:
            try:
                values = remainder(self.shard, values.to(self.shard.device))
            except ValueError as error:
                raise CheckpointFault(f"the checkpoint contradicts itself: {error}") from error
        self.tensors[kind].copy_(values)


Parts = dict[int, tuple[int, int]]
"""Which elements of a flattened parameter each rank keeps."""


def chain(optimizer: Any) -> list[Any]:
    """The optimizers of Megatron's chain that have parameters."""
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    return [part for part in parts if not getattr(part, "is_stub_optimizer", False)]


def create_moments(optimizer: Any) -> None:
    """Give every parameter the moments that Adam would create at its first step."""
    for part in chain(optimizer):
        inner = part.optimizer
        for group in inner.param_groups:
            for parameter in group["params"]:
                if inner.state[parameter] or parameter.numel() == 0:
                    continue
                if hasattr(inner, "initialize_state"):  # TransformerEngine's FusedAdam keeps the step in the group
                    inner.initialize_state(parameter, keeps_remainders(inner, parameter))
                elif isinstance(inner, torch.optim.Adam):
                    inner.state[parameter] = {
                        "step": torch.zeros((), dtype=torch.float32),
                        **{name: torch.zeros_like(parameter.detach()) for name in MOMENTS},
                    }


def pieces(part: Any) -> list[Piece]:
    """What this rank keeps of the parameters of one optimizer of the chain."""
    return list(_sharded_pieces(part) if isinstance(part, DistributedOptimizer) else _whole_pieces(part))


def _sharded_pieces(part: DistributedOptimizer) -> Iterator[Piece]:
    number = 0
    for buffer, ranges in zip(part.buffers, part.gbuf_ranges, strict=True):
        numbers = {}
        for parameter in buffer.param_index_map:
            numbers[parameter] = number
            number += 1
        for buckets in ranges.values():
            for bucket in buckets:
                for parameter, range_map in bucket["param_map"].items():
                    group, order = part.model_param_group_index_map[parameter]
                    main = part.optimizer.param_groups[group]["params"][order]
                    kept = range_map["param"]
                    tensors = _tensors(part.optimizer, parameter, main)
                    shard = main.detach().view(-1) if keeps_remainders(part.optimizer, main) else None
                    yield Piece(numbers[parameter], parameter, kept.start, kept.end, tensors, shard)


def _whole_pieces(part: Any) -> Iterator[Piece]:
    pairs: list[tuple[torch.nn.Parameter, Tensor]] = []
    if hasattr(part, "float16_groups"):
        for models, mains in zip(part.float16_groups, part.fp32_from_float16_groups, strict=True):
            pairs += zip(models, mains, strict=True)
        pairs += [(p, p) for group in part.fp32_from_fp32_groups for p in group]
    else:
        pairs += [(p, p) for group in part.optimizer.param_groups for p in group["params"]]
    for number, (parameter, main) in enumerate(pairs):
        yield Piece(number, parameter, 0, parameter.numel(), _tensors(part.optimizer, parameter, main))


def _tensors(inner: torch.optim.Optimizer, parameter: torch.nn.Parameter, main: Tensor) -> dict[str, Tensor]:
    state = inner.state[main]
    found = {name: state[name] for name in MOMENTS if name in state}
    if parameter.dtype is not torch.float32:
        found[MAIN] = state[MAIN_COPY] if keeps_remainders(inner, main) else main
    return {name: tensor.detach().view(-1) for name, tensor in found.items()}


# Saving


def gathered(optimizer: Any, shards: dict[torch.nn.Parameter, Sharded]) -> dict[str, Any]:
    """The state as shards of whole parameters; collective over the ranks that share it.

    Also makes the rank that stores a parameter's state store the parameter: files of equal size on all ranks.
    """
    create_moments(optimizer)
    found: dict[str, Any] = {}
    for index, part in enumerate(chain(optimizer)):
        for parameter in _spread_parameters(part):
            shards[parameter].replica_id = _replica(shards[parameter], owned=False)
        for piece, owner, parts in _spread(part):
            shard = shards[piece.parameter]
            whole = len(parts) == 1
            tensors = {kind: piece.read(kind) for kind in piece.tensors} if whole else _exchange(piece, owner, parts)
            if isinstance(part, DistributedOptimizer):
                shard.replica_id = _replica(shard, owned=owner == dist.get_rank())
            for kind, tensor in tensors.items():
                found[_name(index, piece, kind)] = _like(shard, kind, tensor.view(piece.parameter.shape))
    return found


def _exchange(piece: Piece, owner: int, parts: Parts) -> dict[str, Tensor]:
    """The whole tensors on `owner`, nothing elsewhere. Parts travel through the memory of the host."""
    rank = dist.get_rank()
    kinds = sorted(piece.tensors)
    own = torch.stack([piece.read(kind).to("cpu") for kind in kinds])
    if rank != owner:
        dist.send(own, dst=owner)
        return {}
    whole = torch.empty(len(kinds), piece.parameter.numel())
    for sender, (start, end) in sorted(parts.items()):
        part = own
        if sender != rank:
            part = torch.empty(len(kinds), end - start)
            dist.recv(part, src=sender)
        whole[:, start:end] = part
    return {kind: whole[index] for index, kind in enumerate(kinds)}


# Loading


def requested(optimizer: Any, shards: dict[torch.nn.Parameter, Sharded]) -> dict[str, Any]:
    """Room for the whole tensors of every parameter that this rank keeps a piece of; collective as `gathered`."""
    create_moments(optimizer)
    found: dict[str, Any] = {}
    for index, part in enumerate(chain(optimizer)):
        for piece, owner, _ in _spread(part):
            shard = shards[piece.parameter]
            for kind in piece.tensors:
                room = _like(shard, kind, torch.empty(piece.parameter.shape, dtype=torch.float32))
                if isinstance(part, DistributedOptimizer):
                    room.replica_id = _replica(shard, owned=owner == dist.get_rank())
                found[_name(index, piece, kind)] = room
    return found


@torch.no_grad()
def load_tensors(optimizer: Any, loaded: dict[str, Tensor]) -> None:
    """Copy what was read into the optimizer's own tensors."""
    for index, part in enumerate(chain(optimizer)):
        for piece in pieces(part):
            for kind in piece.tensors:
                piece.write(kind, loaded[_name(index, piece, kind)].reshape(-1)[piece.start : piece.end])


# Both


def _spread(part: Any) -> Iterator[tuple[Piece, int, Parts]]:
    """Each piece of this rank with the rank that stores the parameter, and the part that every rank keeps; in the same
    order on all ranks. Collective where state is sharded."""
    own = sorted(pieces(part), key=lambda piece: piece.number)
    if not isinstance(part, DistributedOptimizer):
        yield from ((piece, dist.get_rank(), {dist.get_rank(): (piece.start, piece.end)}) for piece in own)
        return
    group = part.data_parallel_group
    everyone: list[Any] = [None] * group.size()
    dist.all_gather_object(everyone, {piece.number: (piece.start, piece.end) for piece in own}, group=group)
    ranks = dist.get_process_group_ranks(group)
    for piece in own:
        parts = {rank: kept[piece.number] for rank, kept in zip(ranks, everyone, strict=True) if piece.number in kept}
        yield piece, max(parts, key=lambda rank: (parts[rank][1] - parts[rank][0], -rank)), parts


def _spread_parameters(part: Any) -> Iterator[torch.nn.Parameter]:
    """Parameters whose state is sharded, those without a piece on this rank too."""
    if isinstance(part, DistributedOptimizer):
        for buffer in part.buffers:
            yield from buffer.param_index_map


def _name(index: int, piece: Piece, kind: str) -> str:
    return f"{index}.{piece.number}.{kind}"


def _like(shard: Sharded, kind: str, tensor: Tensor) -> Sharded:
    changes: dict[str, Any] = {"key": f"{PREFIX}.{kind}.{shard.key}", "data": tensor}
    if isinstance(shard, ShardedTensor):
        changes["dtype"] = tensor.dtype
    return replace(shard, **changes)


def _replica(shard: Sharded, *, owned: bool) -> tuple[int, ...]:
    """The last number of a replica is the data-parallel index; 0 everywhere stores the tensor."""
    if not isinstance(shard.replica_id, tuple):
        raise TypeError(f"{shard.key}: replica {shard.replica_id!r} is not (pipeline, tensor, data)")
    return (*shard.replica_id[:-1], 0 if owned else 1)
