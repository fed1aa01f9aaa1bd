"""Continuous batching over calls: requests join and leave an engine that goes on, and nothing else changes."""

from __future__ import annotations

import functools
import random

import pytest
import torch
from transformers import AutoModelForCausalLM

from areal_like.alloc import ModelAllocation
from areal_like.engines.base import Completion, GenerationRequest, SamplingParams, WeightBucket
from areal_like.engines.huggingface import HuggingFaceEngine
from areal_like.engines.huggingface.decoding import Limits
from areal_like.engines.huggingface.slots import SlotCache


def make_engine(folder, **kwargs) -> HuggingFaceEngine:
    engine = HuggingFaceEngine(ModelAllocation.parse("huggingface:d1"), config=None, model_path=str(folder), **kwargs)
    engine.initialize()
    return engine


def long_tailed(count: int, *, members: int = 3, seed: int = 0, prompt: int = 24, answer: int = 60):
    """Groups of `members` requests with the same prompt, each with its own seed and length."""
    draw = random.Random(seed)
    requests = []
    for i in range(count):
        if i % members == 0:
            ids = [draw.randrange(8, 256) for _ in range(draw.randint(1, prompt))]
        length = 1 + int(answer * draw.random() ** 3)
        sampling = SamplingParams(length, min_new_tokens=length, seed=i, temperature=0.9)
        requests.append(GenerationRequest(list(ids), sampling, request_id=i))
    return requests


def again(request: GenerationRequest, c: Completion) -> GenerationRequest:
    return GenerationRequest(request.prompt_ids, request.sampling, c.request_id, c.token_ids, c.log_probs, c.versions)


def runs_out(left) -> bool:
    return next(left, None) is None


def serve(engine, requests, slots: int, *, chance: random.Random) -> dict[int, Completion]:
    """As a driver does: at most `slots` at once, calls that are interrupted anywhere, now and then a withdrawal."""
    asked = {r.request_id: r for r in requests}
    queue, held, done = list(requests), 0, {}
    while queue or held:
        count = min(len(queue), slots - held, chance.randint(1, slots))
        fresh, queue = queue[:count], queue[count:]
        left = iter(range(chance.choice([0, 1, 3, 1000])))
        ended = engine.advance(fresh, functools.partial(runs_out, left))
        held += len(fresh) - len(ended)
        done |= {c.request_id: c for c in ended}
        if chance.random() < 0.1:
            back = engine.withdraw()
            assert len(back) == held and {c.finish_reason for c in back} <= {"interrupted"}
            queue, held = [again(asked[c.request_id], c) for c in back] + queue, 0
    return done


@pytest.mark.parametrize(
    ("kind", "limits"),
    [("llama", None), ("qwen3-moe", Limits(sequences=3)), ("qwen3", Limits(cache_bytes=6 * 60 * 1024))],
)
def test_joining_leaving_interrupting_and_withdrawing_change_nothing(models, kind: str, limits) -> None:
    engine = make_engine(models(kind))
    requests = long_tailed(18)
    alone = [engine.generate([request])[0] for request in requests]
    engine.limits = limits
    done = serve(engine, requests, 5, chance=random.Random(1))
    assert sorted(done) == list(range(18)) and engine.decoder is None
    for request, expected in zip(requests, alone, strict=True):
        found = done[request.request_id]
        assert (found.token_ids, found.finish_reason) == (expected.token_ids, expected.finish_reason)
        assert found.log_probs == pytest.approx(expected.log_probs, abs=1e-5)


def test_a_call_returns_what_ends_first_and_keeps_the_rest(models) -> None:
    engine = make_engine(models())
    ask = [GenerationRequest([9, 8], SamplingParams(n, min_new_tokens=n, seed=n), n) for n in (9, 3, 6)]
    assert [c.request_id for c in engine.advance(ask)] == [3]
    late = GenerationRequest([30, 31], SamplingParams(2, min_new_tokens=2), 2)
    assert [c.request_id for c in engine.advance([late])] == [2]
    assert [c.request_id for c in engine.advance([])] == [6]
    assert [(c.request_id, len(c.token_ids), c.finish_reason) for c in engine.advance([])] == [(9, 9, "length")]
    assert engine.advance([]) == [] == engine.withdraw()
    whole = GenerationRequest([9], SamplingParams(2), 4, [10, 11], [-1.0, -1.0], [0, 0])
    assert engine.advance([whole]) == [Completion(4, [10, 11], [-1.0, -1.0], [0, 0], "length")]


