"""One SGD step of Transformers' Qwen3-MoE in float64, with the auxiliary losses written from their formulas, and the
comparison of an engine's step with it."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from areal_like.alloc import ModelAllocation

LENGTHS = [90, 5, 17, 2, 31, 44, 8]
SGD = {"type": "sgd", "lr": 0.5, "weight_decay": 0.0, "gradient_clipping": 0.0}
"""A step whose change of the weights is the gradient."""

Sequences = list[tuple[Tensor, Tensor]]
"""Token ids and loss mask of each sequence."""


@dataclass
class Step:
    """What a step of the reference found.

    Attributes:
        counts: `[layers, experts]`, how often each expert was chosen.
    """

    figures: dict[str, float]
    weights: dict[str, Tensor]
    counts: Tensor


class Reference:
    """`expert_bias`: `[layers, experts]`, added to the softmax scores for the choice of experts alone."""

    def __init__(self, folder: Path, expert_bias: Tensor | None = None) -> None:
        self.model: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float64, experts_implementation="eager"
        )
        self.topk = self.model.config.num_experts_per_tok
        self.experts = self.model.config.num_experts
        self.router_logits: list[list[Tensor]] = []
        self.choices: list[list[Tensor]] = []
        for number, layer in enumerate(self.model.model.layers):
            self.router_logits.append([])
            self.choices.append([])
            bias = torch.zeros(self.experts) if expert_bias is None else expert_bias[number]
            layer.mlp.gate.forward = self._gate(layer.mlp.gate, number, bias.double())

    def _gate(self, gate: Any, number: int, bias: Tensor) -> Any:
        def forward(hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            logits = hidden.reshape(-1, hidden.shape[-1]) @ gate.weight.T
            probs = logits.softmax(-1)
            indices = (probs + bias).topk(self.topk, dim=-1).indices
            chosen = probs.gather(1, indices)
            self.router_logits[number].append(logits)
            self.choices[number].append(indices)
            return logits, chosen / chosen.sum(-1, keepdim=True), indices

        return forward

    def step(
        self,
        micro_batches: Sequence[Sequence[Sequences]],
        *,
        lr: float,
        aux: float = 0.0,
        global_aux: float = 0.0,
        z: float = 0.0,
    ) -> Step:
        """`micro_batches`: in the order of the passes, those of all data-parallel ranks that run at the same time."""
        weight = sum(float(mask.sum()) for together in micro_batches for rows in together for _, mask in rows)
        number = sum(bool(rows) for together in micro_batches for rows in together)
        layers = range(len(self.router_logits))
        figures = dict.fromkeys(("loss", "load_balancing_loss", "global_load_balancing_loss", "z_loss"), 0.0)
        counts = torch.zeros(len(layers), self.experts, dtype=torch.float64)
        seen = torch.zeros_like(counts)
        total: Any = 0.0
        for together in micro_batches:
            passes = [self._pass(rows, weight) for rows in together if rows]
            for layer in layers:
                for _, logits, choices in passes:
                    counts[layer] += self._by_expert(choices[layer])
                    seen[layer] += self._by_expert(logits[layer].topk(self.topk, dim=-1).indices)
            for loss, logits, _ in passes:
                total = total + loss
                figures["loss"] += float(loss.detach())
                for layer in layers:
                    probs = logits[layer].softmax(-1)
                    routed = self._by_expert(probs.topk(self.topk, dim=-1).indices)
                    balance = self.experts * (routed / (self.topk * len(probs)) * probs.mean(0)).sum()
                    everywhere = self.experts * (seen[layer] / seen[layer].sum() * probs.mean(0)).sum()
                    square = logits[layer].logsumexp(-1).square().mean()
                    total = total + (aux * balance + global_aux * everywhere + z * square) / number
                    names = ("load_balancing_loss", "global_load_balancing_loss", "z_loss")
                    for name, value in zip(names, (balance, everywhere, square), strict=True):
                        figures[name] += float(value.detach()) / number / len(layers)
        self.model.zero_grad()
        total.backward()
        with torch.no_grad():
            for parameter in self.model.parameters():
                if parameter.grad is not None:
                    parameter -= lr * parameter.grad
        figures["busiest_expert"] = float((counts.max(1).values / counts.mean(1)).mean())
        return Step(figures, self._weights(), counts)

    def _pass(self, rows: Sequences, weight: float) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """The loss of a micro-batch; by layer its router logits and its choices."""
        for record in (*self.router_logits, *self.choices):
            record.clear()
        loss = torch.zeros((), dtype=torch.float64)
        for ids, mask in rows:
            log_probs = self.model(ids[None], use_cache=False).logits[0, :-1].log_softmax(-1)
            loss = loss - (log_probs.gather(1, ids[1:, None])[:, 0] * mask[1:].double()).sum() / weight
        return loss, [torch.cat(x) for x in self.router_logits], [torch.cat(x) for x in self.choices]

    def _by_expert(self, indices: Tensor) -> Tensor:
        return torch.nn.functional.one_hot(indices, self.experts).double().sum(dim=(0, 1))

    def _weights(self) -> dict[str, Tensor]:
        with tempfile.TemporaryDirectory() as folder:
            self.model.save_pretrained(folder)
            return {k: v for file in Path(folder).glob("*.safetensors") for k, v in load_file(file).items()}


def build(request, text, folder, megatron, **options):
    size = ModelAllocation.parse(text).world_size
    ranks = request.getfixturevalue({1: "solo", 2: "pair", 4: "quad"}[size])
    return ranks.build(text, folder, optimizer=SGD, megatron=megatron, **options)


def micro_batches(ranks, batch, helpers):
    """Sequences of the micro-batches in the order in which they run, those of all data-parallel ranks together."""
    dispatch = helpers.scatter(batch, ranks.mesh)
    parts = ranks.group.call_each("micro_batch_counts", [(shard,) for shard in dispatch.shards])
    per_rank = []
    for source in dispatch.sources:
        shard = dispatch.shards[source]
        rows = list(
            zip(shard.split_tokens(shard.input_ids), shard.split_tokens(shard.tokens["loss_mask"]), strict=True)
        )
        per_rank.append([[rows[i] for i in indices] for indices in parts[source]])
    return list(zip(*per_rank, strict=True))


def assert_step(ranks, helpers, reference, batch, tolerance=2e-5, **factors):
    """One step of both; what the reference found, and the names of the figures that were compared."""
    expected = reference.step(micro_batches(ranks, batch, helpers), lr=SGD["lr"], **factors)
    figures = ranks.train(batch)
    assert figures["loss"] == pytest.approx(expected.figures["loss"], rel=1e-5)
    reported = {name.removeprefix("moe/"): value for name, value in figures.items() if name.startswith("moe/")}
    for name, value in reported.items():
        assert value == pytest.approx(expected.figures[name], rel=1e-5), name
    ours = ranks.weights()
    assert ours.keys() == expected.weights.keys()
    worst = max((float((ours[n].double() - w).abs().max()), n) for n, w in expected.weights.items())
    assert worst[0] < tolerance, worst
    return expected, set(reported)
