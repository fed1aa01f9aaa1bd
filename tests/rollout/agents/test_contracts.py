"""What a GroupedRolloutGenerator gets for its two methods: single rollouts, groups, evaluation, pairs."""

from __future__ import annotations

import asyncio
import itertools
from fractions import Fraction

import pytest
from doubles import scripted

from areal_like.data.loader import RowLoader
from areal_like.data.rewards import RewardError
from areal_like.data.rows import Row
from areal_like.engines.base import SamplingParams
from areal_like.rollout.agents.attempts import Attempts
from areal_like.rollout.agents.base import GroupedRolloutGenerator, TokenizedRolloutGenerator
from areal_like.rollout.agents.calculator import Calculator
from areal_like.rollout.agents.contrastive import BestAgainstWorst
from areal_like.rollout.agents.evaluation import EvaluationResponse, pass_at_k
from areal_like.rollout.agents.rows import DatasetAgent
from areal_like.rollout.inference.base import Capability, CapabilityError, InferenceInterface, require
from areal_like.rollout.trajectories import Rollout, RolloutGroup, TokenRollout, Turn


class Number(GroupedRolloutGenerator):
    """The reward is the number that the model says."""

    name = "number"

    def problem(self, index):
        return Row(f"number {index}", str(index), index=index)

    async def run(self, episode):
        return float((await episode.chat(episode.row.prompt)).text)


def length_reward(prompt, completion, row):
    return len(completion) / 10


def group_of(*rewards: float | None, texts: list[str] | None = None) -> RolloutGroup:
    texts = texts or [f"answer {i}" for i in range(len(rewards))]
    members = [
        TokenRollout([Turn([1], [2], [-1.0], [0], "stop", text)], reward, "" if reward is not None else "broken")
        for reward, text in zip(rewards, texts, strict=True)
    ]
    return RolloutGroup("number", 3, Row("number 3", "3"), members)


# Attempts


def test_one_attempt_at_each_problem_in_order():
    found = asyncio.run(Number().rollouts(scripted(lambda row, index, attempt: [str(index)]), 3, first=4))
    assert [rollout.reward for rollout in found] == [4, 5, 6]
    assert all(isinstance(rollout, TokenRollout) and len(rollout.turns) == 1 for rollout in found)


def test_a_group_is_all_attempts_at_one_problem():
    group = asyncio.run(Number().group(scripted(lambda row, index, attempt: [str(10 * index + attempt)]), 2, 3))
    assert (group.environment, group.index, group.row.answer, group.rewards) == ("number", 2, "2", [20, 21, 22])


def test_an_attempt_that_raises_is_a_failed_one_with_its_turns():
    group = asyncio.run(Number().group(scripted(lambda row, index, attempt: [["1"], ["two"]][attempt]), 0, 2))
    assert [member.failed for member in group.members] == [False, True]
    assert group.members[1].failure == "ValueError: could not convert string to float: 'two'"
    assert group.members[1].turns[0].text == "two"


def test_of_text_alone_a_failed_attempt_is_text_too():
    script = scripted(lambda row, index, attempt: [["1"], ["two"]][attempt], tokens=False)
    group = asyncio.run(Number().group(script, 0, 2))
    assert [type(member) for member in group.members] == [Rollout, Rollout]
    assert [member.reward for member in group.members] == [1, None] and "two" in group.members[1].failure


def test_a_fatal_error_is_raised():
    def broken(agent, row, index, attempt):
        raise AssertionError

    class Down(Number):
        async def run(self, episode):
            raise ConnectionError("the engine is dead")

    with pytest.raises(ConnectionError):
        attempts = Attempts(scripted(lambda *_: [])._make_episode, fatal=(ConnectionError,))
        asyncio.run(Down().group(attempts, 0, 1))
    with pytest.raises(AssertionError):  # no episode could be made: no fault of the environment
        asyncio.run(Number().group(Attempts(broken), 0, 1))


