"""How long a training step takes under a layout, by cause. Arithmetic only; every formula names its source.

A step is one optimizer update over `StepJob.sequences` sequences. All sequences are as long as the longest: the figures
rank layouts, and bound a real step from above.

The constants below turn published peaks into what a step reaches. They are fitted to `benchmarks/results/train_step.md`
(one H200: 45,834 tokens/s of Qwen2.5-1.5B, 19,512 tokens/s of 8 layers of Qwen3-30B-A3B, four micro-batches of 16,384
tokens) and to the profile in the same place; a test holds the model to those figures. The links have not been measured
by this project: `LINK_EFFICIENCY` and `COLLECTIVE_LATENCY` are what collectives usually reach.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from areal_like.preflight.hardware import Hardware
from areal_like.preflight.links import Group, expert_group, groups
from areal_like.preflight.stages import StageTerms, stage_terms
from areal_like.preflight.step_job import Sizes, StepJob
from areal_like.spec import ModelSpec

__all__ = ["Sizes", "StepCost", "StepJob", "balanced_seconds", "least_seconds", "step_cost"]

MATMUL_EFFICIENCY = 0.46
"""Share of the bf16 peak that the operations of a dense model reach over forward and backward pass, element-wise work
included. Fitted: Qwen2.5-1.5B takes 1.430 s a step, 0.06 s of them for gradients and optimizer; 625 TFLOP in the rest
are 456 TFLOP/s of 989.5."""

EXPERT_SECONDS = 0.6e-3
"""Fixed time of one expert on its rank, a layer and micro-batch, forward and backward: six matrix products and their
launches, the gradients' hooks, the permutation. Fitted: 8 layers x 4 micro-batches x 128 experts take 2.45 s more than
their operations at MATMUL_EFFICIENCY. It is why experts are spread over ranks (e) rather than cut (the experts' t). It
depends on the host: a plain loop that reached 132 TFLOP/s of this shape elsewhere would give 0.36 ms."""

MEMORY_EFFICIENCY = 0.43
"""Share of the memory bandwidth that optimizer and gradient accumulation reach. Fitted: they take 5 % of the profiled
step of Qwen2.5-1.5B (0.058 s) for 120 GB."""

LINK_EFFICIENCY = 0.8
"""Share of a link's published one-directional bandwidth that NCCL's large collectives reach."""

COLLECTIVE_LATENCY = 20e-6
"""Seconds that a collective takes however little it sends."""

ACTIVATION = 2
"""Bytes of one activation or parameter: bfloat16."""
GRADIENT = 4
"""Bytes of one gradient as it is kept and reduced (`megatron.ddp.grad_reduce_in_fp32`, the default)."""
ADAM_SHARD = 4 + 3 * 4 + 3 * 4 + 2 + 4
"""Bytes moved for each parameter that a rank updates: gradient, then master copy and both moments read and written,
the bf16 parameter written, and the gradient once more for the norm that is clipped."""
CLEAR = 4
"""Bytes moved for each parameter held: the gradient is set to zero."""
ACCUMULATE = 2 + 4 + 4
"""Bytes moved for each parameter held and each micro-batch: the bf16 gradient is added to the float32 one."""


@dataclass(frozen=True)
class StepCost:
    """Seconds of a step by cause. All but the bubble are those of the slowest stage.

    Attributes:
        compute: matrix products and what goes with them, vocabulary projection included.
        bubble: a stage waits for others.
        tensor: collectives over t, and over the experts' t.
        experts: tokens to the ranks of their experts and back.
        context: keys and values around the ranks of c, as far as attention does not hide it.
        pipeline: activations and their gradients from stage to stage.
        gradients: reduction of gradients, gathering of parameters.
        optimizer: gradient accumulation and the update.
        micro_batches: of each replica.
        flops: of one GPU on average, forward and backward pass once each, as model FLOP utilisation counts.
    """

    compute: float
    bubble: float
    tensor: float
    experts: float
    context: float
    pipeline: float
    gradients: float
    optimizer: float
    micro_batches: int
    flops: float

    @property
    def causes(self) -> dict[str, float]:
        """Seconds by cause."""
        return {field.name: getattr(self, field.name) for field in fields(self)[:8]}

    @property
    def seconds(self) -> float:
        """Of the whole step."""
        return sum(self.causes.values())

    @property
    def shares(self) -> dict[str, float]:
        """Part of the step by cause; they add up to 1."""
        total = self.seconds
        return {cause: seconds / total for cause, seconds in self.causes.items()}

    @property
    def flops_per_second(self) -> float:
        """Model FLOP/s of a GPU."""
        return self.flops / self.seconds


def step_cost(spec: ModelSpec, allocation: Sizes, hardware: Hardware, job: StepJob) -> StepCost:
    """What a step costs under a layout. The layout is taken as legal: `check_layout` says whether it is.

    The time of a pipeline is that of its slowest stage for every micro-batch, plus once that of every other stage,
    divided by v: bubble (p - 1)(t_f + t_b)/v for equal stages (Narayanan et al. 2021, "Efficient Large-Scale Language
    Model Training on GPU Clusters Using Megatron-LM", section 2.2).
    """
    terms = stage_terms(spec, job.sequence_length, allocation.pp, allocation.vpp)
    links = groups(allocation, hardware.gpus_per_node)
    micro_batches, tokens = job.micro_batches(allocation), job.tokens(allocation)
    causes = {stage: _stage(spec, stage, allocation, hardware, job, tokens, links) for stage in set(terms)}
    slowest = max(terms, key=lambda stage: sum(causes[stage]))
    compute, tensor, experts, context, pipeline = (micro_batches * seconds for seconds in causes[slowest])
    flops = 3.0 * (sum(stage.flops for stage in terms) + spec.head_flops()) * job.sequences * job.sequence_length
    return StepCost(
        compute=compute,
        bubble=(sum(sum(causes[stage]) for stage in terms) - sum(causes[slowest])) / allocation.vpp,
        tensor=tensor,
        experts=experts,
        context=context,
        pipeline=pipeline,
        gradients=max(_gradients(spec, stage, allocation, hardware, links) for stage in causes),
        optimizer=max(_optimizer(stage, allocation, hardware, micro_batches) for stage in causes),
        micro_batches=micro_batches,
        flops=flops / (allocation.dp * allocation.tp * allocation.pp * allocation.cp),
    )


def least_seconds(spec: ModelSpec, allocation: Sizes, hardware: Hardware, job: StepJob) -> float:
    """A bound from below on `step_cost(...).seconds`, found faster: compute and all-to-all of the slowest stage."""
    local = job.tokens(allocation) / (allocation.tp * allocation.cp)
    group = expert_group(allocation, hardware.gpus_per_node)
    slowest = max(
        _compute(spec, stage, allocation, hardware, job, local)
        + _experts(spec, stage, hardware, local, _forwards(job), group)
        for stage in set(stage_terms(spec, job.sequence_length, allocation.pp, allocation.vpp))
    )
    return job.micro_batches(allocation) * slowest


def balanced_seconds(spec: ModelSpec, allocation: Sizes, hardware: Hardware, job: StepJob) -> float:
    """A bound from below on `least_seconds(...)` of the layout with any v, found faster: perfectly balanced stages."""
    local = job.tokens(allocation) / (allocation.tp * allocation.cp)
    (whole,) = stage_terms(spec, job.sequence_length, 1, 1)
    seconds = _compute(spec, whole, allocation, hardware, job, local)
    seconds += _experts(spec, whole, hardware, local, _forwards(job), expert_group(allocation, hardware.gpus_per_node))
    return job.micro_batches(allocation) * seconds / allocation.pp


def _stage(
    spec: ModelSpec,
    stage: StageTerms,
    sizes: Sizes,
    hardware: Hardware,
    job: StepJob,
    tokens: float,
    links: dict[str, Group],
) -> tuple[float, float, float, float, float]:
    """Seconds of one micro-batch in one stage: compute, tensor, experts, context, pipeline."""
    forwards = _forwards(job)
    local = tokens / (sizes.tp * sizes.cp)  # tokens of a rank: sequence parallelism cuts what t does not
    return (
        _compute(spec, stage, sizes, hardware, job, local),
        _tensor(spec, stage, sizes, hardware, tokens, forwards, links),
        _experts(spec, stage, hardware, local, forwards, links["ep"]),
        _context(spec, stage, sizes, hardware, job, tokens, forwards, links["cp"]),
        _pipeline(spec, sizes, hardware, job, local, links["pp"]),
    )


def _forwards(job: StepJob) -> int:
    """Times that a layer's forward pass runs."""
    return 1 + job.recompute + job.forward_passes


def _compute(spec: ModelSpec, stage: StageTerms, sizes: Sizes, hardware: Hardware, job: StepJob, local: float) -> float:
    """Operations of one micro-batch, and the launches of the experts on this rank.

    A backward pass has twice the operations of a forward pass; the vocabulary projection is never recomputed.
    """
    passes = _forwards(job) + 2
    head = spec.head_flops() * stage.head * (3 + job.forward_passes)
    seconds = local * (stage.flops * passes + head) / (hardware.flops * MATMUL_EFFICIENCY)
    return seconds + stage.moe_layers * (spec.num_experts / sizes.ep) * EXPERT_SECONDS * passes / 3


def _tensor(
    spec: ModelSpec,
    stage: StageTerms,
    sizes: Sizes,
    hardware: Hardware,
    tokens: float,
    forwards: int,
    links: dict[str, Group],
) -> float:
    """Sequence-parallel collectives.

    Attention and a dense MLP each gather the sequence before and reduce-scatter it after, and the other way round in
    the backward pass (Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models", section
    4.2.2; the second gather of the backward pass overlaps with a product and is not counted). Experts exchange tokens
    instead; cut experts gather and reduce-scatter those tokens. The embedding adds one collective a pass, the
    vocabulary projection another.
    """
    blocks = stage.layers + stage.dense_mlps
    count = (2 * blocks) * (forwards + 1) + 2 * (stage.embedding + stage.head)
    whole = tokens / sizes.cp * spec.hidden_size * ACTIVATION
    seconds = count * _ring(whole, links["tp"], hardware)
    if stage.moe_layers:
        dispatched = tokens / (sizes.tp * sizes.cp) * spec.experts_per_token * spec.hidden_size * ACTIVATION
        count = 2 * stage.moe_layers * (forwards + 1)
        seconds += count * _ring(dispatched * sizes.etp, links["etp"], hardware)
    return seconds


def _experts(
    spec: ModelSpec, stage: StageTerms, hardware: Hardware, local: float, forwards: int, group: Group
) -> float:
    """All-to-all: every token goes to its experts and comes back, in the backward pass likewise.

    A rank sends `tokens x experts a token x hidden` in each (Lepikhin et al. 2020, "GShard"); routing is taken as even.
    What goes to the own node and what leaves it travel side by side.
    """
    if group.size == 1 or not stage.moe_layers:
        return 0.0
    payload = local * spec.experts_per_token * spec.hidden_size * ACTIVATION
    inside = payload * (group.in_node - 1) / group.size / (hardware.node_bandwidth * LINK_EFFICIENCY)
    outside = payload * (group.size - group.in_node) / group.size / (hardware.network_bandwidth * LINK_EFFICIENCY)
    return 2 * stage.moe_layers * (forwards + 1) * (COLLECTIVE_LATENCY + max(inside, outside))


def _context(
    spec: ModelSpec,
    stage: StageTerms,
    sizes: Sizes,
    hardware: Hardware,
    job: StepJob,
    tokens: float,
    forwards: int,
    group: Group,
) -> float:
    """Ring attention: c - 1 times a rank passes on keys and values, in the backward pass their gradients too.

    Attention of what has arrived hides what is sent (Liu et al. 2023, "Ring Attention with Blockwise Transformers");
    the rest counts, and so does starting each exchange.
    """
    if group.size == 1:
        return 0.0
    key_values = 2 * max(1.0, spec.num_key_value_heads / sizes.tp) * spec.head_dim * tokens / sizes.cp * ACTIVATION
    link = hardware.network_bandwidth if group.leaves_node else hardware.node_bandwidth
    sent = (group.size - 1) * key_values / (link * LINK_EFFICIENCY)
    width = spec.head_dim * spec.num_attention_heads
    scores = 2.0 * width * job.sequence_length * tokens / (sizes.tp * sizes.cp)
    attention = scores / (hardware.flops * MATMUL_EFFICIENCY)
    started = (group.size - 1) * COLLECTIVE_LATENCY
    return stage.layers * (forwards + 2) * (started + max(0.0, sent - attention))


def _pipeline(spec: ModelSpec, sizes: Sizes, hardware: Hardware, job: StepJob, local: float, group: Group) -> float:
    """Activations forward and their gradients back, for each stage that the rank holds."""
    if group.size == 1:
        return 0.0
    link = hardware.network_bandwidth if group.leaves_node else hardware.node_bandwidth
    once = COLLECTIVE_LATENCY + local * spec.hidden_size * ACTIVATION / (link * LINK_EFFICIENCY)
    return sizes.vpp * (2 + job.forward_passes) * once


def _gradients(spec: ModelSpec, stage: StageTerms, sizes: Sizes, hardware: Hardware, links: dict[str, Group]) -> float:
    """The distributed optimizer: gradients are reduce-scattered, updated parameters gathered, once a step, not
    overlapped (`overlap_grad_reduce: false`, the default).

    Dense parameters over d and c, experts over their own data-parallel ranks (Rajbhandari et al. 2020, "ZeRO", stage
    1). A tied embedding on two stages is summed over them.
    """
    dense, experts = stage.parameters(sizes)
    seconds = 0.0
    for count, group in ((dense, links["dp-cp"]), (experts, links["edp"])):
        if count:
            seconds += _ring(count * GRADIENT, group, hardware) + _ring(count * ACTIVATION, group, hardware)
    if spec.tied_embeddings and sizes.pp > 1 and (stage.embedding or stage.head):
        link = hardware.network_bandwidth if links["pp"].leaves_node else hardware.node_bandwidth
        seconds += COLLECTIVE_LATENCY
        seconds += spec.vocab_size * spec.hidden_size / sizes.tp * GRADIENT / (link * LINK_EFFICIENCY)
    return seconds


def _optimizer(stage: StageTerms, sizes: Sizes, hardware: Hardware, micro_batches: int) -> float:
    """AdamW on the rank's shard, and the gradients of every micro-batch added up: bytes over memory bandwidth."""
    dense, experts = stage.parameters(sizes)
    expert_replicas = sizes.dp * sizes.cp * sizes.tp // (sizes.ep * sizes.etp)
    shard = dense / (sizes.dp * sizes.cp) + experts / expert_replicas
    moved = shard * ADAM_SHARD + (dense + experts) * (CLEAR + ACCUMULATE * micro_batches)
    return moved / (hardware.memory_bandwidth * MEMORY_EFFICIENCY)


def _ring(whole: float, group: Group, hardware: Hardware) -> float:
    """Seconds of an all-gather or reduce-scatter of `whole` bytes: (n - 1)/n of them pass every rank.

    NCCL's "bus bandwidth" (nccl-tests, PERFORMANCE.md). In a group over several nodes the ring leaves a node through
    the network ports of all its members there.
    """
    if group.size == 1:
        return 0.0
    bandwidth = hardware.node_bandwidth
    if group.leaves_node:
        bandwidth = min(bandwidth, group.in_node * hardware.network_bandwidth)
    return COLLECTIVE_LATENCY + whole * (group.size - 1) / group.size / (bandwidth * LINK_EFFICIENCY)
