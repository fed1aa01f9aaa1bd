"""From the `rollout` section to how much generation is under way; the check and the trainer read it alike."""

from __future__ import annotations

from math import ceil

from areal_like.config import RLConfig
from areal_like.spec.flow import FlowControl, Granularity, lag_of_requests, max_effective_lag

__all__ = ["engine_lag", "flow_control", "groups_a_step", "lag", "overlaps", "requests_per_replica"]


def groups_a_step(config: RLConfig) -> int:
    """Groups that one step takes."""
    return config.rollout.consumer_batch_size or config.train_dataset.batch_size


def requests_per_replica(config: RLConfig, replicas: int) -> int:
    """Requests that one replica serves at once."""
    rollout = config.rollout
    if rollout.max_requests_per_replica is not None:
        return rollout.max_requests_per_replica
    groups = rollout.max_concurrent_rollouts or groups_a_step(config)
    return ceil(groups * config.gconfig.n_samples / replicas)


def engine_lag(config: RLConfig, replicas: int) -> float:
    """The lag at which the engine is exactly full."""
    served = requests_per_replica(config, replicas)
    return max_effective_lag(replicas, served, groups_a_step(config), config.gconfig.n_samples)


def lag(config: RLConfig, replicas: int) -> float:
    """Batches under way beyond the one that the trainer waits for."""
    rollout = config.rollout
    if rollout.generation_lag == "auto":
        return max(-1.0, engine_lag(config, replicas))
    if rollout.generation_lag is not None:
        return float(rollout.generation_lag)
    if rollout.max_inflight_requests is not None:
        return lag_of_requests(rollout.max_inflight_requests, groups_a_step(config), config.gconfig.n_samples)
    return float(rollout.max_head_offpolicyness or 0)


def overlaps(config: RLConfig, replicas: int) -> bool:
    """Whether the engine generates while the trainer trains, so that a token may be older than its update."""
    if config.rollout.max_head_offpolicyness == 0:
        return False
    control = flow_control(config, replicas)
    return control.mode != "B/B" or control.slots > 1


def flow_control(config: RLConfig, replicas: int) -> FlowControl:
    """Everything that bounds generation.

    Args:
        replicas: data-parallel replicas of the rollout engine.

    Raises:
        ValueError: what rules AL501, AL526 and AL527 refuse.
    """
    rollout, groups, ahead = config.rollout, groups_a_step(config), lag(config, replicas)
    waiting = rollout.queue_size
    submission, consumption = Granularity(rollout.submission_granularity), Granularity(rollout.consumption_granularity)
    most = rollout.max_head_offpolicyness
    if submission is Granularity.BATCH and most is not None and most >= ahead:
        most = None  # the slots of batches bound it already
    if waiting is None and submission is not Granularity.BATCH:
        waiting = max(groups, ceil((ahead + 1) * groups))
    return FlowControl(
        groups,
        config.gconfig.n_samples,
        submission,
        consumption,
        ahead,
        max_ahead=most,
        max_waiting=waiting,
    )
