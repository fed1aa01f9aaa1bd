"""The output layer that gives log-probabilities instead of logits.

`GPTModel` hands out hidden states; the engine calls its output layer with them and the labels. Without gradient, logits
exist for one chunk of tokens at a time, in one buffer. With gradient they exist once: the backward pass overwrites them
with their gradient, from which two products give those of the hidden states and of the weight.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor
from torch.autograd.function import once_differentiable

from areal_like.engines.megatron.gradients import add_weight_gradient
from areal_like.engines.megatron.log_probs import VocabShard, combine, row_statistics, write_gradient

__all__ = ["LogProbHead", "attach_log_prob_head", "chunk_tokens", "token_log_probs"]

CHUNK_BYTES = 512 * 2**20
"""Most bytes of logits at once where no gradient is needed."""
TILE = 128
"""Rows of a matrix product's tile: chunks are multiples, so that none computes a tile in part."""


class LogProbHead(ColumnParallelLinear):
    """What `GPTModel.output_layer` becomes (`become`), after it was built by whichever bridge."""

    vocab_size: int

    @classmethod
    def become(cls, layer: ColumnParallelLinear, vocab_size: int) -> LogProbHead:
        """Change the class of a built output layer: whatever looks for its parameters finds them where they were.

        Args:
            vocab_size: without padding.

        Raises:
            TypeError: it is another kind of layer, whose product would be left out.
        """
        if type(layer) is not ColumnParallelLinear:
            raise TypeError(f"the output layer is {type(layer).__name__}, not Megatron's ColumnParallelLinear")
        layer.__class__ = cls
        assert isinstance(layer, cls)
        layer.vocab_size = vocab_size
        return layer

    def forward(  # type: ignore[override]
        self,
        input_: Tensor,
        weight: Tensor | None = None,
        runtime_gather_output: bool | None = None,
        *,
        labels: Tensor | None = None,
        temperature: float = 1.0,
        with_entropy: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Without labels the logits, as ever. With them log-probabilities and entropies, see `token_log_probs`.

        Args:
            input_: `[tokens / tp, 1, hidden]` with sequence parallelism, else `[tokens, 1, hidden]`.
            weight: `[padded vocab / tp, hidden]`, where it is the embedding's.
            labels: `[tokens]`.
        """
        if labels is None:
            return super().forward(input_, weight, runtime_gather_output)
        weight = self.weight if weight is None else weight
        assert weight is not None
        hidden = input_.squeeze(1)
        if self.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden, group=self.tp_group)
        else:
            hidden = copy_to_tensor_model_parallel_region(hidden, group=self.tp_group)
        return token_log_probs(
            hidden,
            weight,
            labels,
            group=self.tp_group,
            vocab_size=self.vocab_size,
            temperature=temperature,
            with_entropy=with_entropy,
            accumulate_in_main_grad=self.config.gradient_accumulation_fusion,
        )


def attach_log_prob_head(chunks: list[torch.nn.Module], vocab_size: int) -> None:
    """Let the output layer give log-probabilities, on the rank that has one.

    Args:
        vocab_size: without padding.
    """
    for chunk in chunks:
        model: Any = chunk
        if model.post_process:
            LogProbHead.become(model.output_layer, vocab_size)


def token_log_probs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    group: dist.ProcessGroup,
    vocab_size: int,
    temperature: float = 1.0,
    with_entropy: bool = False,
    accumulate_in_main_grad: bool = False,
    chunk_bytes: int = CHUNK_BYTES,
) -> tuple[Tensor, Tensor | None]:
    """Log-probability of each label, and the entropy of each distribution.

    The gradient with respect to `hidden` is this rank's part: what comes before sums it over the group.

    Args:
        hidden: `[tokens, hidden]`, the same on every rank of the group.
        weight: `[padded_vocab / tp, hidden]`, this rank's rows.
        labels: `[tokens]`, ids in the whole vocabulary.
        group: the tensor-parallel group.
        vocab_size: size without padding; rows beyond it take no part.
        temperature: divides the logits; positive.
        with_entropy: also return the entropy in nats.
        accumulate_in_main_grad: add the weight's gradient to its `main_grad`, if it has one, instead of returning it
            (Megatron's `gradient_accumulation_fusion`).
        chunk_bytes: most bytes of logits at once where no gradient is needed.

    Returns:
        float32 `[tokens]` log-probabilities and float32 `[tokens]` entropies (None unless asked for), the same on every
        rank of the group. A second backward pass through the same graph raises RuntimeError.
    """
    if temperature <= 0:
        raise ValueError(f"temperature must be positive, not {temperature}")
    shard = VocabShard(group, weight.shape[0], vocab_size)
    if torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad):
        log_probs, entropy = _TokenLogProbs.apply(
            hidden, weight, labels, shard, temperature, with_entropy, accumulate_in_main_grad
        )
        return log_probs, entropy if with_entropy else None
    local = torch.empty(4, hidden.shape[0], dtype=torch.float32, device=hidden.device)
    options: dict[str, Any] = {"temperature": temperature, "with_entropy": with_entropy}
    with torch.no_grad():
        rows = min(chunk_tokens(shard.columns * hidden.element_size(), chunk_bytes), max(hidden.shape[0], 1))
        buffer = hidden.new_empty(rows, shard.columns)
        for start in range(0, hidden.shape[0], rows):
            part = slice(start, start + rows)
            logits = buffer[: hidden[part].shape[0]]
            torch.mm(hidden[part], weight.t(), out=logits)
            row_statistics(logits, labels[part], shard, **options, out=local[:, part])
    log_probs, _, entropies = combine(local, group)
    return log_probs, entropies if with_entropy else None


def chunk_tokens(row_bytes: int, chunk_bytes: int = CHUNK_BYTES) -> int:
    """Tokens of a chunk of logits: whole tiles, at least one.

    Args:
        row_bytes: of one token's logits on this rank.
    """
    return max(1, chunk_bytes // row_bytes // TILE) * TILE


class _TokenLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        shard: VocabShard,
        temperature: float,
        with_entropy: bool,
        accumulate_in_main_grad: bool,
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)  # an entropy that is only reported has no gradient, and none is computed
        logits = hidden @ weight.t()
        local = torch.empty(4, hidden.shape[0], dtype=torch.float32, device=hidden.device)
        row_statistics(logits, labels, shard, temperature=temperature, with_entropy=with_entropy, out=local)
        log_probs, log_z, entropy = combine(local, shard.group)
        ctx.save_for_backward(hidden, weight, labels, log_z, entropy)
        # Not saved with the others: they are to be overwritten, and to be let go of as soon as they are used up.
        ctx.logits = logits
        ctx.shard, ctx.temperature = shard, temperature
        fused = accumulate_in_main_grad and ctx.needs_input_grad[1] and hasattr(weight, "main_grad")
        ctx.parameter = weight if fused else None
        return log_probs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_log_probs: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        if ctx.logits is None:
            raise RuntimeError(
                "these log-probabilities have had their backward pass, which wrote the gradient over the logits: "
                "a second one needs another forward pass"
            )
        hidden, weight, labels, log_z, entropy = ctx.saved_tensors
        grad_logits, ctx.logits = ctx.logits, None
        write_gradient(
            grad_logits,
            labels,
            ctx.shard,
            temperature=ctx.temperature,
            log_z=log_z,
            entropy=entropy,
            grad_log_probs=grad_log_probs,
            grad_entropy=grad_entropy,
        )
        grad_hidden = grad_logits @ weight if ctx.needs_input_grad[0] else None
        grad_weight = None
        if ctx.parameter is not None:
            grad_weight = add_weight_gradient(ctx.parameter, grad_logits, hidden)
        elif ctx.needs_input_grad[1]:
            grad_weight = grad_logits.t() @ hidden
        return grad_hidden, grad_weight, None, None, None, None, None
