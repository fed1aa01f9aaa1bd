"""AReaL's workflows: what they are given, and what they may return."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import pytest
import torch
from doubles import ScriptedEpisode

from areal_like.data.rows import Row
from areal_like.rollout.agents.workflow import ModelRequest, WorkflowAgent, sampling_arguments
from areal_like.rollout.inference.base import Capability
from areal_like.rollout.trajectories import TokenRollout, Turn

ROWS = [Row("1 + 1?", "2", {"level": 3}, 0, "mine")]


@dataclass
class Hyperparameters:
    """As AReaL's class of this kind, with one key that nothing here knows."""

    n_samples: int = 1
    max_new_tokens: int = 16384
    max_tokens: int = 32768
    top_k: int = int(1e8)
    temperature: float = 1.0
    greedy: bool = False
    stop_token_ids: list[int] = field(default_factory=list)
    stop: list[str] | None = None
    frequency_penalty: float = 0.0
    fancy: list[int] = field(default_factory=list)


class TwoTurns:
    """In the style of AReaL's multi-turn workflow."""

    def __init__(self, change=None):
        self.change = change or (lambda trajectory: trajectory)

    async def arun_episode(self, engine, data):
        ids = [ord(c) for c in data["messages"][0]["content"]]
        seq, logprobs, mask, versions, turns = [], [], [], [], []
        for turn in range(2):
            response = await engine.agenerate(ModelRequest(ids, Hyperparameters(temperature=0.5, stop=["."])))
            new = response.input_tokens[len(seq) :]
            seq += new + response.output_tokens
            logprobs += [0.0] * len(new) + response.output_logprobs
            mask += [0] * len(new) + [1] * response.output_len
            versions += [-1] * len(new) + response.output_versions
            turns += [-1] * len(new) + [turn] * response.output_len
            ids = [*seq, ord("?")]
        tensors = {
            "input_ids": torch.tensor(seq, dtype=torch.int32),
            "logprobs": torch.tensor(logprobs),
            "loss_mask": torch.tensor(mask, dtype=torch.int32),
            "versions": torch.tensor(versions, dtype=torch.int32),
            "turn_ids": torch.tensor(turns, dtype=torch.int32),
            "attention_mask": torch.ones(len(seq), dtype=torch.bool),
            "rewards": torch.tensor(0.25 if data["answer"] == "2" and data["level"] == 3 else -1.0),
        }
        return self.change({name: tensor.unsqueeze(0) for name, tensor in tensors.items()})


def run(workflow, texts=("no", "yes!"), finish="stop"):
    agent = WorkflowAgent(workflow, ROWS, name="mine")
    episode = ScriptedEpisode(agent.problem(0), list(texts), finish=finish)
    return asyncio.run(agent.run(episode)), episode


def test_tensors_become_turns():
    rollout, episode = run(TwoTurns(), finish="length")
    assert rollout.reward == 0.25
    for made, recorded in zip(rollout.turns, episode.turns, strict=True):
        assert made == recorded  # prompts, tokens, log-probabilities, versions, why they ended
    assert [turn.finish_reason for turn in rollout.turns] == ["stop", "length"] and rollout.truncated
    assert episode.sampling[0] == {
        "max_new_tokens": 16384,
        "temperature": 0.5,
        "greedy": False,
        "top_k": 0,
        "stop": (".",),
    }


def test_padding_is_left_out():
    def pad(trajectory):
        padded = {name: torch.nn.functional.pad(value, (2, 3)) for name, value in trajectory.items()}
        return {**padded, "rewards": trajectory["rewards"]}

    assert run(TwoTurns(pad))[0] == run(TwoTurns())[0]


def test_turns_that_touch_are_told_apart_by_their_numbers():
    ids = {"input_ids": [[1, 2, 3]], "loss_mask": [[0, 1, 1]], "logprobs": [[0, -1, -2]], "versions": [[-1, 4, 5]]}

    async def workflow(engine, data):
        return {name: torch.tensor(v) for name, v in {**ids, "turn_ids": [[-1, 0, 1]]}.items()} | {"rewards": 1.0}

    rollout, _ = run(workflow)
    assert rollout.turns == [Turn([1], [2], [-1], [4], "stop"), Turn([1, 2], [3], [-2], [5], "stop")]