def test_what_an_agent_needs_is_checked():
    class TextAlone(InferenceInterface):
        capabilities = frozenset({Capability.RAW})
        answer = None  # never asked

    class Tokens(TokenizedRolloutGenerator):
        problem = run = None

    model = TextAlone(SamplingParams(8))
    require(model, Number().needs, "it")
    with pytest.raises(CapabilityError, match="it needs tokens and log-probabilities"):
        require(model, Tokens().needs, "it")


# Evaluation


@pytest.mark.parametrize(("n", "c"), [(n, c) for n in range(1, 7) for c in range(n + 1)])
def test_pass_at_k_is_the_share_of_choices_that_hold_a_right_one(n, c):
    """The definition, by enumeration: of all ways to choose k of n attempts."""
    right = [i < c for i in range(n)]
    for k in range(1, n + 1):
        choices = list(itertools.combinations(right, k))
        assert pass_at_k(n, c, k) == pytest.approx(float(Fraction(sum(map(any, choices)), len(choices))), abs=1e-15)


def test_pass_at_k_of_many():
    """The product form of the paper's own code: prod of (i - k) / i for i from n - c + 1 to n."""
    product = 1.0
    for i in range(191, 201):
        product *= (i - 100) / i
    assert pass_at_k(200, 10, 100) == pytest.approx(1 - product, rel=1e-12)


@pytest.mark.parametrize("numbers", [(3, 4, 1), (3, -1, 1), (3, 1, 0), (3, 1, 4)])
def test_pass_at_k_refuses(numbers):
    with pytest.raises(ValueError, match="pass@"):
        pass_at_k(*numbers)


def test_metrics_by_hand():
    response = EvaluationResponse("e", [group_of(1, 0, 0, 0.5), group_of(1, 1, None, 0), group_of(0, 0, 0, 0)])
    found = response.metrics()
    assert found == {
        "problems": 3,
        "attempts": 12,
        "failed": 1,
        "reward_mean": pytest.approx(3.5 / 11),
        "best_mean": pytest.approx(2 / 3),
        "pass@1": pytest.approx((1 / 4 + 2 / 3 + 0) / 3),
        "pass@2": pytest.approx((1 / 2 + 1 + 0) / 3),  # of 4 choose 2 three lack the right one; of 3 choose 2 none
        "pass@4": pytest.approx((1 + 0) / 2),  # the second problem has three attempts that did not fail
    }
    assert response.failures() == {"broken": 1}


def test_metrics_of_nothing():
    assert EvaluationResponse("e", [group_of(None, None)]).metrics() == {"problems": 1, "attempts": 2, "failed": 2}


def test_an_evaluation():
    agent = DatasetAgent([Row(f"q{i}", "", index=i) for i in range(5)], length_reward, name="lengths", shuffle=False)
    agent.passing = 0.4
    script = scripted(lambda row, index, attempt: ["x" * (row.index + attempt)])
    response = asyncio.run(agent.evaluate(script, samples=2))
    assert response.environment == "lengths" and [group.rewards for group in response.groups] == [
        [i / 10, (i + 1) / 10] for i in range(5)
    ]
    assert response.metrics()["pass@1"] == pytest.approx((0 + 0 + 0 + 0.5 + 1) / 5)
    assert len(asyncio.run(agent.evaluate(script, prompts=99)).groups) == 5
    assert [group.index for group in asyncio.run(agent.evaluate(script, prompts=2, first=3)).groups] == [3, 4]


def test_an_evaluation_without_end_needs_a_number():
    script = scripted(lambda row, index, attempt: ["1"])
    with pytest.raises(ValueError, match="number are without end"):
        asyncio.run(Number().evaluate(script))
    assert len(asyncio.run(Number().evaluate(script, prompts=7)).groups) == 7
    with pytest.raises(ValueError, match="at least one"):
        asyncio.run(Number().evaluate(script, prompts=1, samples=0))


# Pairs


def test_the_best_against_the_worst():
    maker = BestAgainstWorst(Number(), size=4)
    pair = maker.pair(group_of(0.5, 1, 0, 1, texts=["half", "first best", "worst", "second best"]))
    asked = {"role": "user", "content": "number 3"}
    assert pair.chosen == [asked, {"role": "assistant", "content": "first best"}]
    assert pair.rejected == [asked, {"role": "assistant", "content": "worst"}]
    assert (pair.environment, pair.index, pair.rewards, pair.prompt) == ("number", 3, (1, 0), [asked])


