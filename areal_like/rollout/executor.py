"""The rollout pipeline: prompts in, batches of rewarded groups out, in the order of the data.

It has no thread of its own: it moves whenever something ends (a sample, a reward) or the trainer acts (takes a batch,
installs a version). Batches are handed out in the order of their prompts, never as they happen to finish, so that a
run with `max_head_offpolicyness` n trains on data that is at most n versions old and short answers get no advantage.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

from areal_like.engines.base import Completion, GenerationRequest, SamplingParams, WeightBucket
from areal_like.rollout.admission import Admission
from areal_like.rollout.groups import Answer, Prompt, RolloutGroup
from areal_like.rollout.replicas import Replicas
from areal_like.rollout.rewards import RewardPool
from areal_like.runtime.local import WorkerGroup

__all__ = ["RolloutExecutor", "SampleFactory"]


class SampleFactory(Protocol):
    """Makes the sampling parameters of one sample."""

    def __call__(self, prompt: Prompt, sample: int) -> SamplingParams: ...


class RolloutExecutor:
    """Keeps a rollout group busy within the bounds of `Admission`.

    Args:
        workers: the rollout WorkerGroup.
        rewards: fills in rewards.
        batches: prompts by batch; ends when the run ends.
        admission: the bounds; this object owns it from now on.
        n_samples: answers of a group.
        sampling: parameters of each sample.
        decode: token ids of an answer to its text.
    """

    def __init__(
        self,
        workers: WorkerGroup,
        rewards: RewardPool,
        batches: Iterable[list[Prompt]],
        admission: Admission,
        *,
        n_samples: int,
        sampling: SampleFactory,
        decode: Callable[[list[int]], str],
    ) -> None:
        self._rewards = rewards
        self._batches: Iterator[list[Prompt]] = iter(batches)
        self._admission = admission
        self._n_samples = n_samples
        self._sampling = sampling
        self._decode = decode
        self._changed = threading.Condition(threading.RLock())
        self._error: BaseException | None = None
        self._loaded: deque[tuple[int, Prompt]] = deque()  # prompts that are not admitted, with their batch
        self._running: dict[int, RolloutGroup] = {}
        self._batch_of: dict[int, int] = {}
        self._finished: dict[int, dict[int, RolloutGroup]] = {}  # by batch, then by prompt index
        self._sizes: dict[int, int] = {}
        self._next = 0
        self._open = False
        slots = -(-admission.max_concurrent * n_samples // workers.world_size)
        self.replicas = Replicas(workers, max_requests=slots, on_finished=self._sample_ended, on_error=self._fail)

    def start(self) -> None:
        """Begin to generate with the weights that the rollout engine has."""
        with self._changed:
            self._open = True
            self._admit()

    def next_batch(self) -> list[RolloutGroup] | None:
        """The next batch in the order of the data, all its groups with rewards; None when the prompts have ended.

        Raises:
            RewardError, WorkerError: what stopped the pipeline.
        """
        with self._changed:
            self._load(self._next)
            if self._next not in self._sizes:
                return None
            size = self._sizes[self._next]
            self._changed.wait_for(lambda: self._error is not None or self._ready(size))
            if self._error is not None:
                raise self._error
            groups = self._finished.pop(self._next)
            del self._sizes[self._next]
            self._next += 1
            self._admission.consume(size)
            self._admit()
            return [groups[index] for index in sorted(groups)]

    def pause(self) -> None:
        """Stop generation where it is; unfinished answers keep their tokens and go on after `resume`."""
        with self._changed:
            self._open = False
        self.replicas.pause()

    def update_weights(self, buckets: Iterable[WeightBucket], version: int) -> None:
        """Install the weights of `version` while paused. Tokens drawn from now on carry it."""
        self.replicas.update_weights(buckets, version)
        with self._changed:
            self._admission.version = version

    def resume(self) -> None:
        """Go on, with as many new groups as the version now allows."""
        with self._changed:
            self._open = True
            self._admit()
        self.replicas.resume()

    def close(self) -> None:
        self.replicas.close()

    # What ends, moves the pipeline; all of this runs under the lock.

    def _admit(self) -> None:
        while self._open and self._error is None and self._admission.capacity() > 0:
            if not self._loaded:
                self._load(max(self._sizes, default=self._next - 1) + 1)
            if not self._loaded:
                return
            batch, prompt = self._loaded.popleft()
            group = RolloutGroup(prompt, [None] * self._n_samples)
            self._running[prompt.index] = group
            self._batch_of[prompt.index] = batch
            self._admission.admit()
            self.replicas.submit(
                GenerationRequest(
                    list(prompt.prompt_ids), self._sampling(prompt, sample), prompt.index * self._n_samples + sample
                )
                for sample in range(self._n_samples)
            )

    def _ready(self, size: int) -> bool:
        return len(self._finished.get(self._next, {})) == size

    def _load(self, batch: int) -> None:
        """Read batches until `batch` is known or there are no more."""
        while batch not in self._sizes:
            prompts = next(self._batches, None)
            if prompts is None:
                return
            number = max(self._sizes, default=self._next - 1) + 1
            self._sizes[number] = len(prompts)
            self._loaded.extend((number, prompt) for prompt in prompts)
            self._admission.short_batch(self._admission.batch - len(prompts))

    def _sample_ended(self, completion: Completion) -> None:
        index, sample = divmod(completion.request_id, self._n_samples)
        answer = Answer(
            completion.token_ids,
            completion.log_probs,
            completion.versions,
            completion.finish_reason,
            self._decode(completion.token_ids),
        )
        with self._changed:
            group = self._running[index]
            group.answers[sample] = answer
            complete = group.complete
        if complete:
            self._rewards.submit(group, self._group_ended)

    def _group_ended(self, group: RolloutGroup, error: BaseException | None) -> None:
        if error is not None:
            self._fail(error)
            return
        with self._changed:
            index = group.prompt.index
            del self._running[index]
            self._finished.setdefault(self._batch_of.pop(index), {})[index] = group
            self._admission.accept()
            self._admit()
            self._changed.notify_all()

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()
