"""Order, quotas, replacement, failure: the pipeline in virtual time with environments of a few lines."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from areal_like.data.rows import Row
from areal_like.rollout.agents.attempts import Attempts
from areal_like.rollout.agents.base import GroupedRolloutGenerator
from areal_like.rollout.pipeline import EpisodesFailedError, RolloutPipeline, Screening, Share
from areal_like.rollout.pipeline.simulation import VirtualLoop
from areal_like.rollout.trajectories import RolloutGroup, TokenRollout, Turn
from areal_like.runtime.local import WorkerError
from areal_like.spec.flow import FlowControl, Granularity

R, G, B = Granularity


class Episode:
    def __init__(self, row, index, attempt):
        self.row, self.index, self.attempt = row, index, attempt
        self.turns, self.figures = [], {}

    def rollout(self, reward):
        return TokenRollout([Turn([1], [2], [0.0], [0], "stop")], reward)


class Timed(GroupedRolloutGenerator):
    """Attempts last as `seconds(index, attempt)` says, and are worth `reward(index, attempt)`."""

    def __init__(self, name="timed", seconds=lambda i, a: 1.0, reward=lambda i, a: float(a)):
        self.name, self.seconds, self.reward = name, seconds, reward
        self.begun = []

    def problem(self, index):
        return Row(f"{self.name} {index}", "", index=index)

    async def run(self, episode):
        self.begun.append((episode.index, episode.attempt, asyncio.get_running_loop().time()))
        await asyncio.sleep(self.seconds(episode.index, episode.attempt))
        return self.reward(episode.index, episode.attempt)


def play(work):
    loop = VirtualLoop()
    try:
        return loop.run_until_complete(work())
    finally:
        loop.close()


def pipeline(agents, control, **more):
    shares = agents if isinstance(agents[0], Share) else [Share(agents[0], control.groups)]
    attempts = Attempts(lambda agent, row, index, attempt: Episode(row, index, attempt), fatal=(WorkerError,))
    made = RolloutPipeline(shares, control, attempts, **more)
    made.start()
    return made


def batches(agents, control, count, *, train=0.0, **more):
    async def work():
        made = pipeline(agents, control, **more)
        taken = []
        try:
            for version in range(count):
                batch = await made.take()
                if batch is None:
                    break
                taken.append(batch)
                await asyncio.sleep(train)
                await made.installed(version + 1)
        finally:
            await made.close()
        return taken

    return play(work)


def indices(taken):
    return [[group.index for group in batch.groups] for batch in taken]


def test_whole_batches_come_in_order_however_long_they_take():
    agent = Timed(seconds=lambda i, a: 100.0 - i)
    for submission in (B, G, R):
        taken = batches([agent], FlowControl(3, 2, submission, B, lag=1), 4)
        assert indices(taken) == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]
        assert [m.reward for m in taken[0].groups[0].members] == [0.0, 1.0]


def test_groups_come_as_they_finish():
    agent = Timed(seconds=lambda i, a: {0: 10.0, 1: 3.0, 2: 5.0, 3: 1.0}.get(i, 50.0))
    taken = batches([agent], FlowControl(2, 1, G, G, lag=1), 2)
    assert indices(taken) == [[3, 1], [2, 0]]


def test_a_batch_starts_only_when_the_policy_that_it_is_for_is_installed():
    agent = Timed(seconds=lambda i, a: 1.0)
    batches([agent], FlowControl(2, 2), 3, train=10.0)
    starts = {index: time for index, _, time in agent.begun}
    assert starts[0] == starts[1] == 0.0 and starts[2] == starts[3] == 11.0 and starts[4] == 22.0


def test_rollouts_are_started_one_for_one():
    agent = Timed(seconds=lambda i, a: 10.0 if (i, a) == (0, 0) else 1.0)
    batches([agent], FlowControl(2, 2, R, B, lag=0), 2)
    times = Counter(time for _, _, time in agent.begun)
    assert times[0.0] == 4 and times[1.0] == 3  # one of the four is slow


def test_quotas_of_several_environments():
    fast, slow = Timed("fast", lambda i, a: 1.0), Timed("slow", lambda i, a: 7.0)
    for control in (FlowControl(4, 2, G, G, lag=1), FlowControl(4, 2), FlowControl(4, 2, R, B)):
        taken = batches([Share(fast, 3), Share(slow, 1)], control, 5)
        for batch in taken:
            assert Counter(group.environment for group in batch.groups) == {"fast": 3, "slow": 1}
        assert taken[0].figures["reward/fast"] == 0.5


def test_the_run_ends_and_nothing_is_started_beyond_it():
    agent = Timed()
    taken = batches([agent], FlowControl(2, 1, R, G, lag=5), 9, total=3)
    assert len(taken) == 3 and {index for index, *_ in agent.begun} == set(range(6))


def test_the_last_batch_of_an_epoch_may_be_smaller():
    sizes = [3, 3, 1, 3]
    taken = batches([Timed()], FlowControl(3, 2, lag=1), 4, groups_in=lambda number: sizes[number])
    assert indices(taken) == [[0, 1, 2], [3, 4, 5], [6], [7, 8, 9]]


def test_a_group_without_spread_is_replaced():
    agent = Timed(reward=lambda i, a: 1.0 if i in (0, 2) else float(a))
    dropped = []
    screening = Screening(drop_equal_rewards=True)
    taken = batches(
        [agent], FlowControl(2, 2), 2, screening=screening, on_dropped=lambda name, index: dropped.append(index)
    )
    assert indices(taken) == [[1, 3], [4, 5]] and dropped == [0, 2]
    assert taken[0].figures["flow/dropped_groups"] == 2


def test_failed_attempts_are_marked_and_a_group_of_them_replaced():
    def reward(index, attempt):
        if index == 1 or (index == 0 and attempt == 0):
            raise LookupError(f"no rule for {attempt}\nmore")
        return 1.0

    taken = batches([Timed(reward=reward)], FlowControl(2, 2), 1)
    first, second = taken[0].groups
    assert (first.index, second.index) == (0, 2)
    assert first.members[0].failed and first.members[0].failure == "LookupError: no rule for 0\nmore"
    assert first.rewards == [1.0] and not first.members[1].failed
    assert taken[0].figures["flow/failed_attempts"] == 3
    assert taken[0].notes == [
        "1 groups were replaced: 1 x every attempt failed",
        "3 attempts failed: 2 x LookupError: no rule for 0; 1 x LookupError: no rule for 1",
    ]


def test_a_run_in_which_every_attempt_fails_stops_and_says_why():
    def reward(index, attempt):
        raise ValueError("the verifier is down") if attempt else KeyError("answer")

    with pytest.raises(EpisodesFailedError, match=r"every attempt of 4 groups in a row failed") as caught:
        batches([Timed(reward=reward)], FlowControl(2, 3), 1, screening=Screening(patience=4))
    assert "8 of 12: ValueError: the verifier is down" in str(caught.value)
    assert "4 of 12: KeyError: 'answer'" in str(caught.value)


def test_a_run_in_which_nothing_is_left_to_learn_stops():
    screening = Screening(drop_equal_rewards=True, equal_patience=10)
    with pytest.raises(EpisodesFailedError, match=r"10 groups in a row were dropped \(10 because all rewards are 1\)"):
        batches([Timed(reward=lambda i, a: 1.0)], FlowControl(2, 3), 1, screening=screening)


def test_a_dead_engine_ends_the_run_instead_of_failing_attempts():
    def reward(index, attempt):
        raise WorkerError("rollout rank 0 is gone", group="rollout", rank=0, method="advance")

    with pytest.raises(WorkerError, match="rank 0 is gone"):
        batches([Timed(reward=reward)], FlowControl(2, 2), 1)


def test_a_problem_that_cannot_be_posed_ends_the_run():
    agent = Timed()
    agent.problem = lambda index: {}[index]
    with pytest.raises(KeyError):
        batches([agent], FlowControl(2, 2), 1)


def test_restored_groups_come_first_and_are_not_attempted_again():
    agent = Timed()
    member = TokenRollout([Turn([1], [2], [0.0], [0], "stop")], 0.25)
    restored = [RolloutGroup("timed", index, agent.problem(index), [member]) for index in (3, 1)]
    share = Share(agent, 2, position=1, settled={1, 3})
    taken = batches([share], FlowControl(2, 1), 2, restored=restored)
    assert indices(taken) == [[1, 3], [2, 4]]
    assert {index for index, *_ in agent.begun} == {2, 4}


def test_groups_are_durable_before_they_are_offered():
    order = []

    class Store:
        async def append(self, group):
            await asyncio.sleep(5.0)
            order.append((group.index, asyncio.get_running_loop().time()))

    async def work():
        made = pipeline([Timed()], FlowControl(1, 1), store=Store())
        await made.take()
        taken = asyncio.get_running_loop().time()
        await made.close()
        return taken

    assert play(work) == 6.0 and order == [(0, 6.0)]
