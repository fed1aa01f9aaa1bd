"""Megatron-Core's own model as a generator, beside Transformers: greedy tokens, log-probabilities, the form over it."""

from __future__ import annotations

import asyncio

import pytest
import torch
from transformers import AutoModelForCausalLM

from areal_like.alloc import ModelAllocation
from areal_like.config import MicroBatchConfig, TrainEngineConfig
from areal_like.engines.base import GenerationRequest, SamplingParams
from areal_like.engines.huggingface import HuggingFaceEngine
from areal_like.rollout.inference.megatron import MegatronInference
from areal_like.runtime.local import WorkerGroup

PROMPTS = [[5, 9, 100], [17], [40, 41, 42, 43, 44, 45, 46], [5, 9, 100]]


class NoTokenizer:
    chat_template = None

    def decode(self, ids, **kwargs):
        return " ".join(map(str, ids))


def section(text, folder):
    few = MicroBatchConfig(max_tokens_per_mb=32)  # several micro-batches
    return TrainEngineConfig(backend=text, path=str(folder), dtype="float32", mb_spec=few, optimizer=None)


def start(text, folder, world_size):
    kwargs = {
        "allocation": ModelAllocation.parse(text),
        "config": section(text, folder),
        "device": "cpu",
        "seed": 1,
    }
    group = WorkerGroup.start(
        "generator", "areal_like.engines.megatron.generation:MegatronGenerator", kwargs, world_size
    )
    group.call("initialize")
    return group


@pytest.mark.parametrize(
    ("text", "kind", "world_size"),
    [
        ("megatron:d1", "qwen3", 1),
        pytest.param("megatron:t2", "qwen2", 2, marks=pytest.mark.slow),
        pytest.param("megatron:p2", "llama-tied", 2, marks=pytest.mark.slow),
        pytest.param("megatron:c2", "qwen3", 2, marks=pytest.mark.slow),
        pytest.param("megatron:(attn:d1t2|ffn:e2)", "qwen3-moe", 2, marks=pytest.mark.slow),
    ],
)
def test_tokens_and_log_probs_equal_transformers(models, text, kind, world_size):
    theirs = AutoModelForCausalLM.from_pretrained(models(kind))
    ours = HuggingFaceEngine(ModelAllocation.parse("huggingface:d1"), None, str(models(kind)))
    ours.initialize()
    with start(text, models(kind), world_size) as group:
        greedy = [GenerationRequest(p, SamplingParams(12, greedy=True), i) for i, p in enumerate(PROMPTS)]
        done = {}
        while len(done) < len(greedy):
            per_rank = group.call("advance", [] if done else greedy, 100)
            assert all(answer == per_rank[0] for answer in per_rank)
            done |= {c.request_id: c for c in per_rank[0]}
        for i, prompt in enumerate(PROMPTS):
            expected = theirs.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=12)[0, len(prompt) :]
            assert done[i].token_ids == expected.tolist()
            with torch.no_grad():
                logits = theirs(torch.tensor([prompt + done[i].token_ids])).logits[0, len(prompt) - 1 : -1]
            wanted = logits.log_softmax(-1).gather(1, expected[:, None])[:, 0]
            torch.testing.assert_close(torch.tensor(done[i].log_probs), wanted, atol=1e-4, rtol=0)
        # Sampled: the same draws from the same distribution as the rollout engine.
        drawn = SamplingParams(10, temperature=0.8, top_k=20, seed=4)
        (asked,) = group.call("advance", [GenerationRequest(PROMPTS[0], drawn)], 100)[0]
        assert asked.token_ids == ours.generate([GenerationRequest(PROMPTS[0], drawn)])[0].token_ids

        model = MegatronInference(
            group, NoTokenizer(), SamplingParams(10, temperature=0.8), max_requests=2, vocabulary=131, context=256
        )

        async def ask():
            return await asyncio.gather(*(model.agenerate(p, seed=i) for i, p in enumerate(PROMPTS)))

        wanted = ours.generate(
            [GenerationRequest(p, SamplingParams(10, temperature=0.8, seed=i)) for i, p in enumerate(PROMPTS)]
        )
        assert [g.token_ids for g in asyncio.run(ask())] == [c.token_ids for c in wanted]
        model.close()


def test_what_it_is_not(models):
    from areal_like.engines.megatron.generation import MegatronGenerator

    config = section("megatron:d2", models("qwen3"))
    with pytest.raises(ValueError, match="megatron:d2: Megatron-Core's own model generates in one replica"):
        MegatronGenerator(ModelAllocation.parse("megatron:d2"), config, "cpu", 0)
