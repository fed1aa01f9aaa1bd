"""AL5, second part: how far generation may run ahead, and what the loss makes of old answers.

The numbers are those of `spec.flow`: P groups a batch, G attempts a group, a lag of L batches.
"""

from __future__ import annotations

from collections.abc import Iterator

from areal_like.config import RLConfig
from areal_like.preflight.flow import engine_lag, flow_control, groups_a_step, lag, overlaps
from areal_like.preflight.job import Job
from areal_like.preflight.registry import Finding, example, rule
from areal_like.spec.flow import Granularity, refusal

_AHEAD = ("rollout.submission_granularity=R", "rollout.consumption_granularity=G")


def lag_key(config: RLConfig) -> str:
    """The key that says the lag."""
    rollout = config.rollout
    if rollout.generation_lag is not None:
        return "rollout.generation_lag"
    if rollout.max_inflight_requests is not None:
        return "rollout.max_inflight_requests"
    return "rollout.max_head_offpolicyness"


def _engine_key(config: RLConfig) -> str:
    """The key that says what the engine serves at once."""
    named = config.rollout.max_requests_per_replica is not None
    return f"rollout.{'max_requests_per_replica' if named else 'max_concurrent_rollouts'}"


def _replicas(job: Job) -> int:
    role = job.role("rollout")
    return 1 if role is None else role.allocation.dp


def _refused(config: RLConfig) -> bool:
    """Whether AL501, AL526 or AL527 has something to say, so that there are no slots to talk of."""
    rollout = config.rollout
    number = rollout.generation_lag
    return (
        refusal(Granularity(rollout.submission_granularity), Granularity(rollout.consumption_granularity)) is not None
        or (isinstance(number, float | int) and not number >= -1)
        or (rollout.queue_size is not None and rollout.queue_size < groups_a_step(config))
    )


@rule(
    "AL501",
    summary="the queue holds less than a batch",
    why="An update takes a whole batch of finished groups. With less room than that, no group would be started while"
    " the trainer waits for one, for ever.",
    bad=example("rollout.queue_size=16"),
    good=example("rollout.queue_size=64", "rollout.max_head_offpolicyness=1"),
)
def queue_holds_a_batch(job: Job) -> Iterator[Finding]:
    if job.config is None:
        return
    size, batch = job.config.rollout.queue_size, groups_a_step(job.config)
    if size is not None and size < batch:
        message = f"queue_size {size} holds less than the batch of {batch} prompts that an update takes"
        yield Finding(message, f"use at least {batch}, or null", key="rollout.queue_size")


@rule(
    "AL502",
    summary="how far generation runs ahead",
    why="The slots for units of work follow from the lag: max(1, round((L + 1) * units of a batch)). At B/B every token"
    " is exactly L versions old; elsewhere the mean is (tau_consume / tau_submit) (1 + L), see docs/off_policy.md.",
    bad=example("rollout.max_head_offpolicyness=2"),
    good=example("rollout.max_head_offpolicyness=0"),
    severity="info",
)
def effective_lag(job: Job) -> Iterator[Finding]:
    if job.config is None or _refused(job.config):
        return
    control = flow_control(job.config, _replicas(job))
    if control.mode != "B/B" or control.lag != 0:
        yield Finding(str(control), key=lag_key(job.config))


@rule(
    "AL503",
    summary="two bounds on running ahead, of which one is never reached",
    why="The lag says how many batches are under way, max_head_offpolicyness which version a batch may be started at."
    " Where the lag is larger, slots stay empty.",
    bad=example("rollout.generation_lag=4", "rollout.max_head_offpolicyness=1"),
    good=example("rollout.generation_lag=1", "rollout.max_head_offpolicyness=1"),
    severity="warning",
)
def bounds_agree(job: Job) -> Iterator[Finding]:
    if job.config is None or _refused(job.config):
        return
    ahead, most = lag(job.config, _replicas(job)), job.config.rollout.max_head_offpolicyness
    if most is not None and ahead > most:
        message = f"a lag of {ahead:g} is never reached: max_head_offpolicyness {most} lets no batch start that early"
        yield Finding(message, "leave max_head_offpolicyness out, or lower the lag", key=lag_key(job.config))


