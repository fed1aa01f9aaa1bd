"""The OpenAI form against a real HTTP server in its own process (a stand-in for vLLM and sglang, see `stand_in.py`)."""

from __future__ import annotations

import asyncio
import socket

import httpx
import pytest

from areal_like.alloc import ModelAllocation
from areal_like.engines.base import GenerationRequest, SamplingParams
from areal_like.engines.huggingface import HuggingFaceEngine
from areal_like.rollout.inference.base import Capability, InferenceError
from areal_like.rollout.inference.openai import OpenAIInference

PROMPT = list(b"<user>How many?\n<assistant>")


def form(url, *, model="tiny", sampling=None, **options):
    return OpenAIInference(url, model, sampling or SamplingParams(12, seed=3), **options)


def last_seen(server):
    return httpx.get(server.removesuffix("/v1") + "/seen").json()


@pytest.fixture(scope="module")
def engine(model_folder):
    engine = HuggingFaceEngine(ModelAllocation.parse("huggingface:d1"), None, str(model_folder), str(model_folder))
    engine.initialize()
    return engine


@pytest.mark.parametrize(
    ("dialect", "log_probs", "arguments"),
    [
        ("vllm", "raw", {}),
        ("vllm", "raw", {"temperature": 0}),
        ("vllm", "raw", {"top_k": 3, "min_new_tokens": 9, "stop_token_ids": (60, 61)}),
        ("vllm", "processed", {"temperature": 0.7, "seed": 5}),
        ("sglang", "scaled", {"temperature": 1.4, "top_p": 0.8, "top_k": 40}),
    ],
)
@pytest.mark.parametrize("prompt", ["How many?", [{"role": "user", "content": "How many?"}], PROMPT])
def test_tokens_and_log_probs_are_those_of_the_engine(server, engine, prompt, dialect, log_probs, arguments):
    model = form(server, dialect=dialect, log_probs=log_probs)
    found = model.generate(prompt, **arguments)
    (wanted,) = engine.generate(
        [GenerationRequest(PROMPT, SamplingParams(**{"max_new_tokens": 12, "seed": 3} | arguments))]
    )
    assert (found.prompt_ids, found.token_ids, found.finish_reason) == (PROMPT, wanted.token_ids, wanted.finish_reason)
    assert found.log_probs == pytest.approx(wanted.log_probs, abs=1e-5) and found.versions == []
    assert found.text == engine.tokenizer.decode(found.token_ids, skip_special_tokens=True)
    assert model.capabilities == set(Capability)


def test_what_is_sent(server):
    form(server, dialect="vllm").generate("a", top_k=7, min_new_tokens=2, stop_token_ids=(9,), stop=("x",), top_p=0.5)
    body = last_seen(server)["seen"][-1]
    assert body == {
        "path": "/v1/chat/completions",
        "authorization": None,
        "model": "tiny",
        "messages": [{"role": "user", "content": "a"}],
        "max_tokens": 12,
        "min_tokens": 2,
        "temperature": 1.0,
        "top_p": 0.5,
        "top_k": 7,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "seed": 3,
        "stop": ["x"],
        "stop_token_ids": [9],
        "include_stop_str_in_output": True,
        "return_token_ids": True,
    }
    form(server).generate("a", greedy=True, temperature=0.3)
    body = last_seen(server)["seen"][-1]
    assert body.keys() == {"path", "authorization", "model", "messages", "max_tokens", "temperature", "top_p", "seed"}
    assert body["temperature"] == 0.0
    form(server, dialect="sglang").generate([65])
    body = last_seen(server)["seen"][-1]
    assert (body["prompt"], body["top_k"], body["no_stop_trim"]) == ([65], -1, True) and "logprobs" not in body


