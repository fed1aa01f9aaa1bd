"""What a layer keeps for its backward pass, and what its passes need for a moment.

With TransformerEngine layers, bytes of one layer for a micro-batch of T tokens on a rank (b bytes an element, h hidden,
a heads and g key-value heads of width n, f the MLP's or m an expert's width, E experts of which k a token; S = T/t the
rows of sequence parallelism):

    input of the layer, output of its norm          2 S h b + 4 S     `LayerNormLinear` keeps both; 4: 1/rms
    queries, keys before their norms (qk_norm)      T (a+g) n b/t + 4 T (a+g)/t      `RMSNorm` keeps a contiguous input
    queries, keys (rotated), values                 T (a+2g) n b/t    attention; rotary positions keep angles only
    output of attention                             T a n b/t         also the input of the output projection
    log-sum-exp                                     4 T a/t           gone with selective recompute
    residual, output of the norm before the MLP     2 S h b + 4 S
    dense: gate and up; their product               3 T f b/t         SwiGLU and the down projection keep their inputs
    MoE:   rows of experts                          R h b             R = S k etp x imbalance: rows that arrive here
           gate and up; their product               3 R m b/etp
           routing                                  S (13 E + 4 + 12 k) + 12 R

Routing: probabilities [S, E] float32 and the map [S, E] bool, the row map [S, 2E+1] int32 of the permutation, chosen
experts int64 and their softmax float32 (12 k); of each row its probability and two positions (12). The three tables
hang on the dispatcher, so they stay after the pass (`routing_tables`).

Derived from the `save_for_backward` of TransformerEngine 2.11 (`layernorm_linear`, `rmsnorm`, `FusedAttnFunc`,
`grouped_linear`, `permutation`) and Megatron-Core 0.19 (`fused_bias_swiglu`, `router`, `token_dispatcher`). Dropout is
off: nothing is kept for it. Compare Korthikanti et al., arXiv 2205.05198, section 4, for layers of an earlier kind.

For families that no engine here trains this is an estimate: latent attention keeps its latents too, shared experts are
a dense MLP beside the experts, linear attention counts as if it were attention.

Recompute. "full" keeps the input of each group of layers, and for the group at work all of the above. "selective"
recomputes attention, of which fused kernels keep only the log-sum-exp beyond what is kept anyway.

Pipeline. Under 1F1B stage i of p has min(p - i, micro-batches) forward passes whose backward is to come, and keeps the
output of each beside its activations (Megatron's `deallocate_pipeline_outputs` is off). Interleaved (v > 1):
min(2 (p - i - 1) + (v - 1) p + 1, v x micro-batches) passes of one virtual stage each (arXiv 2104.04473, section 2.2).
"""

from __future__ import annotations

from dataclasses import dataclass

from areal_like.alloc import ModelAllocation
from areal_like.spec.memory.job import MemoryJob
from areal_like.spec.model import ModelSpec
from areal_like.spec.shards import RankClass

__all__ = [
    "IMBALANCE",
    "LayerMemory",
    "StageMemory",
    "in_flight",
    "kept",
    "layer_kinds",
    "layer_memory",
    "stage_memory",
]

IMBALANCE = 1.25
"""Rows of the busiest expert rank over the mean where experts are spread: an assumption, not a measurement."""


@dataclass(frozen=True)
class LayerMemory:
    """Bytes of one layer on one rank for one micro-batch.

    Attributes:
        saved: kept until the backward pass, by what it is.
        boundary: the layer's input, all that full recompute keeps.
        forward: beyond its input, at the most, while a forward pass without gradients runs.
        backward: beyond what was saved, at the most, while the backward pass runs.
        routing_tables: what the dispatcher of a MoE layer keeps after a pass.
    """

    saved: dict[str, int]
    boundary: int
    forward: int
    backward: int
    routing_tables: int

    @property
    def total(self) -> int:
        return sum(self.saved.values())


