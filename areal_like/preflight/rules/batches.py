"""AL5, first part: batches, micro-batches and the lengths of sequences."""

from __future__ import annotations

from collections.abc import Iterator

from areal_like.config import RLConfig
from areal_like.preflight.flow import groups_a_step
from areal_like.preflight.job import Job, Role
from areal_like.preflight.registry import Finding, example, rule
from areal_like.spec import fp8_alignment, padded_length, padding_multiples


def answers_an_update(config: RLConfig) -> int:
    """Sequences of one optimizer step, on all ranks together."""
    return groups_a_step(config) * config.gconfig.n_samples // config.actor.ppo_n_minibatches


def longest_sequence(config: RLConfig) -> tuple[int, bool]:
    """Most tokens of prompt and answer together, and whether prompts are bounded; one token of prompt if they are
    not."""
    prompt = config.train_dataset.max_length
    longest = (prompt or 1) + config.gconfig.max_new_tokens
    limit = config.gconfig.max_tokens
    return (longest if limit is None else min(longest, limit)), prompt is not None or limit is not None


def padding(role: Role) -> tuple[int, int]:
    """What the length of a sequence, and of a micro-batch, is rounded up to."""
    fp8 = role.section.megatron.fp8_config
    block = fp8_alignment(None if fp8 is None else fp8.recipe)
    return padding_multiples(role.allocation.tp, role.allocation.cp, block)


def padded(role: Role, tokens: int) -> int:
    """What a micro-batch of this one sequence has: t, c and the blocks of FP8 round lengths up."""
    sequence, whole = padding(role)
    return padded_length(padded_length(tokens, sequence), whole)


def room(role: Role) -> int | None:
    """Tokens that fit into a micro-batch."""
    budget: int | None = role.section.mb_spec.max_tokens_per_mb
    return None if budget is None else budget - budget % padding(role)[1]


def full_groups(role: Role, micro_batches: int) -> int:
    """Micro-batches of a step: virtual stages (v) take turns in groups of p, so the number is rounded up."""
    return padded_length(micro_batches, role.allocation.pp) if role.allocation.vpp > 1 else micro_batches


@rule(
    "AL510",
    summary="an update has fewer answers than data-parallel ranks",
    why="Whole answers go to the ranks of d. Ranks without one run an empty micro-batch and wait for the others.",
    bad=example("train_dataset.batch_size=2", "gconfig.n_samples=2", "actor.backend=megatron:d8"),
    good=example("train_dataset.batch_size=4", "gconfig.n_samples=2", "actor.backend=megatron:d8"),
    severity="warning",
)
def enough_answers(job: Job) -> Iterator[Finding]:
    actor = job.role("actor")
    if actor is None or job.config is None:
        return
    answers, dp = answers_an_update(job.config), actor.allocation.dp
    if 0 < answers < dp:
        message = f"{answers} answers of an update for d{dp}: {dp - answers} replicas have nothing to do"
        hint = "raise train_dataset.batch_size or gconfig.n_samples, or lower d or actor.ppo_n_minibatches"
        yield Finding(message, hint, "d", role=actor)


@rule(
    "AL511",
    summary="an update has fewer micro-batches than pipeline stages",
    why="A stage works on a micro-batch while the next stage works on the one before. With fewer sequences on a rank"
    " than stages there can never be work for all of them.",
    bad=example("actor.backend=megatron:p14", "cluster.n_gpus_per_node=18", "train_dataset.batch_size=1"),
    good=example("actor.backend=megatron:p2", "cluster.n_gpus_per_node=18", "train_dataset.batch_size=1"),
    severity="warning",
)
def enough_micro_batches(job: Job) -> Iterator[Finding]:
    actor = job.role("actor")
    if actor is None or job.config is None or actor.allocation.pp == 1:
        return
    sequences = answers_an_update(job.config) // actor.allocation.dp
    if 0 < sequences < actor.allocation.pp:
        message = f"{sequences} sequences a rank cannot fill the {actor.allocation.pp} stages of p"
        yield Finding(message, "lower p or d, or raise train_dataset.batch_size or gconfig.n_samples", "p", role=actor)


@rule(
    "AL512",
    summary="more micro-batches are asked for than a rank has sequences",
    why="Sequences are not cut in the middle, so the surplus micro-batches are empty.",
    bad=example("actor.mb_spec.n_mbs=100"),
    good=example("actor.mb_spec.n_mbs=4"),
    severity="warning",
)
def empty_micro_batches(job: Job) -> Iterator[Finding]:
    actor = job.role("actor")
    if actor is None or job.config is None:
        return
    sequences, asked = answers_an_update(job.config) // actor.allocation.dp, job.config.actor.mb_spec.n_mbs or 1
    if 0 < sequences < asked:
        message = f"n_mbs {asked} micro-batches for {sequences} sequences a rank: {asked - sequences} stay empty"
        yield Finding(message, f"use at most {sequences}", key="actor.mb_spec.n_mbs")


@rule(
    "AL513",
    summary="the longest sequence does not fit into a micro-batch",
    why="A sequence stays whole in one micro-batch. The run stops at the first one that is longer than the token"
    " budget, which may be hours after its start.",
    bad=example("actor.mb_spec.max_tokens_per_mb=1536"),
    good=example("actor.mb_spec.max_tokens_per_mb=2048"),
)
def longest_fits(job: Job) -> Iterator[Finding]:
    if job.config is None:
        return
    longest, bounded = longest_sequence(job.config)
    for role in _computing(job):
        fits = room(role)
        if fits is None or padded(role, longest) <= fits:
            continue
        parts, least = _parts(job.config), padded(role, longest)
        message = f"a sequence of {longest} tokens ({parts}) does not fit into a micro-batch of {fits}"
        hint = f"use at least {least}, or lower gconfig.max_new_tokens" + (" or max_length" if bounded else "")
        yield Finding(message, hint, key=f"{role.name}.mb_spec.max_tokens_per_mb")


