"""AL5, second part: how far generation may run ahead, and what the loss makes of old answers.

The rules are those of Megatron-RL's rollout pipeline at the granularity of a group (submit G, consume B): with `P`
groups a batch, a lag of L batches, and E groups in flight, max_effective_lag is E / P - 1.
"""

from __future__ import annotations

from collections.abc import Iterator

from areal_like.config import RLConfig
from areal_like.preflight.job import Job
from areal_like.preflight.registry import Finding, example, rule
from areal_like.preflight.rules.batches import groups_a_step


def max_effective_lag(config: RLConfig) -> float:
    """Versions that generation can run ahead at most: the bound that is asked for, and the one of the queue."""
    lag = float(config.rollout.max_head_offpolicyness)
    if config.rollout.queue_size is None:
        return lag
    return min(lag, config.rollout.queue_size / groups_a_step(config) - 1)


@rule(
    "AL501",
    summary="the queue holds less than a batch",
    why="Admitted groups must reach a whole batch, or the trainer waits for ever.",
    bad=example("rollout.queue_size=16"),
    good=example("rollout.queue_size=64", "rollout.max_head_offpolicyness=1"),
)
def queue_holds_a_batch(job: Job) -> Iterator[Finding]:
    if job.config is None:
        return
    size, batch = job.config.rollout.queue_size, groups_a_step(job.config)
    if size is not None and size < batch:
        message = f"queue_size {size} holds less than the batch of {batch} prompts that an update takes"
        yield Finding(message, f"use at least {batch}, or null for no limit", key="rollout.queue_size")


@rule(
    "AL502",
    summary="how far generation runs ahead",
    why="Groups are admitted while (max_head_offpolicyness + version + 1) batches are not exceeded, and while the queue"
    " has room: the first token of an answer is at most max_effective_lag versions older than the update that trains on"
    " it.",
    bad=example("rollout.max_head_offpolicyness=2"),
    good=example("rollout.max_head_offpolicyness=0"),
    severity="info",
)
def effective_lag(job: Job) -> Iterator[Finding]:
    if job.config is None or job.config.rollout.max_head_offpolicyness == 0:
        return
    lag = max_effective_lag(job.config)
    if lag >= 0:
        batch = groups_a_step(job.config)
        message = f"max_effective_lag is {lag:g}: up to {round((lag + 1) * batch)} groups are under way or waiting"
        yield Finding(message, key="rollout.max_head_offpolicyness")


@rule(
    "AL503",
    summary="the queue is too small for the lag",
    why="(L + 1) batches may be admitted, and the queue holds fewer: the lag that is asked for is never reached.",
    bad=example("rollout.queue_size=64", "rollout.max_head_offpolicyness=4"),
    good=example("rollout.queue_size=160", "rollout.max_head_offpolicyness=4"),
    severity="warning",
)
def queue_holds_the_lag(job: Job) -> Iterator[Finding]:
    if job.config is None or job.config.rollout.queue_size is None:
        return
    lag, batch, size = (
        job.config.rollout.max_head_offpolicyness,
        groups_a_step(job.config),
        job.config.rollout.queue_size,
    )
    if batch <= size < (lag + 1) * batch:
        message = f"a lag of {lag} needs {(lag + 1) * batch} groups, queue_size {size} allows {size / batch - 1:g}"
        yield Finding(message, f"use at least {(lag + 1) * batch}, or null", key="rollout.queue_size")


@rule(
    "AL504",
    summary="fewer groups are generated at once than a batch has",
    why="The engine then works on parts of a batch one after another: its max_effective_lag is below 0, and the last"
    " part of each batch leaves it half idle.",
    bad=example("rollout.max_concurrent_rollouts=8"),
    good=example("rollout.max_concurrent_rollouts=32"),
    severity="warning",
)
def concurrent_batch(job: Job) -> Iterator[Finding]:
    if job.config is None:
        return
    most, batch = job.config.rollout.max_concurrent_rollouts, groups_a_step(job.config)
    if most is not None and most < batch:
        message = (
            f"{most} groups at once for batches of {batch}: max_effective_lag of the engine is {most / batch - 1:g}"
        )
        hint = f"use {batch}, unless the engine's memory does not allow it"
        yield Finding(message, hint, key="rollout.max_concurrent_rollouts")