def test_what_gives_no_pair_is_counted():
    maker = BestAgainstWorst(Number(), size=4, margin=0.1)
    assert maker.pair(group_of(1, 1, 1)) is None
    assert maker.pair(group_of(0.5, 0.55)) is None
    assert maker.pair(group_of(1, None)) is None
    assert maker.pair(group_of(None)) is None
    assert maker.pair(group_of(1, 0, texts=["same", "same"])) is None
    assert maker.skipped == {"tie": 2, "fewer than two attempts that did not fail": 2, "same words": 1}
    exact = BestAgainstWorst(Number(), size=4)
    assert exact.pair(group_of(1, 1)) is None and exact.skipped == {"tie": 1}
    assert exact.pair(group_of(1, 1.0000001)).rewards == (1.0000001, 1)
    with pytest.raises(ValueError, match="at least 2"):
        BestAgainstWorst(Number(), size=1)


@pytest.mark.parametrize("tokens", [True, False])
def test_pairs_of_several_turns_are_whole_conversations(tokens):
    """The conversation that is made of the turns is the one that the model was shown."""
    agent = Calculator(seed=1, max_turns=3)
    agent.name = "calculator"
    answer = agent.problem(0).answer
    texts = [["<calc>1/0</calc>", "<calc>2*3</calc>", f"<answer>{answer}</answer>"], ["<answer>1.5</answer>"]]
    maker = BestAgainstWorst(agent, size=2)
    script = scripted(lambda row, index, attempt: texts[attempt], tokens=tokens)
    (pair,) = asyncio.run(maker.pairs(script, 1))
    assert pair.rewards == (1, 0) and len(pair.prompt) == 1
    assert [message["content"] for message in pair.chosen[1:]] == [
        "<calc>1/0</calc>",
        "<result>error: division by zero</result>",
        "<calc>2*3</calc>",
        "<result>6</result>",
        f"<answer>{answer}</answer>",
    ]
    assert [m["role"] for m in pair.chosen] == ["user", "assistant"] * 3
    assert [m["content"] for m in pair.rejected[1:]] == ["<answer>1.5</answer>"]


def test_an_agent_that_cannot_say_what_stood_between_turns():
    two = TokenRollout([Turn([1], [2], [-1.0], [0], "stop", "a")] * 2, 1.0)
    with pytest.raises(ValueError, match="number has 2 turns: override `transcript`"):
        Number().transcript(Row("q", ""), two)


# Rows


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize(("rows", "batch"), [(10, 3), (9, 3), (3, 3), (7, 1), (5, 4)])
@pytest.mark.parametrize("drop_last", [True, False])
def test_rows_come_in_the_order_of_the_loader(rows, batch, shuffle, drop_last):
    data = [Row(f"q{i}", "", index=i) for i in range(rows)]
    loader = RowLoader(data, batch_size=batch, shuffle=shuffle, drop_last=drop_last, seed=5)
    expected = [row.index for _ in range(4 * loader.batches_per_epoch) for row in loader.next_batch()]
    agent = DatasetAgent(data, length_reward, batch_size=batch, shuffle=shuffle, drop_last=drop_last, seed=5)
    assert [agent.problem(i).index for i in range(len(expected))] == expected
    backwards = [agent.problem(i).index for i in reversed(range(len(expected)))]
    assert backwards == expected[::-1]  # pure in the index


def test_a_dataset_that_cannot_be():
    with pytest.raises(ValueError, match="no rows"):
        DatasetAgent([], length_reward)
    with pytest.raises(ValueError, match="no batch would be full"):
        DatasetAgent([Row("q", "")], length_reward, batch_size=2)


def test_a_reward_that_fails_fails_the_attempt():
    def broken(prompt, completion, row):
        raise RuntimeError("mine")

    agent = DatasetAgent([Row("q", "")], broken)
    group = asyncio.run(agent.group(scripted(lambda *_: ["x"]), 0, 1))
    assert group.members[0].failure.startswith(RewardError.__name__) and "mine" in group.members[0].failure
