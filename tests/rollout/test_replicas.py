"""The queue before the replicas, over real processes with a toy engine."""

from __future__ import annotations

import contextlib
import os
import signal
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

from areal_like.engines.base import GenerationRequest, SamplingParams, WeightBucket  # noqa: E402
from areal_like.rollout.replicas import Replicas  # noqa: E402
from areal_like.runtime.local import WorkerGroup  # noqa: E402


class Collector:
    """What comes out, in the order in which it does."""

    def __init__(self):
        self.changed, self.completions, self.errors = threading.Condition(), [], []

    def finished(self, completion):
        with self.changed:
            self.completions.append(completion)
            self.changed.notify_all()

    def failed(self, error):
        with self.changed:
            self.errors.append(error)
            self.changed.notify_all()

    def wait(self, count):
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.completions) >= count or self.errors, 60)
            if self.errors:
                raise self.errors[0]
            return [completion.request_id for completion in self.completions]


@contextlib.contextmanager
def serving(replicas=1, *, max_requests=8, delay=0.0, independent=False, die_at=None, **options):
    seen = Collector()
    toy = {"delay": delay, "die_at": die_at}
    with WorkerGroup.start("rollout", "toy_engines:ToyInference", toy, replicas, independent=independent) as group:
        served = Replicas(group, max_requests=max_requests, on_finished=seen.finished, on_error=seen.failed, **options)
        try:
            yield served, group, seen
        finally:
            served.close()


def ask(number, tokens, prompt=None):
    return GenerationRequest(prompt or [number], SamplingParams(tokens, seed=number), number)


def logs(group):
    """For each replica, what it held at each call."""
    return [state[2] for state in group.call("state")]


def test_a_freed_slot_is_refilled_while_the_others_go_on():
    with serving(max_requests=3) as (replicas, group, seen):
        replicas.pause()
        replicas.submit([ask(0, 50), *(ask(i, 4) for i in range(1, 15))])
        replicas.resume()
        order = seen.wait(15)
        (log,) = logs(group)
        assert max(map(len, log)) == 3 and order.index(0) == 14  # fourteen short ones passed through two slots
        assert all(0 in held for held in log)
        assert [len(c.token_ids) for c in seen.completions] == [4] * 14 + [50]