def test_an_interruption_returns_nothing_but_loses_nothing(models) -> None:
    engine = make_engine(models())
    assert (
        engine.advance([GenerationRequest([9, 8], SamplingParams(6, min_new_tokens=6, seed=1), 1)], lambda: True) == []
    )
    (back,) = engine.withdraw()
    assert (len(back.token_ids), back.finish_reason) == (1, "interrupted")  # at least a token a call


def test_a_bad_request_is_refused_and_the_others_go_on(models) -> None:
    engine = make_engine(models())
    engine.advance([GenerationRequest([9, 8], SamplingParams(6, min_new_tokens=6), 1)], lambda: True)
    with pytest.raises(ValueError, match="request 7: prompt_ids is empty"):
        engine.advance([GenerationRequest([9], SamplingParams(6), 2), GenerationRequest([], SamplingParams(6), 7)])
    assert [c.request_id for c in engine.withdraw()] == [1]


def test_weights_do_not_change_under_requests(models) -> None:
    engine = make_engine(models())
    engine.advance([GenerationRequest([9, 8], SamplingParams(6, min_new_tokens=6), 1)], lambda: True)
    bucket = WeightBucket({name: tensor.clone() for name, tensor in engine.updates.targets.items()})
    for act in (lambda: engine.update_weights(bucket), lambda: engine.finish_update(1), lambda: engine.generate([])):
        with pytest.raises(RuntimeError, match=r"holds 1 unfinished requests: call withdraw\(\) first"):
            act()
    engine.withdraw()
    engine.update_weights(bucket)
    engine.finish_update(1)
    assert engine.generate([GenerationRequest([9], SamplingParams(1))])[0].versions == [1]


def test_logits_that_are_not_finite_leave_nothing_behind(models) -> None:
    engine = make_engine(models())
    engine.advance([GenerationRequest([9, 8], SamplingParams(6, min_new_tokens=6), 1)], lambda: True)
    engine.model.lm_head.weight[3] = float("nan")
    with pytest.raises(FloatingPointError, match="NaN"):
        engine.advance([])
    assert engine.withdraw() == []


def test_members_that_come_later_share_the_prefill_of_a_live_one(models, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(models())
    shapes, decoder = [], engine.model.get_decoder()
    forward = decoder.forward
    monkeypatch.setattr(
        decoder, "forward", lambda *a, **kw: (shapes.append(tuple(kw["input_ids"].shape)), forward(*a, **kw))[1]
    )
    prompt = [20 + i for i in range(10)]
    member = [GenerationRequest(prompt, SamplingParams(8, min_new_tokens=8, seed=i), i) for i in range(3)]
    for request in member:
        engine.advance([request], lambda: True)
    assert shapes == [(1, 10), (2, 1), (3, 1)]
    done = {}
    while len(done) < 3:
        done |= {c.request_id: c for c in engine.advance([])}
    model = AutoModelForCausalLM.from_pretrained(models())
    for found in done.values():  # log-probabilities by one forward over the whole
        with torch.no_grad():
            logits = model(torch.tensor([prompt + found.token_ids])).logits[0, len(prompt) - 1 : -1]
        expected = logits.log_softmax(-1)[torch.arange(8), torch.tensor(found.token_ids)]
        torch.testing.assert_close(torch.tensor(found.log_probs), expected, atol=1e-5, rtol=0)


def test_memory_follows_what_is_live(models, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long sequence widens every slot; when it has gone, the width goes too, although the engine is never empty."""
    sizes, resize = [], SlotCache.resize

    def record(self, slots: int, columns: int) -> None:
        resize(self, slots, columns)
        sizes.append((slots, columns))

    monkeypatch.setattr(SlotCache, "resize", record)
    engine = make_engine(models())
    engine.limits = Limits(cache_bytes=2 * 254 * 512)
    engine.advance([GenerationRequest([9] * 190, SamplingParams(20, min_new_tokens=20), 0)], lambda: True)
    ended = set()
    for i in range(1, 7):  # never empty: each ends after the next one has come
        new = GenerationRequest([9 + i], SamplingParams(20 + i, min_new_tokens=20 + i), i)
        ended |= {c.request_id for c in engine.advance([new])}
        assert engine.decoder is not None
    assert 0 in ended and max(columns for _, columns in sizes) >= 210
    more = [GenerationRequest([30 + i], SamplingParams(9, min_new_tokens=9), 10 + i) for i in range(3)]
    engine.advance(more, lambda: True)
    assert len(engine.decoder.live) > 3  # beside the long one there was room for one
    assert all(slots * columns * 512 <= engine.limits.cache_bytes for slots, columns in sizes)
