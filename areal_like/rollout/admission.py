"""How many groups may be started now: the two bounds on generation.

    capacity = min(max_concurrent - running, (max_head_offpolicyness + version + 1) * batch - (accepted + running))

(AReaL, `areal/infra/staleness_manager.py`.) The first bounds what the engine works on at once. The second bounds how
far generation runs ahead: the policy at `version` has consumed `version` batches, so a group that is admitted now is
trained on at most `max_head_offpolicyness` versions later. With 0 a step's groups are admitted only once the version
that they are trained on is installed: exactly on-policy. A third bound is ours: at most `queue_size` groups that are
not consumed.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Admission:
    """Counters of groups. Not locked: its owner holds a lock anyway.

    Attributes:
        batch: groups that one update consumes.
        max_concurrent: groups in generation at once.
        max_head_offpolicyness: versions that generation may run ahead.
        queue_size: groups admitted and not yet consumed; None leaves that to `max_head_offpolicyness`.
        version: updates whose weights are installed.
        running: admitted groups without a reward yet.
        accepted: groups with a reward, consumed or not.
        consumed: groups handed to the trainer.
    """

    batch: int
    max_concurrent: int
    max_head_offpolicyness: int
    queue_size: int | None = None
    version: int = 0
    running: int = 0
    accepted: int = 0
    consumed: int = 0

    def __post_init__(self) -> None:
        if self.queue_size is not None and self.queue_size < self.batch:
            raise ValueError(
                f"rollout.queue_size is {self.queue_size}, but an update takes {self.batch} groups: "
                "it would wait for ever"
            )

    def capacity(self) -> int:
        """Groups that may be admitted now; never negative."""
        ahead = (self.max_head_offpolicyness + self.version + 1) * self.batch - (self.accepted + self.running)
        free = self.max_concurrent - self.running
        capacity = min(free, ahead)
        if self.queue_size is not None:
            capacity = min(capacity, self.queue_size - (self.accepted + self.running - self.consumed))
        return max(0, capacity)

    def admit(self, groups: int = 1) -> None:
        self.running += groups

    def accept(self, groups: int = 1) -> None:
        self.running -= groups
        self.accepted += groups

    def consume(self, groups: int) -> None:
        self.consumed += groups

    def short_batch(self, missing: int) -> None:
        """The last batch of an epoch lacked `missing` groups: they count as if consumed, or later groups would be
        admitted a version too early."""
        self.accepted += missing
        self.consumed += missing
