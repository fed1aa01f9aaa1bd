"""The rollout pipeline over real processes, with a toy engine."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

TOYS = str(Path(__file__).parents[1] / "trainers")
if TOYS not in sys.path:
    sys.path.insert(0, TOYS)

import toy_engines  # noqa: E402

from areal_like.data.rewards import RewardError  # noqa: E402
from areal_like.data.rows import Row  # noqa: E402
from areal_like.engines.base import GenerationRequest, SamplingParams, WeightBucket  # noqa: E402
from areal_like.rollout.admission import Admission  # noqa: E402
from areal_like.rollout.executor import RolloutExecutor  # noqa: E402
from areal_like.rollout.groups import Prompt  # noqa: E402
from areal_like.rollout.rewards import RewardPool  # noqa: E402
from areal_like.runtime.local import WorkerError, WorkerGroup  # noqa: E402


def decode(ids):
    return "".join("abcdefgh"[i] for i in ids)


def prompts(count, start=0):
    return [Prompt(i, [2, 3], Row(f"question {i}", "", index=i, dataset="toy")) for i in range(start, start + count)]


@pytest.fixture(scope="module")
def rewards():
    pool = RewardPool(toy_engines.share_of_b)
    yield pool
    pool.close()


@contextlib.contextmanager
def pipeline(rewards, batches, *, replicas=1, n_samples=2, tokens=5, delay=0.0, die_at=None, ahead=0, **bounds):
    kwargs = {"delay": delay, "die_at": die_at}
    admission = Admission(max(map(len, batches)), bounds.get("concurrent", 64), ahead)
    with WorkerGroup.start("rollout", "toy_engines:ToyInference", kwargs, replicas) as workers:
        executor = RolloutExecutor(
            workers,
            rewards,
            batches,
            admission,
            n_samples=n_samples,
            sampling=lambda prompt, sample: SamplingParams(tokens),
            decode=decode,
        )
        executor.start()
        try:
            yield executor, workers, admission
        finally:
            executor.close()


def install(executor, version, favourite=None):
    logits = torch.zeros(toy_engines.VOCABULARY)
    if favourite is not None:
        logits[favourite] = 50.0
    executor.pause()
    executor.update_weights([WeightBucket({"logits": logits})], version)
    executor.resume()


def test_on_policy_batches_come_whole_in_order_and_after_their_version(rewards):
    batches = [prompts(4), prompts(4, 4), prompts(2, 8)]
    with pipeline(rewards, batches, replicas=2) as (executor, workers, admission):
        for version in range(3):
            groups = executor.next_batch()
            assert [g.prompt.index for g in groups] == [p.index for p in batches[version]]
            for group in groups:
                for answer in group.finished():
                    assert answer.versions == [version] * 5 and answer.finish_reason == "length"
                    assert answer.reward == answer.token_ids.count(1) / 8
            time.sleep(0.1)
            assert admission.running == 0  # nothing runs ahead
            install(executor, version + 1)
        assert executor.next_batch() is None
        shares = [state[2] for state in workers.call("state")]
        assert [len(share[0]) for share in shares] == [4, 4]  # 4 groups x 2 samples over 2 replicas


def test_weights_reach_every_replica_and_later_tokens(rewards):
    with pipeline(rewards, [prompts(2), prompts(2, 2)], replicas=2) as (executor, workers, _):
        executor.next_batch()
        install(executor, 1, favourite=1)
        assert [answer.reward for group in executor.next_batch() for answer in group.finished()] == [5 / 8] * 4
        assert [state[0] for state in workers.call("state")] == [1, 1]


def test_an_update_interrupts_answers_and_they_continue_with_their_tokens(rewards):
    two = [prompts(1), prompts(1, 1)]
    with pipeline(rewards, two, n_samples=2, tokens=30, delay=0.02, ahead=1, concurrent=1) as (executor, _, _):
        executor.next_batch()
        time.sleep(0.25)  # the second group is in the middle
        started = time.monotonic()
        install(executor, 1, favourite=1)
        assert time.monotonic() - started < 0.5
        (group,) = executor.next_batch()
        for answer in group.finished():
            assert len(answer.token_ids) == len(answer.log_probs) == len(answer.versions) == 30
            assert answer.versions == sorted(answer.versions) and set(answer.versions) == {0, 1}
            changed = answer.versions.index(1)
            assert answer.log_probs[:changed] == [pytest.approx(-2.0794415)] * changed  # log 1/8: drawn before
            assert answer.token_ids[changed:] == [1] * (30 - changed)


def test_running_ahead_stays_within_its_bound(rewards):
    batches = [prompts(2, 2 * i) for i in range(5)]
    with pipeline(rewards, batches, n_samples=1, ahead=2) as (executor, _, admission):
        seen = []
        for version in range(5):
            groups = executor.next_batch()
            seen += [version - min(a.versions) for g in groups for a in g.finished()]
            time.sleep(0.1)
            assert admission.accepted + admission.running <= (version + 3) * 2
            install(executor, version + 1)
        assert max(seen) == 2 and seen[:2] == [0, 0]


def test_concurrency_bounds_the_engine(rewards):
    with pipeline(rewards, [prompts(6)], n_samples=3, concurrent=2) as (executor, workers, _):
        executor.next_batch()
        assert max(len(share) for share in workers.call("state")[0][2]) <= 6


def test_evaluation_requests_go_apart_from_the_queue(rewards):
    with pipeline(rewards, [prompts(1)], replicas=2) as (executor, _, _):
        with pytest.raises(RuntimeError, match="paused"):
            executor.replicas.generate([])
        executor.next_batch()
        executor.pause()
        requests = [GenerationRequest([1], SamplingParams(n), n) for n in (3, 1, 2)]
        assert [len(c.token_ids) for c in executor.replicas.generate(requests)] == [3, 1, 2]
        assert executor.replicas.generate([]) == []
        executor.resume()


def test_a_replica_that_dies_stops_the_pipeline(rewards):
    with pipeline(rewards, [prompts(2)], replicas=2, die_at=1) as (executor, _, _):
        with pytest.raises(WorkerError, match=r"rollout rank [01], advance: the process exited with status 9"):
            executor.next_batch()
        with pytest.raises(WorkerError):
            executor.pause()


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (
            toy_engines.raising_reward,
            r"toy_engines\.raising_reward of row 0 of toy raised LookupError(.|\n)*no rule for",
        ),
        (toy_engines.infinite_reward, r"toy_engines\.infinite_reward of row 0 of toy returned inf"),
    ],
)
def test_a_reward_that_fails_stops_the_pipeline(function, message):
    pool = RewardPool(function)
    try:
        with pipeline(pool, [prompts(1)]) as (executor, _, _), pytest.raises(RewardError, match=message) as caught:
            executor.next_batch()
        if function is toy_engines.raising_reward:
            assert 'raise LookupError(f"no rule for {row.prompt}")' in str(caught.value)
    finally:
        pool.close()


def test_a_reward_that_hangs_is_ended():
    pool = RewardPool(toy_engines.hanging_reward, timeout=0.5)
    try:
        with (
            pipeline(pool, [prompts(1)], n_samples=1) as (executor, _, _),
            pytest.raises(RewardError, match=r"hanging_reward has not finished 1 answers to row 0 of toy after 0\.5"),
        ):
            executor.next_batch()
    finally:
        pool.close()


def test_a_reward_that_no_worker_can_find_is_refused():
    with pytest.raises(RewardError, match="must stand at the top level of a module"):
        RewardPool(lambda prompt, completion, row: 0.0)


def test_waiting_for_a_batch_does_not_block_other_threads(rewards):
    with pipeline(rewards, [prompts(1)], tokens=40, delay=0.02) as (executor, _, _):
        waiter = threading.Thread(target=executor.next_batch)
        waiter.start()
        time.sleep(0.1)
        executor.pause()  # while the other thread waits
        executor.resume()
        waiter.join(10)
        assert not waiter.is_alive()
