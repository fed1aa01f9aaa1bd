"""Generation against Transformers: tokens, log-probabilities, interruption, memory limits."""

from __future__ import annotations

import random

import pytest
import torch
from transformers import AutoModelForCausalLM

from areal_like.alloc import ModelAllocation
from areal_like.engines.base import Completion, GenerationRequest, InferenceEngine, SamplingParams
from areal_like.engines.huggingface import HuggingFaceEngine
from areal_like.engines.huggingface.decoding import Limits

KINDS = ["llama", "llama-tied", "qwen2", "qwen3", "qwen3-moe"]


def make_engine(folder, **kwargs) -> HuggingFaceEngine:
    engine = HuggingFaceEngine(ModelAllocation.parse("huggingface:d1"), config=None, model_path=str(folder), **kwargs)
    engine.initialize()
    return engine


def prompts(count: int, shortest: int = 1, longest: int = 24, seed: int = 0) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(8, 256) for _ in range(draw.randint(shortest, longest))] for _ in range(count)]


def requests(count: int, *, seed: int = 0, **sampling) -> list[GenerationRequest]:
    sampling = {"max_new_tokens": 20} | sampling
    return [
        GenerationRequest(p, SamplingParams(**sampling), request_id=i) for i, p in enumerate(prompts(count, seed=seed))
    ]


def generate_alone(folder, prompt: list[int], **kwargs) -> list[int]:
    """Transformers, one sequence, no padding."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    return model.generate(torch.tensor([prompt]), do_sample=False, **kwargs)[0, len(prompt) :].tolist()


def full_log_probs(folder, prompt: list[int], generated: list[int], temperature: float = 1.0) -> torch.Tensor:
    """Of `generated`, by one forward over the whole sequence."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        logits = model(torch.tensor([prompt + generated])).logits[0, len(prompt) - 1 : -1].float()
    return (logits / temperature).log_softmax(-1)[torch.arange(len(generated)), torch.tensor(generated)]


class After:
    """Says yes to the question of number `count` and all later ones."""

    def __init__(self, count: int) -> None:
        self.left = count

    def __call__(self) -> bool:
        self.left -= 1
        return self.left < 0


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_tokens_and_log_probs_equal_transformers(models, kind: str) -> None:
    engine = make_engine(models(kind))
    assert isinstance(engine, InferenceEngine)
    asked = requests(12, greedy=True) + requests(2, greedy=True)  # two that share a prompt
    reasons = set()
    for request, completion in zip(asked, engine.generate(asked), strict=True):
        assert completion.request_id == request.request_id
        assert completion.token_ids == generate_alone(models(kind), request.prompt_ids, max_new_tokens=20)
        expected = full_log_probs(models(kind), request.prompt_ids, completion.token_ids)
        torch.testing.assert_close(torch.tensor(completion.log_probs), expected, atol=1e-5, rtol=0)
        assert completion.versions == [0] * len(completion.token_ids)
        assert completion.finish_reason == ("stop" if completion.token_ids[-1] == 7 else "length")
        reasons.add(completion.finish_reason)
    assert "length" in reasons


def test_an_end_token_ends(models) -> None:
    asked = requests(40, greedy=True, max_new_tokens=60)
    done = make_engine(models()).generate(asked)
    stopped = [c for c in done if c.finish_reason == "stop"]
    assert stopped and len(stopped) < 40
    assert all(c.token_ids.index(7) == len(c.token_ids) - 1 for c in stopped)
    assert all(7 not in c.token_ids and len(c.token_ids) == 60 for c in done if c.finish_reason == "length")


@pytest.mark.parametrize("kind", KINDS)
def test_sampled_log_probs_are_of_the_scaled_distribution(models, kind: str) -> None:
    engine = make_engine(models(kind))
    for sampling in ({"temperature": 0.7}, {"temperature": 1.3, "top_p": 0.5, "top_k": 9, "min_new_tokens": 20}):
        asked = requests(6, **sampling)
        for request, completion in zip(asked, engine.generate(asked), strict=True):
            expected = full_log_probs(
                models(kind), request.prompt_ids, completion.token_ids, request.sampling.temperature
            )
            torch.testing.assert_close(torch.tensor(completion.log_probs), expected, atol=1e-5, rtol=0)


def test_bfloat16_and_a_context_that_ends(models, tmp_path) -> None:
    AutoModelForCausalLM.from_pretrained(models(), dtype=torch.bfloat16).save_pretrained(tmp_path)
    engine = make_engine(tmp_path)
    assert engine.model.dtype == torch.bfloat16
    prompt = prompts(1, 240, 240)[0]
    [completion] = engine.generate([GenerationRequest(prompt, SamplingParams(100, min_new_tokens=100))])
    assert (len(completion.token_ids), completion.finish_reason) == (16, "length")  # the context has 256
    assert all(value == torch.tensor(value, dtype=torch.float32).item() for value in completion.log_probs)
    with pytest.raises(ValueError, match="request 5: the prompt has 256 tokens, the model's context 256"):
        engine.generate([GenerationRequest([9] * 256, SamplingParams(1), request_id=5)])