def without(name):
    return lambda trajectory: {key: value for key, value in trajectory.items() if key != name}


def instead(**values):
    return lambda trajectory: {**trajectory, **{name: f(trajectory) for name, f in values.items()}}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (without("versions"), "lacks versions"),
        (without("logprobs"), "lacks logprobs"),
        (lambda t: {"rewards": t["rewards"]}, "lacks input_ids and loss_mask and logprobs and versions"),
        (instead(pixel_values=lambda t: 1), "pixel_values, which nothing"),
        (instead(input_ids=lambda t: t["input_ids"].repeat(2, 1)), r"input_ids of the trajectory is \(2, 13\)"),
        (instead(input_ids=lambda t: t["input_ids"][0]), r"input_ids of the trajectory is \(13,\)"),
        (instead(logprobs=lambda t: t["logprobs"][:, 1:]), "different lengths"),
        (instead(loss_mask=lambda t: t["loss_mask"] * 0), "nothing was drawn"),
        (instead(loss_mask=lambda t: t["loss_mask"] * 0 + 1), "follows no prompt"),
        (instead(versions=lambda t: t["versions"] * 0 - 1), "version -1"),
        (instead(logprobs=lambda t: t["logprobs"] + 1), "positive or not finite"),
        (instead(rewards=lambda t: torch.ones(1, 13)), "one finite reward"),
        (instead(rewards=lambda t: torch.tensor([float("nan")])), "one finite reward"),
    ],
)
def test_tensors_that_cannot_be_trained_on(change, words):
    with pytest.raises(ValueError, match=words):
        run(TwoTurns(change))


def test_a_function_that_returns_a_reward():
    async def workflow(engine, data):
        answer = await engine.agenerate(data["messages"], temperature=0)
        return float(answer.text == data["answer"])

    reward, episode = run(workflow, ["2"])
    assert reward == 1.0 and episode.sampling == [{"temperature": 0}]
    assert run(workflow, ["3"])[0] == 0.0


def test_other_outcomes():
    made = TokenRollout([], 1.0)

    async def rejects(engine, data):
        await engine.agenerate("hello")

    async def makes(engine, data):
        return made

    async def wrong(engine, data):
        return "good"

    rollout, episode = run(rejects, ["x"])
    assert rollout.failed and "rejected" in rollout.failure and rollout.turns == episode.turns != []
    assert run(makes)[0] is made
    with pytest.raises(TypeError, match="returned a str; it returns a reward"):
        run(wrong)
    with pytest.raises(TypeError, match="int is neither"):
        WorkflowAgent(3, ROWS)


def test_requests_that_cannot_be_honoured():
    assert sampling_arguments(None, 5) == {}
    assert sampling_arguments({"max_tokens": 10, "max_new_tokens": 100, "top_k": -1}, 4) == {
        "max_new_tokens": 6,
        "top_k": 0,
    }
    assert sampling_arguments({"stop_token_ids": [3], "top_k": 5}, 4) == {"stop_token_ids": (3,), "top_k": 5}
    for gconfig, words in [
        ({"n_samples": 4}, "n_samples = 4"),
        (Hyperparameters(n_samples=2), "n_samples = 2"),
        (Hyperparameters(frequency_penalty=0.1), "frequency_penalty = 0.1"),
        (Hyperparameters(fancy=[1]), r"fancy = \[1\]"),
        ({"fancy": None}, "fancy = None"),
        ({"max_tokens": 4}, "no room"),
    ]:
        with pytest.raises(ValueError, match=words):
            sampling_arguments(gconfig, 4)

    @dataclass
    class WithImages(ModelRequest):
        image_data: list[str] = field(default_factory=lambda: ["cat.png"])

    async def workflow(engine, data):
        await engine.agenerate(WithImages([1]))

    with pytest.raises(ValueError, match="image_data"):
        run(workflow)


def test_it_needs_tokens():
    assert WorkflowAgent(TwoTurns(), ROWS).needs == {Capability.TOKENS, Capability.LOG_PROBS}
