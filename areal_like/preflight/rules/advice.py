"""AL7: layouts that work and waste; each finding names the cheaper one."""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil, prod

from areal_like.alloc import AllocationError, ModelAllocation
from areal_like.preflight.enumeration import CONTEXT_PIECE
from areal_like.preflight.job import GIB, Job, Role
from areal_like.preflight.legality import is_legal
from areal_like.preflight.registry import Finding, example, rule
from areal_like.preflight.rules.batches import answers_an_update, full_groups, longest_sequence, room

BUBBLE = 0.25
"""Share of idle time of a pipeline above which it is worth a word."""
BYTES_A_PARAMETER = 18
"""Mixed-precision Adam without sharding: weight 2, gradient 4, master weight and two moments 12."""
SMALL = 0.4
"""Share of a GPU that a model with its optimizer may take to count as small: the rest is for activations."""


@rule(
    "AL701",
    summary="the pipeline is idle for much of the time",
    why="With m micro-batches p stages are idle for (p - 1) / (v m + p - 1) of a step. The number of micro-batches"
    " follows from the answers of an update and the token budget; here all answers are as long as they may be, so it is"
    " never more.",
    bad=example("actor.backend=megatron:p4", "actor.mb_spec.max_tokens_per_mb=65536"),
    good=example("actor.backend=megatron:p4", "actor.mb_spec.max_tokens_per_mb=8192"),
    severity="warning",
)
def bubble(job: Job) -> Iterator[Finding]:
    actor = job.role("actor")
    if actor is None or job.config is None or actor.allocation.pp == 1:
        return
    stages, count = actor.allocation.pp, full_groups(actor, _micro_batches(job, actor))
    idle = (stages - 1) / (count * actor.allocation.vpp + stages - 1)
    if idle > BUBBLE:
        message = f"p{stages} with at most {count} micro-batches is idle for {idle:.0%} of the time"
        other = _other(actor, pipeline_parallel_size=1, virtual_pipeline_parallel_size=1)
        hint = "lower mb_spec.max_tokens_per_mb or p" + (f", for example {other} if it fits" if other else "")
        yield Finding(message, hint, "p", role=actor)


@rule(
    "AL702",
    summary="a small model is cut by t or p",
    why="A model that fits on one GPU with its optimizer is faster as replicas: t adds activations over its ranks in"
    " every layer, and p waits for its stages.",
    bad=example("actor.backend=megatron:t4"),
    good=example("actor.backend=megatron:d4"),
    severity="warning",
)
def small_model(job: Job) -> Iterator[Finding]:
    actor = job.role("actor")
    if actor is None or actor.spec is None or not job.on_gpus or actor.allocation.world_size > job.cluster.gpus:
        return
    needed = BYTES_A_PARAMETER * actor.spec.parameters()
    cut = actor.allocation.tp * actor.allocation.pp
    if cut > 1 and actor.allocation.ep == 1 and needed < SMALL * job.cluster.gpu_memory_bytes:
        changes = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1, "virtual_pipeline_parallel_size": 1}
        other = _other(actor, **changes)
        memory = job.cluster.gpu_memory_bytes / GIB
        message = f"weights, gradients and optimizer take {needed / GIB:.0f} GiB of the {memory:.0f} GiB of one GPU"
        letters = "".join(letter for letter, n in (("t", actor.allocation.tp), ("p", actor.allocation.pp)) if n > 1)
        yield Finding(message, f"use {other}" if other else "use d", letters, role=actor)


@rule(
    "AL703",
    summary="c cuts short sequences",
    why="The ranks of c exchange keys and values in every layer. That pays only when each holds some thousands of"
    " tokens of a sequence.",
    bad=example("actor.backend=megatron:c4"),
    good=example("actor.backend=megatron:d4"),
    severity="warning",
)
def short_sequences(job: Job) -> Iterator[Finding]:
    actor = job.role("actor")
    if actor is None or job.config is None or actor.allocation.cp == 1:
        return
    longest, bounded = longest_sequence(job.config)
    if bounded and longest < CONTEXT_PIECE * actor.allocation.cp:
        other = _other(actor, context_parallel_size=1)
        message = f"c{actor.allocation.cp} cuts sequences of at most {longest} tokens"
        yield Finding(message, f"use {other}" if other else "use d", "c", role=actor)


