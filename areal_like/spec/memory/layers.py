"""What a layer keeps for its backward pass, and what its passes need for a moment.

With TransformerEngine layers, bytes of one layer for a micro-batch of T tokens on a rank (b bytes an element, h hidden,
a heads and g key-value heads of width n, f the MLP's or m an expert's width, E experts of which k a token; S = T/t the
rows of sequence parallelism; T is the rank's share, the micro-batch over c):

    input of the layer, output of its norm          2 S h b + 4 S     the norm and the projection keep them; 4: 1/rms
    queries, keys before their norms (qk_norm)      T (a+g) n b/t + 4 T (a+g)/t      a norm keeps a contiguous input
    queries, keys (rotated), values                 T (a+2g) n b/t    attention; rotary positions keep angles only
    output of attention                             T a n b/t         also the input of the output projection
    log-sum-exp                                     4 T a/t           gone when core_attn is recomputed
    residual, output of the norm before the MLP     2 S h b + 4 S
    dense: gate and up; their product               3 T f b/t         SwiGLU and the down projection keep their inputs
    MoE:   rows of experts                          R h b             R = S k etp x imbalance: rows that arrive here
           gate and up; their product               3 R m b/etp
           routing                                  S (13 E + 4 + 12 k) + 12 R;  on a rank that holds all experts
                                                    S (8 E + 4 + 12 k) + 4 R

Routing: probabilities [S, E] float32 and the map [S, E] bool, the row map [S, 2E+1] int32 of the permutation, chosen
experts int64 and their softmax float32 (12 k); of each row its probability and two positions (12). The three tables
hang on the dispatcher, so they stay after the pass (`routing_tables`). `local_dispatcher`, where a rank holds all
experts, lets go of them, and has no second sorting, whose two positions those are.

Derived from the `save_for_backward` of this engine's kernels (`kernels.rms_norm`, `kernels.swiglu`), TransformerEngine
2.11 (`linear`, `FusedAttnFunc`, `grouped_linear`, `permutation`) and Megatron-Core 0.19 (`router`, `token_dispatcher`).
Dropout is off: nothing is kept for it. Compare Korthikanti et al., arXiv 2205.05198, section 4, for earlier layers.

FP8 (`job.fp8`): what enters a product is kept in FP8, one byte an element: outputs of norms (not of the one before a
router, which reads it too), rows of experts, the product of gate and up, and once more the output of attention, which
attention keeps for itself. Adapters keep the [T, rank] between A and B.

Context parallelism: TransformerEngine's ring keeps what this rank holds and, while it runs, two buffers of keys and
values and the outputs of each of the c steps. (Reckoned from how ring attention works; not checked.)

FlexAttention keeps the same four tensors and the log-sum-exp, of rows padded to `flex_length(T)`.

For families that no engine here trains this is an estimate: latent attention keeps its latents too, shared experts are
a dense MLP beside the experts, linear attention counts as if it were attention.
"""

from __future__ import annotations

from dataclasses import dataclass

from areal_like.alloc import ModelAllocation
from areal_like.spec.attention import choose_attention, flex_length
from areal_like.spec.lora import adapter_matrices
from areal_like.spec.memory.job import MemoryJob
from areal_like.spec.model import ModelSpec

__all__ = ["IMBALANCE", "LayerMemory", "layer_kinds", "layer_memory"]

IMBALANCE = 1.25
"""Rows of the busiest expert rank over the mean where experts are spread: an assumption, not a measurement."""


@dataclass(frozen=True)
class LayerMemory:
    """Bytes of one layer on one rank for one micro-batch.

    Attributes:
        saved: kept until the backward pass, by what it is.
        recomputed: of that, what selective recompute does not keep.
        boundary: the layer's input, all that full recompute keeps.
        forward: beyond its input, at the most, while a forward pass without gradients runs.
        backward: beyond what was saved, at the most, while the backward pass runs.
        routing_tables: what the dispatcher of a MoE layer keeps after a pass.
    """

    saved: dict[str, int]
    recomputed: int
    boundary: int
    forward: int
    backward: int
    routing_tables: int

    @property
    def total(self) -> int:
        return sum(self.saved.values())

    @property
    def kept(self) -> int:
        """Bytes until the backward pass, with selective recompute as it is asked for."""
        return self.total - self.recomputed


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


