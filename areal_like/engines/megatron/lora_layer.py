"""One adapter on one rank, and what megatron-bridge's layer lacks: its own type, dropout of split inputs, the merge."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import get_cuda_rng_tracker, get_expert_parallel_rng_tracker_name
from torch import Tensor

from areal_like.engines.megatron.process_groups import gather_shards
from areal_like.spec.lora import AdapterMatrix

__all__ = ["Adapter", "ShardDropout", "cast", "merged_weight", "tracker_name"]


@dataclass(frozen=True)
class Adapter:
    """This rank's part of one adapter.

    Attributes:
        matrix: which it is, with whole sizes.
        module: megatron-bridge's LoRALinear: `to_wrap` and `adapter` (`linear_in` is A, `linear_out` is B).
        group: the ranks over which A, B and the matrix are split.
    """

    matrix: AdapterMatrix
    module: Any
    group: dist.ProcessGroup

    @property
    def scaling(self) -> float:
        return float(self.module.adapter.alpha / self.module.adapter.dim)

    @property
    def a(self) -> Tensor:
        """This rank's `[rank / t, inputs]` of a column-parallel matrix, `[rank, inputs / t]` of a row-parallel one."""
        return self.module.adapter.linear_in.weight.detach()

    @property
    def b(self) -> Tensor:
        """This rank's `[outputs / t, rank]`."""
        return self.module.adapter.linear_out.weight.detach()


@torch.no_grad()
def merged_weight(module: Any) -> Tensor:
    """This rank's part of W + scaling B A, in the type of W. Collective over the ranks that split W.

    Args:
        module: megatron-bridge's LoRALinear.
    """
    adapter = module.adapter
    a, b, weight = adapter.linear_in.weight, adapter.linear_out.weight, module.to_wrap.weight
    if adapter.input_is_parallel:  # W and A are split by columns
        b = torch.cat(gather_shards(b, adapter.tp_group))
    else:
        a = torch.cat(gather_shards(a, adapter.tp_group))
    return (weight.float() + adapter.alpha / adapter.dim * (b.float() @ a.float())).to(weight.dtype)


class ShardDropout(torch.nn.Module):
    """Dropout whose draws differ between ranks that hold parts of its input, and agree between those that hold copies.

    Args:
        tracker: name of Megatron's random state for parts; None for a copy.
    """

    def __init__(self, p: float, tracker: str | None) -> None:
        super().__init__()
        self.p, self.tracker = p, tracker

    def forward(self, x: Tensor) -> Tensor:
        if self.tracker is None or not self.training:
            return torch.nn.functional.dropout(x, self.p, self.training)
        with get_cuda_rng_tracker().fork(self.tracker):
            return torch.nn.functional.dropout(x, self.p, True)


def tracker_name(adapter: Adapter) -> str | None:
    if adapter.matrix.expert is not None:
        return str(get_expert_parallel_rng_tracker_name())
    config = adapter.module.to_wrap.config
    copied = adapter.group.size() == 1 or (adapter.matrix.is_column_parallel and not config.sequence_parallel)
    return None if copied else "model-parallel-rng"


def cast(module: torch.nn.Module, dtype: torch.dtype) -> None:
    """Compute in the adapter's type, answer in the type of what came in."""

    def before(_: torch.nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        module.incoming = arguments[0].dtype  # type: ignore[assignment]
        return (arguments[0].to(dtype), *arguments[1:])

    def after(_: torch.nn.Module, arguments: Any, output: Tensor) -> Tensor:
        return output.to(module.incoming)  # type: ignore[arg-type]

    module.register_forward_pre_hook(before)
    module.register_forward_hook(after)
