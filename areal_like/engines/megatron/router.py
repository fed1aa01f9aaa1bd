"""Megatron-Core's top-k router with the losses and counts of a packed micro-batch.

Three things differ from Megatron-Core 0.19.2's own:

- scale: with `calculate_per_token_loss` it multiplies an auxiliary loss by the number of tokens, because it later
  divides every gradient by that of the global batch. This engine divides the loss itself and rescales no gradient. Here
  a router adds its plain loss, and `moe.MoEOptions` sets the factor (loss scale over the number of micro-batches);
- padding: a packed row ends with padding, and a data-parallel rank with fewer sequences runs micro-batches of nothing
  else. Padding adds neither to a loss nor to a count, also where tensor- and context-parallel ranks hold unequal parts;
- expert bias: Megatron-Core has it for sigmoid scores alone. Here it moves the choice among softmax scores as well
  (arXiv 2408.15664, which tries both); the weights of the chosen experts stay those of the checkpoint.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

__all__ = ["PackedRouter"]


class PackedRouter(TopKRouter):
    """What a router of the model becomes (`become`), after it was built by whichever bridge."""

    counts: Tensor
    """float64 `[experts]`: choices of each expert on this rank since `start_step`."""
    sums: dict[str, Tensor]
    """This rank's part of each loss, without its factor, summed over the micro-batches since `start_step`."""
    seen: Tensor
    """float64 `[experts]`: choices of all ranks by expert since `start_step`; kept for global_aux_loss alone."""

    @classmethod
    def become(cls, router: TopKRouter, *, bias: bool) -> PackedRouter:
        """Change the class of a built router, and give it an expert bias if asked for.

        A class is changed instead of naming it in the layer's specification because each bridge makes its own
        specification.
        """
        router.__class__ = cls
        assert isinstance(router, cls)
        device = router.weight.device
        if bias and router.expert_bias is None:
            router.enable_expert_bias = True
            del router.expert_bias, router.local_tokens_per_expert  # plain None until now
            zeros = torch.zeros(router.num_experts, dtype=torch.float32, device=device)
            router.register_buffer("local_tokens_per_expert", zeros, persistent=False)
            router.register_buffer("expert_bias", zeros.clone())
            if router.score_function == "softmax":
                router.router_replay = _BiasedChoice(router)
        router.start_step()
        return router

    def start_step(self) -> None:
        """Forget what was counted: a new optimizer step begins."""
        device = self.weight.device
        self.counts = torch.zeros(self.num_experts, dtype=torch.float64, device=device)
        self.seen = torch.zeros_like(self.counts)
        self.sums = {}
        if self.local_tokens_per_expert is not None:
            self.local_tokens_per_expert.zero_()  # a step that ended with an error leaves some

    def _apply_expert_bias(self, routing_map: Tensor, padding_mask: Tensor | None = None) -> None:
        """Count choices, as often as a layer runs with gradient: a recomputed one runs twice, first without.

        (Megatron-Core's own takes a mask of another shape than `routing` gives it.)
        """
        if not self.training or not torch.is_grad_enabled():
            return
        chosen = routing_map if padding_mask is None else routing_map & ~padding_mask.reshape(-1, 1)
        choices = chosen.sum(dim=0)
        self.counts += choices
        if self.local_tokens_per_expert is not None:
            self.local_tokens_per_expert += choices

    def apply_z_loss(self, logits: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """Mean over the tokens of the micro-batch of logsumexp(logits)^2 (ST-MoE, arXiv 2202.08906, eq. 5)."""
        coefficient = self.config.moe_z_loss_coeff
        if coefficient is None or not self.training or not torch.is_grad_enabled():
            return logits
        squares = torch.logsumexp(logits.float(), dim=-1).square()
        if padding_mask is not None:
            squares = squares.masked_fill(padding_mask, 0.0)
        valid = squares.numel() if padding_mask is None else (~padding_mask).sum()
        tokens = torch.zeros((), dtype=torch.float64, device=logits.device) + valid
        dist.all_reduce(tokens, group=self.tp_cp_group)
        return self._add(logits, "z_loss", squares.sum() / tokens.clamp(min=1).float(), coefficient)

    def _apply_aux_loss(
        self, probs: Tensor, scores_for_aux_loss: Tensor, routing_map: Tensor, with_padding_mask: bool = False
    ) -> Tensor:
        """E * sum_i f_i P_i over the tokens of the micro-batch (Switch Transformer, arXiv 2101.03961, eq. 4-6).

        f_i: share of the choices that fell on expert i; P_i: mean probability of expert i.
        """
        coefficient = self.get_aux_loss_coeff("aux_loss")
        if coefficient == 0:
            return probs
        choices, tokens = self._choices(routing_map, self.tp_cp_group)
        loss = self._switch_loss(scores_for_aux_loss, choices, tokens)
        return self._add(probs, "load_balancing_loss", loss, coefficient)

    def _apply_global_aux_loss(
        self, probs: Tensor, scores_for_aux_loss: Tensor, routing_map: Tensor, with_padding_mask: bool = False
    ) -> Tensor:
        """The same with f_i of all tokens of the global batch so far (arXiv 2501.11873); P_i of the micro-batch."""
        coefficient = self.get_aux_loss_coeff("global_aux_loss")
        if coefficient == 0:
            return probs
        _, tokens = self._choices(routing_map, self.tp_cp_group)
        self.seen += self._choices(routing_map, self.tp_dp_cp_group)[0]
        loss = self._switch_loss(scores_for_aux_loss, self.seen, tokens)
        return self._add(probs, "global_load_balancing_loss", loss, coefficient)

    def _choices(self, routing_map: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
        """Choices by expert over the ranks of `group`, float64 `[experts]`, and the tokens that made them."""
        choices = routing_map.sum(dim=0).double()
        dist.all_reduce(choices, group=group)
        return choices, choices.sum() / self.topk

    def _switch_loss(self, scores: Tensor, choices: Tensor, tokens: Tensor) -> Tensor:
        """This rank's part: its scores, over the tokens of all ranks of the micro-batch. 0 where there is no token."""
        shares = (choices / choices.sum().clamp(min=1)).float()
        return self.num_experts * (shares * scores.sum(dim=0)).sum() / tokens.clamp(min=1).float()

    def _add(self, carrier: Tensor, name: str, loss: Tensor, coefficient: float) -> Tensor:
        """Note the loss, and let it enter the backward pass where `carrier` does."""
        value = loss.detach().double()
        self.sums[name] = self.sums[name] + value if name in self.sums else value
        return MoEAuxLossAutoScaler.apply(carrier, coefficient * loss)


class _BiasedChoice:
    """Chooses experts by softmax score plus bias. Takes the place of Megatron's record of routing decisions, the one
    point where the choice among softmax scores can be changed from outside."""

    def __init__(self, router: PackedRouter) -> None:
        self.router, self.layer_number = router, router.layer_number

    def get_replay_topk(
        self, scores: Tensor, topk: int, num_groups: int | None, group_topk: int | None, compute_topk: Any
    ) -> tuple[Tensor, Tensor]:
        """`scores` (logits where the softmax comes after the choice) and indices of the chosen, `[tokens, topk]`."""
        with torch.no_grad():
            after_softmax = self.router.config.moe_router_pre_softmax
            chances = scores.float() if after_softmax else torch.softmax(scores, dim=-1, dtype=torch.float32)
            _, indices = compute_topk(chances + self.router.expert_bias, topk, num_groups, group_topk)
        return scores.gather(1, indices), indices