def layer_kinds(spec: ModelSpec, allocation: ModelAllocation, job: MemoryJob) -> dict[bool, LayerMemory]:
    """The layers that differ in memory, by whether they have experts."""
    kinds = {True, False} if spec.is_moe and spec.dense_layers else {spec.is_moe}
    return {experts: layer_memory(spec, allocation, job, experts=experts) for experts in kinds}


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
    attended = _attended(spec, allocation, job, tokens)
    product = 1 if job.fp8 else job.element  # bytes of what enters a product
    normed, output = s.row // job.element * product, s.queries if spec.latent_attention is None else s.values
    saved = {
        "input and its norm": s.row + normed + 4 * local,
        "queries, keys, values": (s.queries + s.keys + s.values) // tokens * attended,
        "attention output": output // tokens * attended + (output // job.element if job.fp8 else 0),
        "log-sum-exp": 4 * attended * heads,
        "residual": s.row,
        "norm before the MLP": (s.row if experts else normed) + 4 * local,
    }
    if spec.latent_attention is not None:
        latent = spec.latent_attention
        width = latent.q_lora_rank + latent.kv_lora_rank + latent.qk_rope_head_dim
        saved["latents and their norms"] = 2 * local * width * job.element
    if spec.qk_norm:
        saved["queries, keys before their norms"] = s.queries + s.keys + 4 * tokens * (heads + groups)
    if job.lora is not None:
        targets = adapter_matrices(spec, job.lora.targets, layers=(spec.typical_layer,))
        plain = sum(matrix.expert is None for matrix in targets)
        each = len({matrix.target for matrix in targets if matrix.expert is not None})  # of an expert
        rank = job.lora.rank * job.lora.element
        saved["between A and B"] = tokens * rank * plain + s.rows * rank * each
    tables = 0
    if experts:
        row_map, places = local * 4 * (2 * spec.num_experts + 1), 4 * s.rows
        if not _alone(allocation):
            tables, places = row_map + local * 5 * spec.num_experts, 12 * s.rows
        saved["rows of experts"] = s.expert_row // job.element * product
        saved["gate and up"] = 2 * (s.expert_wide + s.wide)
        saved["their product"] = s.expert_wide // job.element * product + s.wide // job.element * product
        saved["routing"] = max(tables, row_map) + local * 12 * spec.experts_per_token + places
    else:
        saved["gate and up"] = 2 * s.wide
        saved["their product"] = s.wide // job.element * product
    again = _recomputed(job, s, saved, tables, experts=experts) if job.recompute == "selective" else 0
    ring = allocation.cp * s.queries + 2 * (s.keys + s.values) if allocation.cp > 1 else 0
    padding = saved["queries, keys, values"] if attended > tokens else 0  # copies of what the layer has unpadded
    forward = _forward(spec, allocation, job, s, ring + padding)
    return LayerMemory(saved, again, s.row, forward, _backward(spec, allocation, job, s), tables)


def _alone(allocation: ModelAllocation) -> bool:
    """Every rank holds all experts whole: rows are sorted and go nowhere."""
    return allocation.ep * allocation.etp == 1


def _attended(spec: ModelSpec, allocation: ModelAllocation, job: MemoryJob, tokens: int) -> int:
    """Rows that the attention keeps."""
    if not job.transformer_engine:
        return tokens
    chosen = choose_attention(
        job.attention_backend,
        deterministic=job.deterministic,
        cp=allocation.cp,
        dropout=spec.attention_dropout > 0,
        float32=job.dtype == "float32",
    )
    return flex_length(tokens) if chosen == "flex" else tokens