@dataclass(frozen=True)
class StageMemory:
    """Bytes of all layers of a (virtual) stage for one micro-batch; the attributes are those of `LayerMemory`.

    Attributes:
        saved: of all layers together.
        group: of the `recompute_layers` layers that keep most.
        boundary: one layer's input.
        inputs: what full recompute keeps of all layers.
    """

    saved: int
    group: int
    boundary: int
    inputs: int
    forward: int
    backward: int
    routing_tables: int


@dataclass(frozen=True)
class _Sizes:
    """Bytes of the tensors that the formulas are made of; `rows` is a count."""

    row: int
    whole: int
    queries: int
    keys: int
    values: int
    wide: int
    rows: int
    expert_row: int
    expert_wide: int


def stage_memory(spec: ModelSpec, job: MemoryJob, ranks: RankClass, kinds: dict[bool, LayerMemory]) -> StageMemory:
    """The layers of one rank, or where v > 1 of the virtual stage that keeps most.

    Args:
        kinds: a layer with experts and one without, as far as the model has them (`layer_kinds`).
    """
    return max((_chunk(spec, job, layers, kinds) for layers in ranks.layers), key=lambda chunk: chunk.saved)


def layer_kinds(spec: ModelSpec, allocation: ModelAllocation, job: MemoryJob) -> dict[bool, LayerMemory]:
    """The layers that differ in memory, by whether they have experts."""
    kinds = {True, False} if spec.is_moe and spec.dense_layers else {spec.is_moe}
    return {experts: layer_memory(spec, allocation, job, experts=experts) for experts in kinds}