def test_waiting_requests_are_shared_out_evenly_and_groups_stay_together():
    with serving(2, max_requests=8) as (replicas, group, seen):
        replicas.pause()
        replicas.submit(ask(i, 4, prompt=[i // 3]) for i in range(12))
        replicas.resume()
        seen.wait(12)
        first, second = ({i for held in log for i in held} for log in logs(group))
        assert {len(first), len(second)} == {6}
        assert {i // 3 for i in first}.isdisjoint(i // 3 for i in second)
        replicas.pause()
        replicas.submit(ask(i, 4, prompt=[1]) for i in range(20, 26))  # one group: more than half goes to one replica
        replicas.submit(ask(i, 4, prompt=[1]) for i in range(26, 28))  # another submission is another group
        replicas.resume()
        seen.wait(20)
        homes = [{i for held in log for i in held if i >= 20} for log in logs(group)]
        assert sorted(map(sorted, homes)) == [[20, 21, 22, 23, 24, 25], [26, 27]]


def test_a_new_request_joins_a_replica_that_is_busy():
    with serving(max_requests=2, delay=0.01) as (replicas, _, seen):
        replicas.submit([ask(0, 10**6)])
        for i in range(1, 4):
            replicas.submit([ask(i, 1)])
            assert seen.wait(i) == list(range(1, i + 1))
        replicas.submit([ask(4, 1), ask(5, 1)])  # the second waits for a slot
        assert seen.wait(5) == [1, 2, 3, 4, 5]
        replicas.pause()


def test_pausing_puts_the_unfinished_at_the_head_of_the_queue_with_their_tokens():
    expected = None
    for interruptions in (0, 3):
        with serving(max_requests=2, delay=0.005) as (replicas, group, seen):
            replicas.submit(ask(i, 50) for i in range(4))
            for version in range(1, interruptions + 1):
                with seen.changed:
                    seen.changed.wait(0.04)
                replicas.pause()
                assert group.call("withdraw") == [[]]
                replicas.update_weights([WeightBucket({"logits": torch.zeros(toy_engines.VOCABULARY)})], version)
                replicas.resume()
            assert sorted(seen.wait(4)[:2]) == [0, 1]  # they kept their place
            tokens = {c.request_id: c.token_ids for c in seen.completions}
            assert expected is None or tokens == expected  # the seed decides, however often it was interrupted
            expected = tokens
            versions = [c.versions for c in sorted(seen.completions, key=lambda c: c.request_id)]
            assert all(v == sorted(v) and len(v) == 50 for v in versions)
            assert versions[0][0] == 0 and versions[-1][-1] == interruptions


def test_pausing_to_finish_ends_what_runs_and_keeps_what_waits():
    with serving(max_requests=2, delay=0.005) as (replicas, group, seen):
        replicas.submit([ask(0, 100), ask(1, 150), ask(2, 5), ask(3, 5)])
        wait_until_all_work(group)
        replicas.pause(finish=True)
        started = {i for held in logs(group)[0] for i in held}
        assert sorted(c.request_id for c in seen.completions) == sorted(started)
        assert {0, 1} <= started < {0, 1, 2, 3}
        replicas.update_weights([WeightBucket({"logits": torch.zeros(toy_engines.VOCABULARY)})], 1)
        replicas.submit([ask(4, 1)])
        replicas.resume()
        seen.wait(5)
        assert {c.request_id: set(c.versions) for c in seen.completions} == {
            i: {0 if i in started else 1} for i in range(5)
        }


def wait_until_all_work(group):
    while True:
        group.interrupt()  # a worker answers between two calls of advance: make it return
        working = all(logs(group))
        group.clear_interrupt()
        if working:
            return


def test_an_answer_that_is_handled_slowly_does_not_hold_the_engine_up():
    release = threading.Event()
    seen = Collector()

    def slowly(completion):
        release.wait(60)
        seen.finished(completion)

    with WorkerGroup.start("rollout", "toy_engines:ToyInference", {}, 1) as group:
        replicas = Replicas(group, max_requests=1, on_finished=slowly, on_error=seen.failed)
        replicas.submit(ask(i, 1) for i in range(5))
        while len(logs(group)[0]) < 5:
            pass
        assert not seen.completions
        release.set()
        replicas.pause()  # every completion has been delivered when it returns
        assert [c.request_id for c in seen.completions] == [0, 1, 2, 3, 4]
        replicas.close()


def test_what_is_refused():
    with serving(delay=0.01) as (replicas, _, seen):
        replicas.submit([ask(0, 100)])
        for numbers in ([0], [1, 1]):
            with pytest.raises(ValueError, match=f"request {numbers[-1]} was submitted twice"):
                replicas.submit(ask(i, 5) for i in numbers)
        with pytest.raises(RuntimeError, match="update_weights needs paused replicas"):
            replicas.update_weights([], 1)
        with pytest.raises(RuntimeError, match="generate needs paused replicas"):
            replicas.generate([])
        seen.wait(1)
        replicas.submit([ask(0, 1)])  # an id may come again once it has ended
        assert seen.wait(2) == [0, 0]


def test_an_error_of_whoever_takes_the_answers_is_reported():
    seen = Collector()

    def broken(completion):
        raise LookupError(f"no place for {completion.request_id}")

    with WorkerGroup.start("rollout", "toy_engines:ToyInference", {}, 1) as group:
        replicas = Replicas(group, max_requests=1, on_finished=broken, on_error=seen.failed)
        replicas.submit([ask(5, 1)])
        with pytest.raises(LookupError, match="no place for 5"):
            seen.wait(1)
        with pytest.raises(LookupError, match="no place for 5"):
            replicas.pause()


# Replicas that die: real processes, killed by a signal


def weights(favourite=None):
    logits = torch.zeros(toy_engines.VOCABULARY)
    if favourite is not None:
        logits[favourite] = 50.0
    return [WeightBucket({"logits": logits})]


def drawn_alone(count, tokens):
    """What the seeds give when nobody dies."""
    with serving() as (replicas, _, seen):
        replicas.submit(ask(i, tokens) for i in range(count))
        seen.wait(count)
        return {c.request_id: c.token_ids for c in seen.completions}


def test_a_killed_replica_is_started_again_and_nothing_is_lost():
    expected = drawn_alone(12, 60)
    with serving(2, max_requests=4, delay=0.005, independent=True) as (replicas, group, seen):
        replicas.submit(ask(i, 60) for i in range(12))
        wait_until_all_work(group)
        killed = group.process_ids[1]
        os.kill(killed, signal.SIGKILL)
        seen.wait(12)
        assert {c.request_id: c.token_ids for c in seen.completions} == expected
        while replicas.restarted < 1 or group.is_dead(1):
            time.sleep(0.01)
        replicas.pause()  # waits until it is up
        assert replicas.restarted == 1 and group.process_ids[1] != killed
        replicas.resume()
        replicas.submit(ask(i, 3) for i in range(20, 28))
        seen.wait(20)
        assert len(group.call("state")[1][2]) > 0  # it serves: no weights had been installed, its own are right


def test_a_replica_that_was_started_again_waits_for_weights():
    with serving(2, delay=0.005, independent=True) as (replicas, group, seen):
        replicas.pause()
        replicas.update_weights(weights(favourite=1), 1)
        replicas.resume()
        replicas.submit(ask(i, 40) for i in range(4))
        os.kill(group.process_ids[0], signal.SIGKILL)
        seen.wait(4)
        replicas.pause()
        replicas.submit(ask(i, 4) for i in range(4, 8))
        replicas.resume()
        seen.wait(8)  # by the other alone
        assert all(c.versions == [1] * len(c.versions) and set(c.token_ids) == {1} for c in seen.completions)
        replicas.pause()
        assert group.call("state")[0][2] == [] and replicas.restarted == 1
        asked = [ask(i, 2) for i in range(3)]
        assert [c.token_ids for c in replicas.generate(asked)] == [[1, 1]] * 3  # evaluation too
        replicas.update_weights(weights(favourite=2), 2)
        replicas.submit(ask(i, 4) for i in range(8, 12))
        replicas.resume()
        seen.wait(12)
        assert [state[0] for state in group.call("state")] == [2, 2]
        assert group.call("state")[0][2] != []
        assert all(set(c.token_ids) == {2} for c in seen.completions[8:])


def test_restore_gives_the_weights_back_in_the_middle_of_a_step():
    restored = []

    def restore(rank):
        restored.append(rank)
        served[0].install(rank, weights(favourite=3), 7)

    with serving(1, delay=0.005, independent=True, restore=restore) as (replicas, group, seen):
        served = [replicas]
        replicas.pause()
        replicas.update_weights(weights(favourite=3), 7)
        replicas.resume()
        replicas.submit(ask(i, 40) for i in range(3))
        wait_until_all_work(group)
        replicas.pause()
        replicas.resume()  # those that have tokens keep them
        os.kill(group.process_ids[0], signal.SIGKILL)
        seen.wait(3)
        assert all((set(c.token_ids), set(c.versions), len(c.versions)) == ({3}, {7}, 40) for c in seen.completions)
        assert restored == [0]


@pytest.mark.slow
def test_the_last_replica_without_weights_ends_the_run():
    with serving(1, delay=0.005, independent=True) as (replicas, group, seen):
        replicas.pause()
        replicas.update_weights(weights(), 1)
        replicas.resume()
        replicas.submit([ask(0, 10**6)])
        wait_until_all_work(group)
        os.kill(group.process_ids[0], signal.SIGKILL)
        with pytest.raises(RuntimeError, match=r"no rollout replica has weights.*`restore`"):
            seen.wait(1)


def test_restarts_are_bounded():
    with serving(1, independent=True, die_at=1, restarts=2) as (replicas, _, seen):
        replicas.submit([ask(0, 3)])
        with pytest.raises(
            RuntimeError, match=r"after 2 restarts of rollout replica 0: rollout rank 0, advance: .*status 9"
        ):
            seen.wait(1)
        assert replicas.restarted == 2


@pytest.mark.slow
def test_a_replica_that_hangs_is_ended_and_started_again():
    expected = drawn_alone(4, 200)
    with serving(2, delay=0.005, independent=True, check_every=0.1, stall_timeout=0.5) as (replicas, group, seen):
        replicas.submit(ask(i, 200) for i in range(4))
        wait_until_all_work(group)
        os.kill(group.process_ids[0], signal.SIGSTOP)
        seen.wait(4)
        assert {c.request_id: c.token_ids for c in seen.completions} == expected and replicas.restarted >= 1


@pytest.mark.slow
def test_a_replica_that_dies_during_an_update_does_not_hold_up_the_others():
    with serving(2, independent=True) as (replicas, group, seen):
        replicas.pause()

        def buckets():
            yield from weights(favourite=1)
            os.kill(group.process_ids[0], signal.SIGKILL)
            while not group.is_dead(0):
                time.sleep(0.01)

        replicas.update_weights(buckets(), 1)
        replicas.resume()
        replicas.submit(ask(i, 4) for i in range(6))
        seen.wait(6)
        assert all(c.versions == [1] * 4 for c in seen.completions)