@pytest.mark.parametrize("greedy", [True, False])
@pytest.mark.parametrize("questions", [0, 1, 2, 7, 30])
def test_interrupted_and_resumed_equals_uninterrupted(models, greedy: bool, questions: int) -> None:
    engine = make_engine(models())
    asked = requests(9, greedy=greedy, seed=3, max_new_tokens=25)
    for i, request in enumerate(asked):
        request.sampling = SamplingParams(25, greedy=greedy, seed=i)
    whole = engine.generate(asked)
    first = engine.generate(asked, After(questions))
    assert {c.finish_reason for c in first} >= ({"interrupted"} if questions < 25 else set())
    assert max(len(c.token_ids) for c in first) == min(questions, 25)
    resumed = [
        GenerationRequest(r.prompt_ids, r.sampling, r.request_id, c.token_ids, c.log_probs, c.versions)
        for r, c in zip(asked, first, strict=True)
    ]
    for a, b in zip(engine.generate(resumed), whole, strict=True):
        assert (a.token_ids, a.finish_reason) == (b.token_ids, b.finish_reason)
        assert a.log_probs == pytest.approx(b.log_probs, abs=1e-5)
    assert asked[0].generated == []  # requests are left as they are


def test_a_finished_request_comes_back_as_it_is(models) -> None:
    engine = make_engine(models())
    request = GenerationRequest([9, 8], SamplingParams(3), 4, [10, 11, 12], [-1.0, -2.0, -3.0], [0, 1, 2])
    ended = GenerationRequest([9, 8], SamplingParams(3), 5, [7], [-1.0], [0])
    assert engine.generate([request, ended], After(0)) == [
        Completion(4, [10, 11, 12], [-1.0, -2.0, -3.0], [0, 1, 2], "length"),
        Completion(5, [7], [-1.0], [0], "stop"),
    ]
    assert engine.generate([]) == []


@pytest.mark.parametrize(
    "limits",
    [
        Limits(sequences=1),
        Limits(sequences=5),
        Limits(prefill_tokens=30),
        Limits(cache_bytes=6 * 70 * 512),  # six sequences of 70 tokens: later ones wait
        Limits(cache_bytes=3 * 170 * 512),  # those that grow beyond 64 columns push each other out
        Limits(cache_bytes=1),
    ],
)
def test_what_does_not_fit_waits(models, limits: Limits) -> None:
    engine = make_engine(models())
    asked = requests(23, greedy=True, max_new_tokens=90, min_new_tokens=90)
    free = engine.generate(asked)
    engine.limits = limits
    for a, b in zip(engine.generate(asked), free, strict=True):
        assert (a.token_ids, a.finish_reason) == (b.token_ids, b.finish_reason)
        assert a.log_probs == pytest.approx(b.log_probs, abs=1e-5)


def test_memory_stays_within_the_limit(models, monkeypatch: pytest.MonkeyPatch) -> None:
    from areal_like.engines.huggingface.slots import SlotCache

    sizes, resize = [], SlotCache.resize

    def record(self, slots: int, columns: int) -> None:
        resize(self, slots, columns)
        sizes.append(sum(t.nbytes for layer in self.slot_layers for t in (layer.keys, layer.values)))

    monkeypatch.setattr(SlotCache, "resize", record)
    engine = make_engine(models())
    engine.limits = Limits(cache_bytes=4 * 150 * 512)
    engine.generate(requests(30, greedy=True, max_new_tokens=90, min_new_tokens=90))
    assert len(sizes) > 1 and max(sizes) <= engine.limits.cache_bytes


def test_a_shared_prompt_is_prefilled_once(models, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(models())
    shapes = []
    decoder = engine.model.get_decoder()
    forward = decoder.forward
    monkeypatch.setattr(
        decoder, "forward", lambda *a, **kw: (shapes.append(tuple(kw["input_ids"].shape)), forward(*a, **kw))[1]
    )
    group = [GenerationRequest(p, SamplingParams(4, min_new_tokens=4)) for p in prompts(2, 10, 10) for _ in range(8)]
    engine.generate(group)
    assert shapes == [(2, 10), (16, 1), (16, 1), (16, 1)]


def test_bad_requests_are_named(models) -> None:
    engine = make_engine(models())
    good = SamplingParams(4)
    for request, said in [
        (GenerationRequest([], good, 3), "request 3: prompt_ids is empty"),
        (GenerationRequest([256], good, 3), "request 3: token id 256 is not in the model's vocabulary of 256"),
        (GenerationRequest([9], good, 3, [9], [], []), "request 3: generated, log_probs and versions differ"),
        (GenerationRequest([9], SamplingParams(4, temperature=-1), 3), "request 3: temperature"),
        (GenerationRequest([9], SamplingParams(4, top_p=0), 3), "top_p is in"),
        (GenerationRequest([9], SamplingParams(4, stop=("x",)), 3), "request 3: stop strings: no tokenizer"),
    ]:
        with pytest.raises(ValueError, match=said):
            engine.generate([request])


def test_models_that_it_does_not_have(models, tmp_path) -> None:
    from transformers import GPT2Config, Qwen2Config

    with pytest.raises(FileNotFoundError, match=r"no config\.json"):
        make_engine(tmp_path)
    GPT2Config(architectures=["GPT2LMHeadModel"]).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="GPT2LMHeadModel; the huggingface engine has LlamaForCausalLM"):
        make_engine(tmp_path)
    sliding = Qwen2Config(use_sliding_window=True, sliding_window=8, architectures=["Qwen2ForCausalLM"])
    sliding.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="sliding-window"):
        make_engine(tmp_path)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_cuda_equals_transformers(models, kind: str) -> None:
    engine = make_engine(models(kind), device="cuda")
    asked = requests(12, max_new_tokens=60)
    for request, completion in zip(asked, engine.generate(asked), strict=True):
        expected = full_log_probs(models(kind), request.prompt_ids, completion.token_ids)
        torch.testing.assert_close(torch.tensor(completion.log_probs), expected, atol=1e-3, rtol=0)
