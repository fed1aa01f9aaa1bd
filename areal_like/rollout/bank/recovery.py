"""What comes back when a run goes on from a checkpoint, and what does not, with the reason.

marker at or before the checkpoint     the weights know this group: gone
later marker, or none                  the step that trained it is lost, or was never made: offered again
too old by `max_age`                   dropped, and counted
damaged                                dropped, counted, and reported with file and offset
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from areal_like.rollout.bank.generation import Contents, Key, Payloads
from areal_like.rollout.bank.lines import Damage
from areal_like.rollout.bank.record import Encoded, Entry, decode
from areal_like.rollout.trajectories import RolloutGroup

__all__ = ["Dropped", "Recovered", "Restoring"]


@dataclass(frozen=True)
class Dropped:
    """Something that does not come back, though no step of the checkpoint trained it.

    Attributes:
        reason: `age`; `damaged`: a group, or a line that cannot be read; `torn`: the unfinished end of a file, which
            nothing was promised of; `replaced`: a copy of a group that was written twice.
        problem: in words, with file and offset of what is damaged.
        key: of the group, if that is known.
    """

    reason: str
    problem: str
    key: Key | None = None


@dataclass
class Recovered:
    """What a bank gives to a run that goes on.

    Attributes:
        groups: to be trained, in the order in which they were finished.
        dropped: what is not among them.
    """

    groups: list[RolloutGroup] = field(default_factory=list)
    dropped: list[Dropped] = field(default_factory=list)

    def counts(self) -> dict[str, int]:
        """How much was dropped, by reason."""
        return dict(Counter(dropped.reason for dropped in self.dropped))


class Restoring:
    """Applies the rule to the files of a generation.

    Args:
        contents, payloads: of the generation.
        step: of the checkpoint.
        version: of its policy.
        max_age: how many versions older a token may be.
    """

    def __init__(
        self, contents: Contents, payloads: Payloads, step: int, version: int | None, max_age: int | None
    ) -> None:
        self._contents, self._payloads = contents, payloads
        self._step, self._version, self._max_age = step, version, max_age
        dropped = [Dropped("torn" if d.torn else "damaged", str(d), d.key) for d in contents.damages]
        again = [Dropped("replaced", f"group {e.name} was written again", e.key) for e in contents.replaced]
        self.recovered = Recovered(dropped=dropped + again)

    def survivors(self) -> Iterator[Encoded]:
        """What the next generation holds; `recovered` is complete when this ends."""
        for key, entry in self._contents.entries.items():
            if self._contents.consumed.get(key, self._step + 1) <= self._step:
                continue
            if (age := self._age(entry)) is not None:
                problem = f"group {entry.name}: its oldest token is {age} versions old, more than {self._max_age}"
                self.recovered.dropped.append(Dropped("age", problem, key))
                continue
            payload = self._payloads.read(entry)
            if isinstance(payload, Damage):
                self.recovered.dropped.append(Dropped("damaged", str(payload), key))
                continue
            self.recovered.groups.append(decode(entry, payload))
            yield entry, payload

    def _age(self, entry: Entry) -> int | None:
        """Versions between the policy and the oldest token, when these are too many."""
        if self._version is None or self._max_age is None or entry.versions is None:
            return None
        age = self._version - entry.versions[0]
        return age if age > self._max_age else None