@rule(
    "AL504",
    summary="the engine serves less than a batch at once",
    why="It then works on parts of a batch one after another: its max_effective_lag is below 0, and the last part of"
    " each batch leaves it half idle.",
    bad=example("rollout.max_concurrent_rollouts=8"),
    good=example("rollout.max_concurrent_rollouts=32"),
    severity="warning",
)
def concurrent_batch(job: Job) -> Iterator[Finding]:
    if job.config is None:
        return
    full = engine_lag(job.config, _replicas(job))
    if full < 0:
        batch = groups_a_step(job.config)
        served = round((full + 1) * batch)
        message = f"{served} groups at once for batches of {batch}: max_effective_lag of the engine is {full:g}"
        hint = f"raise it to {batch} groups, unless the engine's memory does not allow it"
        yield Finding(message, hint, key=_engine_key(job.config))


@rule(
    "AL505",
    summary="more is under way than the engine serves at once",
    why="Rollouts beyond what the engine serves wait in its queue. They keep nothing busy and grow old from the moment"
    " they are served, so a larger lag than floor(replicas * max_requests / G) / P - 1 costs staleness for nothing.",
    bad=example("rollout.generation_lag=3", *_AHEAD),
    good=example("rollout.generation_lag=3", "rollout.max_concurrent_rollouts=128", *_AHEAD),
    severity="warning",
)
def oversubscribed(job: Job) -> Iterator[Finding]:
    if job.config is None or _refused(job.config):
        return
    control, full = flow_control(job.config, _replicas(job)), engine_lag(job.config, _replicas(job))
    if control.lag > 0 and control.submission is not Granularity.BATCH and control.oversubscribes(full):
        message = f"the lag of {control.lag:g} oversubscribes the engine, which is full at {full:g}"
        hint = "use generation_lag: auto, or let the engine serve more (max_concurrent_rollouts)"
        yield Finding(message, hint, key=lag_key(job.config))


@rule(
    "AL526",
    summary="granularities that cannot be had together",
    why="The trainer takes whole groups, because advantages compare the attempts of a group; and what was submitted in"
    " batches cannot be consumed in smaller units.",
    bad=example("rollout.submission_granularity=B", "rollout.consumption_granularity=G"),
    good=example("rollout.submission_granularity=R", "rollout.consumption_granularity=G"),
)
def granularities(job: Job) -> Iterator[Finding]:
    if job.config is None:
        return
    rollout = job.config.rollout
    pair = Granularity(rollout.submission_granularity), Granularity(rollout.consumption_granularity)
    if reason := refusal(*pair):
        message = f"submission {pair[0]} with consumption {pair[1]}: {reason}"
        yield Finding(message, "use B/B, G/G, G/B, R/G or R/B", key="rollout.consumption_granularity")


@rule(
    "AL527",
    summary="the lag is said twice, or below -1",
    why="generation_lag and max_inflight_requests are two ways to say one number, as are max_concurrent_rollouts and"
    " max_requests_per_replica. A lag of -1 is one unit at a time; there is nothing below it.",
    bad=example("rollout.generation_lag=1", "rollout.max_inflight_requests=512"),
    good=example("rollout.max_inflight_requests=256"),
)
def one_lag(job: Job) -> Iterator[Finding]:
    if job.config is None:
        return
    rollout = job.config.rollout
    if rollout.generation_lag is not None and rollout.max_inflight_requests is not None:
        same = "generation_lag and max_inflight_requests say the same thing"
        yield Finding(same, "give one of them", key="rollout.max_inflight_requests")
    if isinstance(rollout.generation_lag, float | int) and not rollout.generation_lag >= -1:
        message = f"generation_lag is {rollout.generation_lag:g}"
        yield Finding(message, "use -1 (one unit at a time) or more", key="rollout.generation_lag")
    if rollout.max_concurrent_rollouts is not None and rollout.max_requests_per_replica is not None:
        same = "max_concurrent_rollouts and max_requests_per_replica say the same thing"
        yield Finding(same, "give one of them", key="rollout.max_requests_per_replica")


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
    if job.config is None or _refused(job.config):
        return
    actor = job.config.actor
    if runs_ahead(job) and actor.recompute_logprob and not actor.use_decoupled_loss:
        message = "answers of older versions are trained on as if they were drawn now"
        hint = "set actor.use_decoupled_loss: true, or actor.recompute_logprob: false"
        yield Finding(message, hint, key="actor.recompute_logprob")


def runs_ahead(job: Job) -> bool:
    """Whether a token may be older than the update that trains on it."""
    return job.config is not None and not _refused(job.config) and overlaps(job.config, _replicas(job))


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