@pytest.mark.parametrize(
    ("options", "arguments", "said"),
    [
        ({}, {"top_k": 3}, "the dialect openai does not take top_k; vllm, sglang do"),
        ({}, {"min_new_tokens": 3}, "does not take min_new_tokens"),
        ({}, {"stop_token_ids": (3,)}, "does not take stop_token_ids"),
        ({"dialect": "vllm", "log_probs": "raw"}, {"temperature": 0.5}, "of temperature 1, not of 0.5"),
        ({"dialect": "vllm", "log_probs": "processed"}, {"top_k": 5}, "what top_p and top_k leave"),
        ({"dialect": "vllm", "log_probs": "processed"}, {"top_p": 0.5}, "what top_p and top_k leave"),
        ({}, {"temperature": -1}, "temperature is not negative"),
        ({}, {"top_p": 0}, "top_p lies in"),
        ({}, {"max_new_tokens": 0}, "max_new_tokens is at least 1"),
        ({}, {"stop": ("",)}, "a stop string is not empty"),
    ],
)
def test_what_cannot_be_honoured_is_refused(options, arguments, said):
    with pytest.raises(ValueError, match=said.replace(".", r"\.")):
        form("http://127.0.0.1:1/v1", **options).generate("a", **arguments)


def test_what_a_form_cannot_be():
    for options, said in [
        ({"dialect": "tgi"}, "unknown dialect 'tgi'; there are openai, vllm, sglang"),
        ({"log_probs": "raw"}, "the dialect openai gives none"),
        ({"dialect": "sglang", "log_probs": "raw"}, "gives 'scaled'"),
        ({"api_key_variable": "NO_SUCH_KEY"}, "NO_SUCH_KEY holds no API key"),
    ]:
        with pytest.raises(ValueError, match=said):
            form("http://127.0.0.1:1/v1", **options)
    with pytest.raises(ValueError, match="nothing to continue"):
        form("http://127.0.0.1:1/v1").generate([])
    assert form("http://x/v1").capabilities == {Capability.RAW}
    assert form("http://x/v1", dialect="vllm").capabilities == {Capability.RAW, Capability.TOKENS}


@pytest.mark.parametrize("model", ["fail-503-2", "fail-429-1", "drop-2"])
def test_failures_that_pass_are_asked_again(server, model):
    before = len(last_seen(server)["seen"])
    assert form(server, model=model).generate("a").text
    assert len(last_seen(server)["seen"]) - before == 1 + int(model[-1])


def test_failures_that_stay(server):
    with pytest.raises(
        InferenceError, match=rf"{server}/chat/completions failed 2 times, .* status 500: .*out of order"
    ):
        form(server, model="fail-500-99", retries=1).generate("a")
    before = len(last_seen(server)["seen"])
    with pytest.raises(InferenceError, match="refused the request with status 404"):
        form(server, model="fail-404-99").generate("a")
    assert len(last_seen(server)["seen"]) == before + 1  # it would be refused again
    with pytest.raises(InferenceError, match=r"no answer within 0\.2 s"):
        form(server, model="hang", timeout=0.2).generate("a")
    with pytest.raises(InferenceError, match="not JSON: <html>"):
        form(server, model="text").generate("a")
    with pytest.raises(InferenceError, match=r"without what the dialect vllm promises \(KeyError: 'token_ids'\)"):
        form(server, model="plain", dialect="vllm").generate("a")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        nobody = f"http://127.0.0.1:{free.getsockname()[1]}/v1"
        with pytest.raises(InferenceError, match=rf"{nobody}/chat/completions failed 1 times.*ConnectError"):
            form(nobody, retries=0).generate("a")


def test_the_key_is_sent_and_never_shown(server, monkeypatch):
    monkeypatch.setenv("SOME_KEY", "s3cret-value")
    model = form(server, api_key_variable="SOME_KEY")
    model.generate("a")
    assert last_seen(server)["seen"][-1]["authorization"] == "Bearer s3cret-value"
    with pytest.raises(InferenceError) as caught:  # this server repeats what it was sent
        form(server, model="fail-401-9", api_key_variable="SOME_KEY").generate("a")
    assert "Bearer ***" in str(caught.value) and "s3cret" not in str(caught.value) + repr(vars(caught.value))


def test_many_calls_at_once_within_the_bound(server):
    async def many():
        model = form(server, model="slow", concurrency=3)
        answers = await asyncio.gather(*(model.agenerate("a", seed=i) for i in range(9)))
        await model.aclose()
        return answers

    assert len({answer.text for answer in asyncio.run(many())}) > 1
    assert last_seen(server)["most"] == 3