@rule(
    "AL505",
    summary="more groups may be generated at once than are ever admitted",
    why="At most (L + 1) batches are admitted; the bound on concurrency has nothing to act on.",
    bad=example("rollout.max_concurrent_rollouts=1000"),
    good=example("rollout.max_concurrent_rollouts=32"),
    severity="info",
)
def reachable_concurrency(job: Job) -> Iterator[Finding]:
    if job.config is None:
        return
    rollout = job.config.rollout
    admitted = (rollout.max_head_offpolicyness + 1) * groups_a_step(job.config)
    if rollout.max_concurrent_rollouts is not None and rollout.max_concurrent_rollouts > admitted:
        message = f"{rollout.max_concurrent_rollouts} groups at once; no more than {admitted} are admitted"
        yield Finding(message, f"{admitted} is the same", key="rollout.max_concurrent_rollouts")


@rule(
    "AL506",
    summary="old answers are trained on as if they were new",
    why="recompute_logprob replaces the log-probabilities that the answers were drawn with by those of the policy"
    " before the update. With a lag those differ, and without use_decoupled_loss nothing corrects for it.",
    bad=example("rollout.max_head_offpolicyness=2", "actor.recompute_logprob=true"),
    good=example("rollout.max_head_offpolicyness=2", "actor.recompute_logprob=true", "actor.use_decoupled_loss=true"),
    severity="warning",
)
def corrected_lag(job: Job) -> Iterator[Finding]:
    if job.config is None:
        return
    actor, lag = job.config.actor, job.config.rollout.max_head_offpolicyness
    if lag > 0 and actor.recompute_logprob and not actor.use_decoupled_loss:
        message = f"answers up to {lag} versions old are trained on as if they were drawn now"
        hint = "set actor.use_decoupled_loss: true, or actor.recompute_logprob: false"
        yield Finding(message, hint, key="actor.recompute_logprob")


@rule(
    "AL507",
    summary="the loss and the rollouts have different temperatures",
    why="The ratio compares the log-probability of a token in the loss with that when it was drawn. Under different"
    " temperatures it is not 1 for an unchanged policy.",
    bad=example("gconfig.temperature=0.7", "actor.temperature=1.0"),
    good=example("gconfig.temperature=0.7"),
    severity="warning",
)
def temperatures(job: Job) -> Iterator[Finding]:
    if job.config is None or job.config.gconfig.greedy or job.config.gconfig.temperature == 0:
        return
    loss, drawn = job.config.actor.temperature, job.config.gconfig.temperature
    if loss != drawn:
        message = f"the loss divides logits by {loss:g}, the rollouts by {drawn:g}"
        yield Finding(message, "leave actor.temperature out: it follows gconfig", key="actor.temperature")


@rule(
    "AL508",
    summary="the reference has random weights",
    why="The divergence is measured from `ref`. With random weights it pulls the policy towards noise.",
    bad=example("actor.kl_ctl=0.1", "ref.init_from_scratch=true"),
    good=example("actor.kl_ctl=0.1", "ref={}"),
    severity="warning",
)
def random_reference(job: Job) -> Iterator[Finding]:
    config = job.config
    if config is not None and config.ref is not None and config.actor.kl_ctl > 0 and config.ref.init_from_scratch:
        message = "the divergence is measured from a model with random weights"
        yield Finding(message, "leave ref.init_from_scratch out", key="ref.init_from_scratch")


@rule(
    "AL509",
    summary="the batch of the data set and that of an update differ",
    why="rollout.consumer_batch_size is what an update takes, and prompts are loaded in batches of that size. When it"
    " is given, train_dataset.batch_size has nothing to act on.",
    bad=example("rollout.consumer_batch_size=32", "train_dataset.batch_size=64"),
    good=example("rollout.consumer_batch_size=32", "train_dataset.batch_size=32"),
    severity="warning",
)
def one_batch_size(job: Job) -> Iterator[Finding]:
    if job.config is None:
        return
    taken, given = job.config.rollout.consumer_batch_size, job.config.train_dataset.batch_size
    if taken is not None and taken != given:
        message = f"an update takes {taken} prompts; train_dataset.batch_size {given} has no effect"
        yield Finding(message, "give one of the two", key="train_dataset.batch_size")