def _chunk(spec: ModelSpec, job: MemoryJob, layers: range, kinds: dict[bool, LayerMemory]) -> StageMemory:
    dense = sum(layer in layers for layer in spec.dense_layers) if spec.is_moe else len(layers)
    counts = ((len(layers) - dense, True), (dense, False))
    present = [(n, kinds[experts]) for n, experts in counts if n]
    boundary = present[0][1].boundary
    return StageMemory(
        saved=sum(n * layer.total for n, layer in present),
        group=min(job.recompute_layers, len(layers)) * max(layer.total for _, layer in present),
        boundary=boundary,
        inputs=-(-len(layers) // job.recompute_layers) * boundary,
        forward=max(layer.forward for _, layer in present),
        backward=max(layer.backward for _, layer in present),
        routing_tables=sum(n * layer.routing_tables for n, layer in present),
    )


def layer_memory(spec: ModelSpec, allocation: ModelAllocation, job: MemoryJob, *, experts: bool) -> LayerMemory:
    """One transformer layer on one rank, for a micro-batch of `job.micro_tokens` (divided over c).

    Args:
        experts: the layer has routed experts, not a dense MLP.
    """
    tp = allocation.tp
    tokens = -(-job.micro_tokens // allocation.cp)
    local = -(-tokens // tp)
    heads = -(-spec.num_attention_heads // tp)
    groups = -(-spec.num_key_value_heads // tp)
    s = _sizes(spec, allocation, job, tokens, local, experts=experts)
    saved = {
        "input and its norm": 2 * s.row + 4 * local,
        "queries, keys, values": s.queries + s.keys + s.values,
        "attention output": s.queries if spec.latent_attention is None else s.values,
        "residual and its norm": 2 * s.row + 4 * local,
    }
    if spec.latent_attention is not None:
        latent = spec.latent_attention
        width = latent.q_lora_rank + latent.kv_lora_rank + latent.qk_rope_head_dim
        saved["latents and their norms"] = 2 * local * width * job.element
    if spec.qk_norm:
        saved["queries, keys before their norms"] = s.queries + s.keys + 4 * tokens * (heads + groups)
    if job.recompute != "selective":
        saved["log-sum-exp"] = 4 * tokens * heads
    tables = 0
    if experts:
        tables = local * (5 * spec.num_experts + 4 * (2 * spec.num_experts + 1))
        saved["rows of experts"] = s.expert_row
        saved["gate, up and product"] = 3 * (s.expert_wide + s.wide)
        saved["routing"] = tables + local * 12 * spec.experts_per_token + 12 * s.rows
    else:
        saved["gate, up and product"] = 3 * s.wide
    return LayerMemory(saved, s.row, _forward(s), _backward(spec, allocation, job, s), tables)


def _sizes(
    spec: ModelSpec, allocation: ModelAllocation, job: MemoryJob, tokens: int, local: int, *, experts: bool
) -> _Sizes:
    tp, b = allocation.tp, job.element
    heads = tokens * -(-spec.num_attention_heads // tp) * b
    groups = heads if spec.latent_attention else tokens * -(-spec.num_key_value_heads // tp) * b
    value_width = spec.latent_attention.v_head_dim if spec.latent_attention else spec.head_dim
    width = spec.shared_expert_intermediate_size if experts else spec.intermediate_size
    rows = _expert_rows(spec, allocation, job, local) if experts else 0
    return _Sizes(
        row=local * spec.hidden_size * b,
        whole=tokens * spec.hidden_size * b if tp > 1 else 0,
        queries=heads * spec.head_dim,
        keys=groups * spec.head_dim,
        values=groups * value_width,
        wide=tokens * width // tp * b,
        rows=rows,
        expert_row=rows * spec.hidden_size * b,
        expert_wide=rows * spec.moe_intermediate_size // allocation.etp * b,
    )


def in_flight(allocation: ModelAllocation, stage: int, micro_batches: int) -> int:
    """Forward passes of a (virtual) stage that wait for their backward pass, at the most."""
    pp, vpp = allocation.pp, allocation.vpp
    if vpp == 1:
        return min(pp - stage, micro_batches)
    return min(2 * (pp - stage - 1) + (vpp - 1) * pp + 1, vpp * micro_batches)


def kept(stage: StageMemory, allocation: ModelAllocation, job: MemoryJob, rank_stage: int) -> int:
    """Bytes of the activations of all passes in flight; a group that is being recomputed comes on top."""
    passes = in_flight(allocation, rank_stage, job.micro_batches)
    is_last = rank_stage == allocation.pp - 1 and allocation.vpp == 1
    outputs = 0 if is_last else passes * stage.boundary
    return passes * (stage.inputs if job.recompute == "full" else stage.saved) + outputs


def _expert_rows(spec: ModelSpec, allocation: ModelAllocation, job: MemoryJob, local: int) -> int:
    """Rows that the experts of the busiest rank work on."""
    spread = IMBALANCE if allocation.ep > 1 else 1.0
    factor = spread if job.imbalance is None else job.imbalance
    return int(local * spec.experts_per_token * allocation.etp * factor)


def _forward(s: _Sizes) -> int:
    """Whichever is more: attention (fused QKV, its parts, the rotated parts), or the MLP."""
    attention = s.row + s.whole + 3 * s.queries + 2 * s.keys + 2 * s.values
    # Residual and norm; dense or shared gate, up and product; rows sent, rows sorted, gate, up and product of experts.
    mlp = 2 * s.row + s.whole + 3 * s.wide + 2 * s.expert_row + 3 * s.expert_wide
    return max(attention, mlp)


def _backward(spec: ModelSpec, allocation: ModelAllocation, job: MemoryJob, s: _Sizes) -> int:
    """The most of: rows on their way back to the experts; gradients of the down projection's input and of its weight;
    gradient of gate and up. What a step has consumed is freed: the product when its gradient is there.
    """
    b, hidden = job.element, spec.hidden_size
    if not s.rows:
        down = spec.intermediate_size // allocation.tp * hidden * b
        return s.row + s.whole + max(s.wide + down, 2 * s.wide)
    down = spec.num_experts // allocation.ep * (spec.moe_intermediate_size // allocation.etp) * hidden * b
    unsorted = 2 * s.expert_row
    return s.row + max(unsorted, s.expert_row + s.expert_wide + down, s.expert_row + 2 * s.expert_wide)