@rule(
    "AL704",
    summary="experts are cut where they could be spread",
    why="The experts' t adds activations over its ranks and makes narrow matrices; e keeps experts whole and moves"
    " tokens instead. e is faster wherever it divides the experts.",
    bad=example("actor.path=Qwen/Qwen3-30B-A3B", "actor.backend=megatron:(attn:d4|ffn:t4)"),
    good=example("actor.path=Qwen/Qwen3-30B-A3B", "actor.backend=megatron:d4e4"),
    severity="warning",
)
def cut_experts(job: Job) -> Iterator[Finding]:
    for role in job.training:
        size = role.allocation.etp * role.allocation.ep
        if role.spec is None or not role.spec.is_moe or role.allocation.etp == 1 or role.spec.num_experts % size:
            continue
        other = _other(role, expert_tensor_parallel_size=1, expert_parallel_size=size)
        if other is not None:
            message = (
                f"each expert is cut {role.allocation.etp} times; {role.spec.num_experts} experts divide by e{size}"
            )
            yield Finding(message, f"use {other}", "T", role=role)


@rule(
    "AL705",
    summary="GPUs without work",
    why="The layouts together use fewer GPUs than the cluster has.",
    bad=example("actor.backend=megatron:d2", "rollout.backend=huggingface:d2"),
    good=example("actor.backend=megatron:d4", "rollout.backend=huggingface:d4"),
    severity="warning",
)
def idle_gpus(job: Job) -> Iterator[Finding]:
    actor, rollout = job.role("actor"), job.role("rollout")
    if not job.on_gpus or actor is None or rollout is None:
        return
    used = actor.allocation.world_size + rollout.allocation.world_size
    if used < job.cluster.gpus:
        message = f"{job.cluster.gpus - used} of the {job.cluster.gpus} GPUs have no work"
        yield Finding(message, "raise d of actor or rollout", "d", role=actor)


@rule(
    "AL706",
    summary="a whole update is one micro-batch",
    why="Without a token budget all sequences of a rank pass through the model at once, with all their activations and"
    " logits in memory.",
    bad=example("actor.mb_spec.max_tokens_per_mb=null"),
    good=example("actor.mb_spec.max_tokens_per_mb=8192"),
    severity="warning",
)
def token_budget(job: Job) -> Iterator[Finding]:
    actor = job.role("actor")
    if actor is None or job.config is None or not job.on_gpus or room(actor) is not None:
        return
    sequences = ceil(answers_an_update(job.config) / actor.allocation.dp / (job.config.actor.mb_spec.n_mbs or 1))
    longest = longest_sequence(job.config)[0]
    if sequences > 1:
        message = f"{sequences} sequences of up to {longest} tokens are one micro-batch"
        yield Finding(message, "set max_tokens_per_mb", key="actor.mb_spec.max_tokens_per_mb")


def _micro_batches(job: Job, actor: Role) -> int:
    """Most micro-batches that one rank can have in an update."""
    assert job.config is not None
    sequences = max(1, answers_an_update(job.config) // actor.allocation.dp)
    asked = job.config.actor.mb_spec.n_mbs or 1
    fits, longest = room(actor), longest_sequence(job.config)[0]
    if not fits:
        return asked
    together = max(1, fits // longest)
    return max(asked, ceil(sequences / together))


def _other(role: Role, **sizes: int) -> ModelAllocation | None:
    """The layout with other sizes on the same ranks; None when there is none."""
    names = ("tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size")
    replica = prod(sizes.get(name, getattr(role.allocation, name)) for name in names)
    if role.allocation.world_size % replica:
        return None
    sizes["data_parallel_size"] = role.allocation.world_size // replica
    try:
        other = role.allocation.model_copy(update=sizes)
    except AllocationError:
        return None
    return other if role.spec is None or is_legal(other, role.spec) else None