def _recomputed(job: MemoryJob, s: _Sizes, saved: dict[str, int], tables: int, *, experts: bool) -> int:
    """What the parts in `recompute_modules` do not keep (Megatron-Core 0.19 `TransformerLayer`, `MoELayer`,
    `TEGroupedMLP`)."""
    parts, left_out = set(job.recompute_modules), {"log-sum-exp"} if "core_attn" in job.recompute_modules else set()
    if not experts and "mlp" in parts:
        left_out |= {"norm before the MLP", "gate and up", "their product"}
    if experts and "moe" in parts:
        left_out |= {"rows of experts", "gate and up", "their product", "routing", "between A and B"} & saved.keys()
    if "layernorm" in parts:
        left_out |= {"norm before the MLP"}
    bytes_ = sum(saved[name] for name in left_out) - (tables if "routing" in left_out else 0)
    bytes_ += saved["input and its norm"] - s.row if "layernorm" in parts else 0
    if experts and "moe" not in parts:
        bytes_ += s.expert_wide // job.element * (1 if job.fp8 else job.element) if "moe_act" in parts else 0
        bytes_ += 3 * s.wide if "shared_experts" in parts else 0
    return bytes_


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


def _expert_rows(spec: ModelSpec, allocation: ModelAllocation, job: MemoryJob, local: int) -> int:
    """Rows that the experts of the busiest rank work on."""
    spread = IMBALANCE if allocation.ep > 1 else 1.0
    factor = spread if job.imbalance is None else job.imbalance
    return int(local * spec.experts_per_token * allocation.etp * factor)


def _rotated_in_one_pass(spec: ModelSpec, allocation: ModelAllocation, job: MemoryJob) -> bool:
    """As `engines.megatron.rotary` decides it."""
    plain = spec.latent_attention is None and not spec.qk_norm and not spec.attention_output_gate
    return job.transformer_engine and plain and spec.num_key_value_heads >= allocation.tp


def _forward(spec: ModelSpec, allocation: ModelAllocation, job: MemoryJob, s: _Sizes, ring: int) -> int:
    """Whichever is more: attention (fused QKV, its parts, and `ring`; where the parts are not rotated on their way out,
    the rotated parts too), or the MLP.

    Args:
        ring: what else attention needs: the ring of c, or copies with padding.
    """
    copies = 2 if _rotated_in_one_pass(spec, allocation, job) else 3
    attention = s.row + s.whole + copies * s.queries + 2 * s.keys + 2 * s.values + ring
    # Residual and norm; dense or shared gate, up and product; rows sent, rows sorted, gate, up and product of experts.
    rows = 2 * s.expert_row + 3 * s.expert_wide
    if job.grouped_products and _alone(allocation):  # sent nowhere; gate and up are gone when the output is there
        rows = s.expert_row + max(3 * s.expert_wide, s.expert_wide + s.expert_row)
    return max(attention, 2 * s.row + s.whole + 3 * s.wide + rows)


def _backward(spec: ModelSpec, allocation: ModelAllocation, job: MemoryJob, s: _Sizes) -> int:
    """The most of: rows on their way back to the experts; gradients of the down projection's input and of its weight;
    gradient of gate and up. What a step has consumed is freed: the product when its gradient is there. A weight whose
    gradient goes straight into the buffer (`job.fuses_gradients`) has none beside it; grouped products (`experts`) do,
    and have it before the gradient of their input, not beside it.
    """
    b, hidden = job.element, spec.hidden_size
    if not s.rows:
        down = 0 if job.fuses_gradients else spec.intermediate_size // allocation.tp * hidden * b
        return s.row + s.whole + max(s.wide + down, 2 * s.wide)
    down = spec.num_experts // allocation.ep * (spec.moe_intermediate_size // allocation.etp) * hidden * b
    unsorted = s.expert_row if _alone(allocation) else 2 * s.expert_row
    if not job.grouped_products:
        down = 0 if job.fuses_gradients else down
        return s.row + max(unsorted, s.expert_row + s.expert_wide + down, s.expert_row + 2 * s.expert_wide)
    output = s.expert_row + max(down, s.expert_wide)  # gradients of the output, and of the down projection
    activation = 2 * s.expert_wide
    if job.recompute == "selective" and "moe_act" in job.recompute_modules:  # one step with the down projection
        activation = s.expert_row + 3 * s.expert_wide
    inputs = max(2 * down, s.expert_row) - s.expert_wide  # the activation's input and output are gone
    return s.row + max(unsorted, output, activation, inputs)
