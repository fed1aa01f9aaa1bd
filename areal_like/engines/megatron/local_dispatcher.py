"""The token dispatcher of ranks that hold all experts of a layer: tokens are sorted by expert and sent nowhere."""

from __future__ import annotations

from typing import Any

from megatron.core.transformer.moe.moe_utils import permute
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from torch import Tensor

__all__ = ["LocalDispatcher"]


class LocalDispatcher(MoEAlltoAllTokenDispatcher):
    """What Megatron-Core's all-to-all dispatcher becomes (`become`) where there is no other rank to send to.

    Megatron-Core's own (0.19.2) then still copies the counts to the host and waits for them in every layer, and moves
    all rows twice more in each direction, to sort by expert what is sorted by expert.
    """

    @classmethod
    def become(cls, dispatcher: Any) -> None:
        """Change the class of a built dispatcher if it has nobody to send to; else leave it alone.

        A class is changed instead of naming it in the layer's specification because Megatron-Core's layer chooses its
        dispatcher itself.
        """
        alone = type(dispatcher) is MoEAlltoAllTokenDispatcher and dispatcher.ep_size * dispatcher.tp_size == 1
        if alone and dispatcher.shared_experts is None and not dispatcher.drop_and_pad:
            dispatcher.__class__ = cls

    def dispatch_preprocess(self, hidden_states: Tensor, routing_map: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """`[tokens, batch, hidden]` to rows `[tokens * topk, hidden]` sorted by expert, and their probabilities."""
        self.hidden_shape = hidden_states.shape
        tokens = hidden_states.view(-1, self.hidden_shape[-1])
        self.hidden_shape_before_permute = tokens.shape
        self.routing_map = routing_map
        self.tokens_per_expert = routing_map.sum(dim=0)
        rows, row_probs, self.reversed_local_input_permutation_mapping, _, _ = permute(
            tokens,
            routing_map,
            probs=probs,
            num_out_tokens=tokens.shape[0] * self.config.moe_router_topk,
            fused=self.config.moe_permute_fusion,
        )
        return rows, row_probs

    def token_dispatch(self, rows: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        return rows, probs

    def dispatch_postprocess(self, rows: Tensor, probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return rows, self.tokens_per_expert, probs

    def combine_preprocess(self, rows: Tensor) -> Tensor:
        return rows

    def token_combine(self, rows: Tensor, async_finish: bool = True, allocate_on_comm_stream: bool = True) -> Tensor:
        return rows

    def combine_postprocess(self, rows: Tensor) -> Tensor:
        output = super().combine_postprocess(rows)
        # Autograd keeps of them what it needs; here they would stay until the layer's next pass.
        del self.routing_map, self.reversed_local_input_permutation_mapping
        return output
