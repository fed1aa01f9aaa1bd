"""The form over the run's own rollout engine: real workers, a real tiny model; the toy engine where timing matters."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from pathlib import Path

import pytest

from areal_like.alloc import ModelAllocation
from areal_like.engines.base import GenerationRequest, SamplingParams
from areal_like.engines.huggingface import HuggingFaceEngine
from areal_like.rollout.inference.base import Capability, InferenceError, InferenceInterface, require
from areal_like.rollout.inference.engine import EngineInference
from areal_like.runtime.local import WorkerError, WorkerGroup

TOYS = str(Path(__file__).parents[2] / "trainers")
if TOYS not in sys.path:
    sys.path.insert(0, TOYS)


@contextlib.contextmanager
def toy_model(tokenizer, *, delay=0.0, replicas=1, max_requests=8, tokens=4):
    with WorkerGroup.start("rollout", "toy_engines:ToyInference", {"delay": delay}, replicas) as group:
        model = EngineInference(
            group, tokenizer, SamplingParams(tokens), max_requests=max_requests, vocabulary=256, context=64
        )
        try:
            yield model, group
        finally:
            model.replicas.close()


def test_what_comes_back_is_what_the_engine_draws(model_folder, tokenizer):
    options = {
        "allocation": ModelAllocation.parse("huggingface:d2"),
        "config": None,
        "model_path": str(model_folder),
        "tokenizer_path": str(model_folder),
    }
    alone = HuggingFaceEngine(**options)
    alone.initialize()
    chat = [{"role": "user", "content": "How many?"}]
    encoded = list(b"<user>How many?\n<assistant>")
    prompts = ["How many?", chat, encoded, [*encoded, 65]]
    wanted = [
        alone.generate([GenerationRequest(ids, SamplingParams(12, temperature=0.9, seed=seed))])[0]
        for ids in (encoded, encoded, encoded, [*encoded, 65])
        for seed in range(4)
    ]
    with WorkerGroup.start("rollout", "areal_like.engines.huggingface:HuggingFaceEngine", options, 2) as group:
        group.call("initialize")
        sampling = SamplingParams(12, temperature=0.9)
        model = EngineInference(group, tokenizer, sampling, max_requests=3, vocabulary=256, context=512)

        async def ask():
            return await asyncio.gather(*(model.agenerate(p, seed=seed) for p in prompts for seed in range(4)))

        found = asyncio.run(ask())
        for ours, theirs in zip(found, wanted, strict=True):
            assert (ours.token_ids, ours.finish_reason) == (theirs.token_ids, theirs.finish_reason)
            assert ours.log_probs == pytest.approx(theirs.log_probs, abs=1e-5)
            assert ours.versions == [0] * len(ours.token_ids)
            assert ours.text == tokenizer.decode(ours.token_ids, skip_special_tokens=True)
        assert [g.prompt_ids for g in found[::4]] == [encoded] * 3 + [[*encoded, 65]]
        assert model.generate(chat, seed=2).token_ids == wanted[2].token_ids  # without an event loop
        model.replicas.pause()
        model.replicas.close()


def test_calls_of_one_turn_of_the_loop_are_one_submission(tokenizer):
    """A group stays together although each member is a call of its own."""
    with toy_model(tokenizer, replicas=2) as (model, group):

        async def ask():
            return await asyncio.gather(*(model.agenerate([10 + i // 4]) for i in range(8)))

        asyncio.run(ask())
        homes = [{i // 4 for held in state[2] for i in held} for state in group.call("state")]
        assert sorted(map(sorted, homes)) == [[0], [1]]


def test_pausing_and_resuming_under_calls(tokenizer):
    with toy_model(tokenizer, delay=0.005, tokens=40) as (model, _):

        async def ask():
            calls = [asyncio.ensure_future(model.agenerate([9 + i])) for i in range(10)]
            for _ in range(3):
                await asyncio.sleep(0.05)
                await asyncio.to_thread(model.replicas.pause)
                model.replicas.resume()
            return await asyncio.gather(*calls)

        assert [len(g.token_ids) for g in asyncio.run(ask())] == [40] * 10


def test_a_cancelled_call_leaves_the_queue_or_is_dropped(tokenizer):
    with toy_model(tokenizer, delay=0.01, max_requests=2) as (model, group):

        async def ask():
            calls = [asyncio.ensure_future(model.agenerate([9], max_new_tokens=n)) for n in (10**6, 150, 42, 3)]
            await asyncio.sleep(0.05)  # the first two are being drawn, the others wait
            calls[0].cancel()
            calls[2].cancel()
            return await asyncio.gather(*calls, return_exceptions=True)

        first, second, third, last = asyncio.run(ask())
        assert isinstance(first, asyncio.CancelledError) and isinstance(third, asyncio.CancelledError)
        assert (len(second.token_ids), len(last.token_ids)) == (150, 3)
        model.replicas.pause()
        assert {i for held in group.call("state")[0][2] for i in held} == {0, 1, 3}


def test_what_does_not_fit_is_refused_for_one_call_alone(tokenizer):
    with toy_model(tokenizer) as (model, _):
        for prompt, arguments, error, said in [
            ([9] * 64, {}, ValueError, "the prompt has 64 tokens, the model's context 64"),
            ([9, 256], {}, ValueError, "token id 256 is not in the model's vocabulary of 256"),
            ([9, -1], {}, ValueError, "token id -1"),
            ([], {}, ValueError, "nothing to continue"),
            ("a", {"top_p": 2}, ValueError, "top_p lies in"),
            ("a", {"topp": 1}, TypeError, "no sampling argument topp"),
            ([{"role": "robot", "content": "a"}], {}, ValueError, "chat template refuses .*unknown role robot"),
        ]:
            with pytest.raises(error, match=said):
                model.generate(prompt, **arguments)
        assert len(model.generate("a").token_ids) == 4


def test_calls_fail_when_the_engine_is_gone(tokenizer):
    with toy_model(tokenizer, delay=0.01, tokens=10**6) as (model, group):

        async def ask():
            calls = [asyncio.ensure_future(model.agenerate([9])) for _ in range(3)]
            await asyncio.sleep(0.1)
            os.kill(group.process_ids[0], signal.SIGKILL)
            return await asyncio.gather(*calls, return_exceptions=True)

        for error in asyncio.run(ask()):
            assert isinstance(error, InferenceError) and isinstance(error.__cause__, WorkerError)
            assert "the rollout engine has stopped" in str(error) and "SIGKILL" in str(error)
        with pytest.raises(InferenceError, match="has stopped"):
            model.generate("a")


class TextOnly(InferenceInterface):
    capabilities = frozenset({Capability.RAW})

    async def answer(self, prompt, sampling):
        raise NotImplementedError


def test_what_an_algorithm_needs_is_checked_before_anything_starts():
    require(TextOnly(SamplingParams(1)), {Capability.RAW}, "evaluation")
    with pytest.raises(
        ValueError,
        match="the decoupled loss needs tokens and log-probabilities from the model; TextOnly gives raw text only",
    ):
        require(TextOnly(SamplingParams(1)), Capability, "the decoupled loss")
