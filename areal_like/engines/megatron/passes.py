"""Forward and backward passes of a batch through Megatron's pipeline schedules."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from torch import Tensor

from areal_like.data.batch import PackedBatch
from areal_like.engines.base import Loss, TokenOutputs
from areal_like.engines.megatron.communicators import warm_up_neighbours
from areal_like.engines.megatron.context_parallel import gather_tokens
from areal_like.engines.megatron.micro_batches import MicroBatch, MicroBatches
from areal_like.engines.megatron.process_groups import ModelGroups, gather_shards

__all__ = ["ModelPasses"]


def _finalize_without_scaling(model: list[torch.nn.Module], num_tokens: Tensor | None, **kwargs: Any) -> None:
    finalize_model_grads(model, None, **kwargs)


def _hidden_states(*, hidden_states: Tensor, **kwargs: Any) -> Tensor:
    """What a last stage hands out where the engine calls its head itself: `[tokens, 1, hidden]`."""
    return hidden_states


class ModelPasses:
    """What runs micro-batches through the chunks of one model."""

    def __init__(
        self, chunks: Sequence[torch.nn.Module], groups: ModelGroups, *, vocab_size: int, is_value_model: bool = False
    ) -> None:
        self.chunks, self.groups, self.vocab_size = list(chunks), groups, vocab_size
        self.is_value_model = is_value_model
        self.config = cast(Any, self.chunks[0].config)
        self._last_module = getattr(self.chunks[-1], "module", self.chunks[-1])  # without the data-parallel wrapper
        pp = groups.mesh.size("pp")
        virtual = self.config.virtual_pipeline_model_parallel_size
        self._schedule = get_forward_backward_func(pp_size=pp, vp_size=virtual)
        self._communicator = P2PCommunicator(pp_group=groups.collection.pp, config=self.config) if pp > 1 else None
        # The loss is already divided by the weight of the global batch: gradients are summed and not rescaled.
        self.config.finalize_model_grads_func = _finalize_without_scaling

    def warm_up(self, device: torch.device) -> None:
        """Use the links between neighbouring stages once. Collective."""
        if self._communicator is not None:
            warm_up_neighbours(self._communicator, self.groups, device, self.config.pipeline_dtype)

    def gradients(self, micro_batches: MicroBatches, loss: Loss, *, batch: PackedBatch) -> list[dict[str, Tensor]]:
        """Accumulate the gradients of the loss over the global batch, of which `batch` is this rank's part.

        Returns:
            What `figures` makes figures of, once the GPU has come so far: reading them here would wait for it.

        Raises:
            ValueError: no token of the global batch has weight.
        """
        weight = self._global_weight(batch, loss, micro_batches.device)
        return self._run(micro_batches, partial(self._loss, loss=loss, weight=weight), forward_only=False)

    def figures(self, results: list[dict[str, Tensor]]) -> dict[str, float]:
        """The loss and its figures over the global batch, the same on every rank. Collective.

        Args:
            results: of `gradients`.
        """
        box: list[Any] = [None]
        collection = self.groups.collection
        if self.groups.is_last_stage:
            names = [name for figures in results for name in figures]
            values = torch.stack([value.double() for figures in results for value in figures.values()]).tolist()
            local: dict[str, float] = {}
            for name, value in zip(names, values, strict=True):
                local[name] = local.get(name, 0.0) + value
            gathered: list[Any] = [local] * collection.dp.size()
            if collection.dp.size() > 1:
                dist.all_gather_object(gathered, local, group=collection.dp)
            every = sorted({name for figures in gathered for name in figures})
            box = [{name: sum(figures.get(name, 0.0) for figures in gathered) for name in every}]
        if collection.pp.size() > 1:
            source = dist.get_global_rank(collection.pp, collection.pp.size() - 1)
            dist.broadcast_object_list(box, src=source, group=collection.pp)
        return box[0]

    def outputs(
        self, micro_batches: MicroBatches, *, batch: PackedBatch, temperature: float, entropy: bool
    ) -> TokenOutputs:
        """Log-probabilities (and entropies) of all tokens of `batch`, in its order, on every stage."""
        read = partial(self._read_tokens, temperature=temperature, entropy=entropy)
        if self.is_value_model:
            values = self._collect(micro_batches, self._read_values, batch, width=1)[:, 0]
            return TokenOutputs(log_probs=values.new_empty(0), values=values)
        values = self._collect(micro_batches, read, batch, width=2)
        return TokenOutputs(log_probs=values[:, 0], entropy=values[:, 1] if entropy else None)

    def logits(self, micro_batches: MicroBatches, *, batch: PackedBatch) -> Tensor:
        """float32 `[tokens, vocabulary]` on every rank: for comparing small models, not for training."""
        return self._collect(micro_batches, self._read_logits, batch, width=self.vocab_size, whole_model=True)

    def next_logits(self, micro_batches: MicroBatches, *, batch: PackedBatch) -> Tensor:
        """float32 `[sequences, vocabulary]` on every rank: of the token that would follow each sequence."""
        results = self._run(micro_batches, self._read_next, forward_only=True, whole_model=True)
        values = torch.zeros(len(batch), self.vocab_size, device=micro_batches.device)
        if self.groups.is_last_stage:
            for micro_batch, value in zip(micro_batches, results, strict=True):
                values[micro_batch.indices] = value
        self._from_last_stage(values)
        return values.cpu()

    def _collect(
        self, micro_batches: MicroBatches, read: Any, batch: PackedBatch, *, width: int, whole_model: bool = False
    ) -> Tensor:
        """What `read` gives for the tokens of each micro-batch, put into the order of `batch`: `[tokens, width]`."""
        results = self._run(micro_batches, read, forward_only=True, whole_model=whole_model)
        values = torch.zeros(batch.input_ids.numel(), width, device=micro_batches.device)
        if self.groups.is_last_stage:
            starts, lengths = batch.cu_seqlens.tolist(), batch.lengths
            for micro_batch, value in zip(micro_batches, results, strict=True):
                offset = 0
                for index in micro_batch.indices:
                    length, start = lengths[index], starts[index]
                    values[start : start + length] = value[offset : offset + length]
                    offset += length
        self._from_last_stage(values)
        return values.cpu()

    def _from_last_stage(self, values: Tensor) -> None:
        """Broadcast what the last stage has."""
        if self.groups.mesh.size("pp") > 1:
            group = self.groups.collection.pp
            dist.broadcast(values, src=dist.get_global_rank(group, group.size() - 1), group=group)

    def _run(
        self, micro_batches: MicroBatches, collect: Any, *, forward_only: bool, whole_model: bool = False
    ) -> list[Any]:
        """What `collect` makes of the last stage's output for each micro-batch.

        Args:
            whole_model: the output is that of the model's own head, logits or values; else it is the head's input, so
                that no schedule holds on to logits.
        """
        own_head = whole_model or self.is_value_model
        options: dict[str, Any] = {} if own_head else {"output_processor": _hidden_states}

        def forward_step(iterator: Iterator[MicroBatch], model: torch.nn.Module) -> tuple[Tensor, Any]:
            micro_batch = next(iterator)
            packed = micro_batch.packed
            output = model(micro_batch.input_ids, micro_batch.positions, None, packed_seq_params=packed, **options)
            return output, partial(collect, micro_batch)

        extra = {"p2p_communicator": self._communicator} if self._communicator else {}
        with torch.no_grad() if forward_only else torch.enable_grad():
            return self._schedule(
                forward_step_func=forward_step,
                data_iterator=[iter(micro_batches) for _ in self.chunks]
                if len(self.chunks) > 1
                else iter(micro_batches),
                model=self.chunks,
                num_microbatches=len(micro_batches),
                seq_length=1,  # shapes are exchanged: micro-batches differ in length
                micro_batch_size=1,
                forward_only=forward_only,
                collect_non_loss_data=forward_only,
                pg_collection=self.groups.collection,
                **extra,
            )

    def _token_outputs(
        self, micro_batch: MicroBatch, output: Tensor, temperature: float, entropy: bool
    ) -> TokenOutputs:
        """
        Args:
            output: hidden states, see `_hidden_states`; of a value model `[1, local tokens, 1]` values.
        """
        if self.is_value_model:
            values = self._whole(micro_batch, output.reshape(-1))
            return TokenOutputs(log_probs=values.new_empty(0), values=values)
        model: Any = self._last_module
        shared = model.share_embeddings_and_output_weights
        log_probs, entropies = model.output_layer(
            output,
            weight=model.shared_embedding_or_output_weight() if shared else None,
            labels=micro_batch.labels,
            temperature=temperature,
            with_entropy=entropy,
        )
        return TokenOutputs(
            self._whole(micro_batch, log_probs), self._whole(micro_batch, entropies) if entropies is not None else None
        )

    def _whole(self, micro_batch: MicroBatch, local: Tensor) -> Tensor:
        """Values about the next token of this rank's positions to values about each token of the micro-batch."""
        return micro_batch.to_tokens(gather_tokens(local, self.groups.collection.cp))

    def _loss(
        self, micro_batch: MicroBatch, output: Tensor, *, loss: Loss, weight: float
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        outputs = self._token_outputs(micro_batch, output, loss.temperature, loss.needs_entropy)
        if len(micro_batch.batch) == 0:
            # Another rank needs more micro-batches: take part in the communication, contribute nothing.
            total = (outputs.log_probs if outputs.values is None else outputs.values).sum()
            reported: dict[str, Tensor] = {}
        else:
            total, reported = loss(outputs, micro_batch.batch)
        figures = {"loss": total.detach(), **reported}
        return total / weight, torch.ones((), dtype=torch.int), {k: v.detach() / weight for k, v in figures.items()}

    def _read_tokens(
        self, micro_batch: MicroBatch, output: Tensor, non_loss_data: bool = True, *, temperature: float, entropy: bool
    ) -> Tensor:
        outputs = self._token_outputs(micro_batch, output, temperature, entropy)
        second = outputs.entropy if outputs.entropy is not None else torch.zeros_like(outputs.log_probs)
        return torch.stack([outputs.log_probs, second], dim=1)

    def _read_values(self, micro_batch: MicroBatch, values: Tensor, non_loss_data: bool = True) -> Tensor:
        return self._whole(micro_batch, values.reshape(-1))[:, None]

    def _read_logits(self, micro_batch: MicroBatch, logits: Tensor, non_loss_data: bool = True) -> Tensor:
        local = (
            torch.cat(gather_shards(logits, self.groups.collection.tp), dim=-1).squeeze(0)[:, : self.vocab_size].float()
        )
        return gather_tokens(local, self.groups.collection.cp)[micro_batch.places]

    def _read_next(self, micro_batch: MicroBatch, logits: Tensor, non_loss_data: bool = True) -> Tensor:
        ends = micro_batch.batch.cu_seqlens[1:].to(logits.device) - 1
        return self._read_logits(micro_batch, logits)[ends]

    def _global_weight(self, batch: PackedBatch, loss: Loss, device: torch.device) -> float:
        weight = torch.zeros((), dtype=torch.float64, device=device)
        if len(batch):
            weight += loss.weight(batch).to(weight)
        dist.all_reduce(weight, group=self.groups.collection.dp)
        if float(weight) <= 0:
            raise ValueError("the batch has no token that the loss counts (loss_mask is 0 everywhere)")
        return float(weight)
