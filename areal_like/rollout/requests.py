"""The queue before the replicas: which request goes to which replica, and when. Its owner holds a lock."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from areal_like.engines.base import Completion, GenerationRequest

__all__ = ["Queued", "Replica", "RequestQueue"]


@dataclass(frozen=True)
class Queued:
    """A request, its place in the order of all, and the number of its group: neighbours with the same prompt."""

    order: int
    group: int
    request: GenerationRequest

    def keep(self, completion: Completion) -> None:
        """What an interrupted call drew is where the next one goes on."""
        self.request.generated = list(completion.token_ids)
        self.request.log_probs = list(completion.log_probs)
        self.request.versions = list(completion.versions)


@dataclass
class Replica:
    """What the driver knows of one replica.

    Attributes:
        held: unfinished requests that are with it, by id.
        calling: whether a call to it is under way, or it is being started again.
        serving: whether it has the weights that requests are to be answered with.
        restarts: how often it was started again.
    """

    rank: int
    held: dict[int, Queued] = field(default_factory=dict)
    calling: bool = False
    serving: bool = True
    restarts: int = 0


class RequestQueue:
    """Requests in the order of their submission, dealt out to replicas that have room.

    Args:
        replicas: those that share the queue.
        max_requests: of one replica at once.
    """

    def __init__(self, replicas: Sequence[Replica], max_requests: int) -> None:
        self._replicas, self._max_requests = replicas, max_requests
        self._waiting: deque[Queued] = deque()
        self._unfinished: set[int] = set()  # ids of everything that waits or is held
        self._submitted = self._groups = 0

    def add(self, requests: Sequence[GenerationRequest]) -> None:
        """ValueError: a request has the id of one that is not finished; none was queued."""
        ids = [request.request_id for request in requests]
        if len(set(ids)) < len(ids) or not self._unfinished.isdisjoint(ids):
            twice = next(i for n, i in enumerate(ids) if i in self._unfinished or i in ids[:n])
            raise ValueError(f"request {twice} was submitted twice: ids of unfinished requests are unique")
        self._unfinished.update(ids)
        before: list[int] | None = None
        for request in requests:
            self._groups += request.prompt_ids != before
            self._waiting.append(Queued(self._submitted, self._groups, request))
            self._submitted += 1
            before = request.prompt_ids

    def remove(self, request_id: int) -> bool:
        """Take a request out; False when it does not wait."""
        queued = next((q for q in self._waiting if q.request.request_id == request_id), None)
        if queued is None:
            return False
        self._waiting.remove(queued)
        self._unfinished.remove(request_id)
        return True

    def finish(self, replica: Replica, request_id: int) -> None:
        """A request that a replica held has ended."""
        del replica.held[request_id]
        self._unfinished.remove(request_id)

    def put_back(self, queued: Iterable[Queued]) -> None:
        """To the head of the queue, in the order of submission."""
        self._waiting.extendleft(sorted(queued, key=lambda entry: entry.order, reverse=True))

    def wanted(self, replica: Replica) -> bool:
        """Whether it should take up a waiting request: it has room, and less than its share of all."""
        room = len(replica.held) < min(self._max_requests, self._share())
        return room and replica.serving and bool(self._waiting)

    def take(self, replica: Replica) -> list[GenerationRequest]:
        """Hand requests over: up to the replica's share, and the rest of the last one's group as far as there is room,
        so that the members of a group share a prefill."""
        new: list[Queued] = []
        share = self._share()
        while self._waiting and len(replica.held) < self._max_requests:
            if len(replica.held) >= share and not (new and self._waiting[0].group == new[-1].group):
                break
            new.append(self._waiting.popleft())
            replica.held[new[-1].request.request_id] = new[-1]
        return [queued.request for queued in new]

    def _share(self) -> int:
        """Requests of each replica if all that wait and all that are held were dealt out evenly."""
        total = len(self._waiting) + sum(len(replica.held) for replica in self._replicas)
        return -(-total // max(1, sum(replica.serving for replica in self._replicas)))
