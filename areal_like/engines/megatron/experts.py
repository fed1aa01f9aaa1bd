"""The experts of a layer as grouped matrix products: one launch for all experts of a rank, whatever their loads.

Each projection is one parameter `[experts, outputs, inputs]`. Megatron-Core's gradient buffers, its optimizer and its
hooks see two parameters a layer instead of two for every expert, and `torch.nn.functional.grouped_mm` takes the stack
as it lies. Where the world knows experts one by one (names of bridges, shards of checkpoints) `expert_weights` and
`ExpertLinear.sharded_state_dict` show them so.

A product is told where the rows of each expert end by numbers on the device: nothing waits for the host.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.dist_checkpointing.mapping import ReplicaId, ShardedStateDict, ShardedTensor, ShardedTensorFactory
from megatron.core.fusions import fused_bias_swiglu
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, get_expert_parallel_rng_tracker_name
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

__all__ = ["ExpertLinear", "GroupedExperts", "Weight", "expert_weights", "has_grouped_products"]

_ALIGNMENT = 16
"""Bytes that a row of either matrix of a grouped product has to be a multiple of."""


def has_grouped_products(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether torch computes grouped products there without looping over experts.

    On CUDA: Hopper's and Blackwell's kernel for bfloat16 (`at::cuda::detail::bf16bf16_grouped_mm`); for anything else
    torch copies the counts to the host and launches a product for each expert. On the CPU a loop costs nothing.
    """
    if device.type != "cuda":
        return True
    return dtype is torch.bfloat16 and torch.cuda.get_device_capability(device)[0] in (9, 10)


@dataclass(frozen=True)
class Weight:
    """A parameter, or what it holds of one expert.

    Attributes:
        name: in its module; an expert of a stack has one of its own, as in Megatron-Core's grouped layers:
            `linear_fc1.weight` `[experts, outputs, inputs]` has `linear_fc1.weight0`, ... `[outputs, inputs]`.
        expert: number in the stack; None where the parameter is no stack.
    """

    name: str
    parameter: torch.nn.Parameter
    expert: int | None = None

    def of(self, whole: Tensor) -> Tensor:
        """The part that this weight has of a tensor of the parameter's shape; a view."""
        return whole if self.expert is None else whole[self.expert]

    @property
    def tensor(self) -> Tensor:
        """The values themselves: writing to them changes the parameter."""
        return self.of(self.parameter.detach())


def expert_weights(module: torch.nn.Module) -> Iterator[Weight]:
    """`named_parameters`, expert by expert."""
    stacks = {id(m.weight) for m in module.modules() if isinstance(m, ExpertLinear)}
    for name, parameter in module.named_parameters():
        if id(parameter) in stacks:
            yield from (Weight(f"{name}{i}", parameter, i) for i in range(len(parameter)))
        else:
            yield Weight(name, parameter)