@rule(
    "AL514",
    summary="prompts have no longest length",
    why="train_dataset.max_length and gconfig.max_tokens are both open, so whether every sequence fits into a"
    " micro-batch depends on the data.",
    bad=example("train_dataset.max_length=null"),
    good=example("train_dataset.max_length=1024"),
    severity="info",
)
def unbounded_prompts(job: Job) -> Iterator[Finding]:
    if job.config is None or longest_sequence(job.config)[1]:
        return
    fits = min((n for role in _computing(job) if (n := room(role)) is not None), default=None)
    left = None if fits is None else fits - job.config.gconfig.max_new_tokens
    if left is not None and left > 0:
        message = f"a prompt of more than {left} tokens would not fit into a micro-batch with its answer"
        yield Finding(message, f"train_dataset.max_length: {left} leaves such prompts out", key="train_dataset")


@rule(
    "AL515",
    summary="the rollout engine's context is shorter than the longest sequence",
    why="A server refuses or cuts what does not fit into the context length that it was started with.",
    bad=example("rollout.backend=sglang:d4", "sglang={context_length: 1024}"),
    good=example("rollout.backend=sglang:d4", "sglang={context_length: 2048}"),
)
def server_context(job: Job) -> Iterator[Finding]:
    rollout = job.role("rollout")
    if rollout is None or job.config is None:
        return
    name = {"sglang": "context_length", "vllm": "max_model_len"}.get(rollout.allocation.backend)
    options = getattr(job.config, rollout.allocation.backend, None) if name else None
    context = options.get(name) if isinstance(options, dict) else None
    longest = longest_sequence(job.config)[0]
    if isinstance(context, int) and context < longest:
        message = f"{name} {context} is shorter than the longest sequence, {longest} tokens ({_parts(job.config)})"
        yield Finding(message, f"use at least {longest}", key=f"{rollout.allocation.backend}.{name}")


@rule(
    "AL516",
    summary="sequences are longer than the positions that the model was trained on",
    why="Rotary positions beyond max_position_embeddings are computed, but the model has never seen them.",
    bad=example("gconfig.max_new_tokens=65536", "actor.mb_spec.max_tokens_per_mb=131072"),
    good=example("gconfig.max_new_tokens=4096", "actor.mb_spec.max_tokens_per_mb=131072"),
    severity="warning",
)
def trained_positions(job: Job) -> Iterator[Finding]:
    actor = job.role("actor")
    if actor is None or job.config is None or actor.spec is None or not actor.spec.max_position_embeddings:
        return
    longest, known = longest_sequence(job.config)[0], actor.spec.max_position_embeddings
    if longest > known:
        message = f"sequences of {longest} tokens ({_parts(job.config)}); the model knows {known} positions"
        yield Finding(message, "lower gconfig.max_new_tokens", key="gconfig.max_new_tokens")


@rule(
    "AL518",
    summary="max_tokens leaves no room for an answer",
    why="gconfig.max_tokens bounds prompt and answer together. A prompt that is as long ends the run.",
    bad=example("gconfig.max_tokens=1024", "train_dataset.max_length=1024"),
    good=example("gconfig.max_tokens=2048", "train_dataset.max_length=1024"),
)
def room_for_answers(job: Job) -> Iterator[Finding]:
    if job.config is None:
        return
    limit, prompt = job.config.gconfig.max_tokens, job.config.train_dataset.max_length
    if limit is not None and prompt is not None and limit <= prompt:
        message = f"a prompt of {prompt} tokens leaves nothing of max_tokens {limit} to an answer"
        yield Finding(message, f"raise it above {prompt}, or lower train_dataset.max_length", key="gconfig.max_tokens")


@rule(
    "AL519",
    summary="the saver or the evaluator is due after the end of the run",
    why="Its frequency is longer than the run: it acts at the last step only.",
    bad=example("total_train_steps=10", "saver.freq_steps=100"),
    good=example("total_train_steps=10", "saver.freq_steps=5"),
    severity="warning",
)
def due_in_time(job: Job) -> Iterator[Finding]:
    config = job.config
    if config is None:
        return
    for name, timer in (("saver", config.saver), ("evaluator", config.evaluator)):
        for key, every, end in (
            ("freq_steps", timer.freq_steps, config.total_train_steps),
            ("freq_epochs", timer.freq_epochs, config.total_train_epochs),
        ):
            others = [timer.freq_steps, timer.freq_epochs, timer.freq_secs]
            if every is not None and end is not None and every > end and sum(o is not None for o in others) == 1:
                message = f"every {every} {key.removeprefix('freq_')}; the run has {end}: only its end is left"
                yield Finding(message, f"use at most {end}", key=f"{name}.{key}")


def _computing(job: Job) -> Iterator[Role]:
    return (role for role in job.running() if role.trains)


def _parts(config: RLConfig) -> str:
    """Where a longest length comes from."""
    new, prompt, limit = config.gconfig.max_new_tokens, config.train_dataset.max_length, config.gconfig.max_tokens
    if limit is not None and limit < (prompt or 1) + new:
        return f"max_tokens {limit}"
    return f"max_length {prompt} + max_new_tokens {new}" if prompt else f"max_new_tokens {new} and a prompt"