class _GroupedProduct(torch.autograd.Function):
    """`rows[start:end] @ weight[e].T` for each expert e: `[rows, outputs]`."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        """
        Args:
            rows: `[rows, inputs]`, those of the first expert first.
            weight: `[experts, outputs, inputs]`.
            ends: int32 `[experts]`: where the rows of each expert end; the last is the number of rows.
        """
        ctx.save_for_backward(rows if weight.requires_grad else None, weight, ends)
        return _product(rows, weight.transpose(1, 2), ends)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:  # type: ignore[override]
        rows, weight, ends = ctx.saved_tensors
        grad = grad.contiguous()
        weight_grad = None
        if ctx.needs_input_grad[1]:  # before the gradient of the rows: the two are never there together
            weight_grad = _add_to_main_grad(weight, _weight_grad(rows, grad, weight, ends))
        rows_grad = _product(grad, weight, ends) if ctx.needs_input_grad[0] else None
        return rows_grad, weight_grad, None


class _ActivatedGroupedProduct(torch.autograd.Function):
    """`_GroupedProduct` of a weighted SwiGLU, which the backward pass computes again (`moe_act`).

    Megatron-Core's `CheckpointWithoutOutput` does the same for any function, but needs TransformerEngine and compiles
    an extension at its first use.
    """

    @staticmethod
    def forward(ctx: Any, gate_and_up: Tensor, probs: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        ctx.save_for_backward(gate_and_up, probs, weight, ends)
        return _product(_weighted_swiglu(gate_and_up, probs), weight.transpose(1, 2), ends)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None]:  # type: ignore[override]
        gate_and_up, probs, weight, ends = ctx.saved_tensors
        grad = grad.contiguous()
        with torch.enable_grad():
            inputs = gate_and_up.detach().requires_grad_(), probs.detach().requires_grad_()
            rows = _weighted_swiglu(*inputs)
        weight_grad = None
        if ctx.needs_input_grad[2]:
            weight_grad = _add_to_main_grad(weight, _weight_grad(rows.detach(), grad, weight, ends))
        gate_and_up_grad, probs_grad = torch.autograd.grad(rows, inputs, _product(grad, weight, ends))
        return gate_and_up_grad, probs_grad, weight_grad, None


def _weighted_swiglu(gate_and_up: Tensor, probs: Tensor) -> Tensor:
    """`silu(gate) * up * probability`: `[rows, 2 width]` and `[rows, 1]` to `[rows, width]`."""
    if gate_and_up.is_cuda:
        from areal_like.engines.megatron.kernels.swiglu import WeightedSwiGLU

        return WeightedSwiGLU.apply(gate_and_up, probs)  # type: ignore[no-any-return]
    return fused_bias_swiglu.weighted_bias_swiglu_impl(gate_and_up, None, probs)  # type: ignore[no-any-return]


def _product(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    if rows.shape[0] == 0:  # kernels take no empty matrix
        return rows.new_zeros(0, weight.shape[2])
    return F.grouped_mm(rows, weight, offs=ends)


def _weight_grad(rows: Tensor, grad: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """`grad[start:end].T @ rows[start:end]` for each expert: `[experts, outputs, inputs]`; zeros for an idle one."""
    if rows.shape[0] == 0:
        return torch.zeros_like(weight)
    return F.grouped_mm(grad.t(), rows, offs=ends)


def _add_to_main_grad(weight: Tensor, grad: Tensor) -> Tensor | None:
    """Add to the gradient buffer of Megatron's DistributedDataParallel, for all experts at once.

    Returns:
        What autograd is to accumulate: the gradient where there is no such buffer, else nothing.
    """
    main_grad = getattr(weight, "main_grad", None)
    if main_grad is None:
        return grad
    main_grad.add_(grad)
    # The hook that DistributedDataParallel has on the parameter runs next. It is not to add again, and with
    # overlap_grad_reduce it refuses a parameter without gradient: it finds the weights themselves in that place, which
    # take no memory, and removes them. (Megatron-Core and TransformerEngine put unwritten memory there.)
    weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]
    weight.grad = weight.detach()
    return None


class ExpertLinear(MegatronModule):
    """One projection of all experts of a rank: a parameter `weight` `[experts, outputs, inputs]`.

    `tensor_model_parallel` and `partition_dim` say, as Megatron-Core's linear layers do of one matrix, how expert
    tensor ranks split each expert: 0 by outputs, 1 by inputs.
    """

    tensor_model_parallel = True

    def __init__(
        self,
        experts: int,
        outputs: int,
        inputs: int,
        *,
        config: TransformerConfig,
        groups: ProcessGroupCollection,
        partition_dim: int,
        gated: bool,
        init_method: Any,
    ) -> None:
        """
        Args:
            outputs, inputs: of one expert on this rank.
            gated: the outputs are a gate and, below it, what it multiplies; expert tensor ranks split both.

        Raises:
            ValueError: a row is no multiple of 16 bytes.
        """
        super().__init__(config)
        for width in (outputs, inputs):
            if width * config.params_dtype.itemsize % _ALIGNMENT:
                raise ValueError(
                    f"megatron.moe_grouped_gemm: an expert's matrix of {outputs} x {inputs} in {config.params_dtype}"
                    f" has rows that are no multiple of {_ALIGNMENT} bytes; set it to false"
                )
        self.partition_dim, self.gated = partition_dim, gated
        self.ep_group, self.tp_group, self.dp_group = groups.ep, groups.expt_tp, groups.expt_dp
        device = None if config.use_cpu_initialization else torch.cuda.current_device()
        self.weight = torch.nn.Parameter(
            torch.empty(experts, outputs, inputs, dtype=config.params_dtype, device=device)
        )
        if config.perform_initialization:
            with get_cuda_rng_tracker().fork(get_expert_parallel_rng_tracker_name()):
                init_method(self.weight)
        # As Megatron-Core marks its own experts: the first chooses the gradient buffer, the others whose share of the
        # gradient norm is counted.
        own_groups = config.expert_model_parallel_size > 1 or self.tp_group.size() != groups.tp.size()
        self.weight.allreduce = not own_groups  # type: ignore[attr-defined]
        self.weight.tensor_model_parallel = True  # type: ignore[attr-defined]
        self.weight.partition_dim = 1 + partition_dim  # type: ignore[attr-defined]
        self.weight.partition_stride = 1  # type: ignore[attr-defined]

    @property
    def weight0(self) -> Tensor:
        """The first expert's matrix, where megatron-bridge looks for the shape of each."""
        return self.weight[0]

    def forward(self, rows: Tensor, ends: Tensor) -> Tensor:
        """`[rows, inputs]` to `[rows, outputs]`; `ends` as `_GroupedProduct` takes it."""
        return _GroupedProduct.apply(rows, self.weight, ends)  # type: ignore[no-any-return,no-untyped-call]

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[tuple[int, int, int], ...] = (), metadata: Any = None
    ) -> ShardedStateDict:
        """One shard of what Megatron-Core's other experts store with a shard an expert: the same whole tensor, `[...,
        experts, outputs, inputs]`, so that either kind reads what the other wrote."""
        axis = len(sharded_offsets)
        experts = (axis, self.ep_group.rank(), self.ep_group.size())
        split, size, rank = axis + 1 + self.partition_dim, self.tp_group.size(), self.tp_group.rank()

        def shard(key: str, tensor: Tensor, replica: ReplicaId, place: tuple[int, int, int]) -> ShardedTensor:
            offsets = (*sharded_offsets, experts, place)
            return ShardedTensor.from_rank_offsets(key, tensor, *offsets, replica_id=replica, prepend_axis_num=axis)

        def halves(key: str, tensor: Tensor, replica: ReplicaId, _: slice | None) -> list[ShardedTensor]:
            parts = tensor.chunk(2, dim=1)  # the whole tensor has the gates of all ranks first
            return [shard(key, part, replica, (split, rank + i * size, 2 * size)) for i, part in enumerate(parts)]

        key, replica = f"{prefix}weight", (0, 0, self.dp_group.rank())
        if not self.gated:
            return {key: shard(key, self.weight, replica, (split, rank, size))}
        merge = lambda parts: torch.cat(parts, dim=1)  # noqa: E731
        return {key: ShardedTensorFactory(key, self.weight, halves, merge, replica_id=replica)}


class GroupedExperts(MegatronModule):
    """The experts of a rank, in the place of Megatron-Core's `TEGroupedMLP` or `SequentialMLP`: SwiGLU without biases,
    each row weighed with its router probability before the second projection.
    """

    def __init__(
        self,
        num_local_experts: int,
        config: TransformerConfig,
        *,
        pg_collection: ProcessGroupCollection,
        name: str | None = None,
    ) -> None:
        """
        Raises:
            ValueError: experts of another kind, or matrices that grouped products cannot take.
        """
        super().__init__(config)
        if config.activation_func is not F.silu or not config.gated_linear_unit or config.add_bias_linear:
            raise ValueError(
                "megatron.moe_grouped_gemm: these experts are not SwiGLU without biases; set it to false for them"
            )
        assert config.moe_ffn_hidden_size is not None
        width = config.moe_ffn_hidden_size // pg_collection.expt_tp.size()
        shared: dict[str, Any] = {"config": config, "groups": pg_collection}
        self.linear_fc1 = ExpertLinear(
            num_local_experts,
            2 * width,
            config.hidden_size,
            partition_dim=0,
            gated=True,
            init_method=config.init_method,
            **shared,
        )
        self.linear_fc2 = ExpertLinear(
            num_local_experts,
            config.hidden_size,
            width,
            partition_dim=1,
            gated=False,
            init_method=config.output_layer_init_method,
            **shared,
        )
        self._recomputes_activation = (
            config.recompute_granularity == "selective" and "moe_act" in config.recompute_modules
        )

    def forward(
        self, permuted_local_hidden_states: Tensor, tokens_per_expert: Tensor, permuted_probs: Tensor
    ) -> tuple[Tensor, None]:
        """
        Args:
            permuted_local_hidden_states: `[rows, hidden]`, those of the first expert first.
            tokens_per_expert: integers `[experts]`, on the device or the host.
            permuted_probs: `[rows]`, of the router.

        Returns:
            `[rows, hidden]`, and Megatron-Core's place for a bias.
        """
        rows = permuted_local_hidden_states
        ends = tokens_per_expert.cumsum(0, dtype=torch.int32).to(rows.device, non_blocking=True)
        probs = permuted_probs.unsqueeze(-1)
        # No name for what the next line has used: a pass without gradients is to free it.
        if self._recomputes_activation:
            weight = self.linear_fc2.weight
            return _ActivatedGroupedProduct.apply(self.linear_fc1(rows, ends), probs, weight, ends), None  # type: ignore[no-untyped-call]
        return self.linear_fc2(_weighted_swiglu(self.linear_fc1(rows, ends), probs), ends), None

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[tuple[int, int, int], ...] = (), metadata: Any = None
    ) -> ShardedStateDict:
        found: ShardedStateDict = {}
        for name, linear in (("linear_fc1", self.linear_fc1), ("linear_fc2", self.linear_fc2)):
            # Megatron-Core's experts of either kind are stored under `experts.experts`.
            ((_, shard),) = linear.sharded_state_dict(f"{prefix}experts.{name}.", sharded_offsets, metadata).items()
            found[f"{prefix}{name}.weight"] = shard
        return found
