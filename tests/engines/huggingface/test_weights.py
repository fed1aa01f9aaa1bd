"""Weight updates: what comes in is exactly what generates; a bad update is refused by name and leaves no mixture."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from areal_like.alloc import ModelAllocation
from areal_like.engines.base import GenerationRequest, SamplingParams, WeightBucket
from areal_like.engines.huggingface import HuggingFaceEngine

KINDS = ["llama", "llama-tied", "qwen2", "qwen3", "qwen3-moe"]


def make_engine(folder: Path) -> HuggingFaceEngine:
    engine = HuggingFaceEngine(ModelAllocation.parse("huggingface:d1"), config=None, model_path=str(folder))
    engine.initialize()
    return engine


def checkpoint(folder: Path) -> dict[str, torch.Tensor]:
    """The names and tensors as Transformers writes them."""
    return load_file(folder / "model.safetensors")


def buckets(tensors: dict[str, torch.Tensor], size: int = 3) -> Iterator[WeightBucket]:
    names = list(tensors)
    for i in range(0, len(names), size):
        yield WeightBucket({name: tensors[name] for name in names[i : i + size]})


def send(engine: HuggingFaceEngine, tensors: dict[str, torch.Tensor], version: int) -> None:
    for bucket in buckets(tensors):
        engine.update_weights(bucket)
    engine.finish_update(version)


def answers(engine: HuggingFaceEngine) -> list[tuple[list[int], list[float]]]:
    asked = [GenerationRequest([9 + i, 30, 8], SamplingParams(12, seed=i)) for i in range(6)]
    return [(c.token_ids, c.log_probs) for c in engine.generate(asked)]


@pytest.mark.parametrize("kind", KINDS)
def test_an_update_gives_exactly_the_other_model(models, kind: str) -> None:
    engine, other = make_engine(models(kind, 0)), make_engine(models(kind, 1))
    before, expected = answers(engine), answers(other)
    assert before != expected
    send(engine, checkpoint(models(kind, 1)), version=3)
    assert answers(engine) == expected
    send(engine, checkpoint(models(kind, 0)), version=4)
    assert answers(engine) == before


def test_versions_mark_the_tokens(models) -> None:
    engine = make_engine(models())
    request = GenerationRequest([9, 30], SamplingParams(10, min_new_tokens=10, seed=0))
    left = iter([False] * 4)
    part = engine.generate([request], lambda: next(left, True))[0]
    send(engine, checkpoint(models(seed=1)), version=7)
    request.generated, request.log_probs, request.versions = part.token_ids, part.log_probs, part.versions
    whole = engine.generate([request])[0]
    assert whole.versions == [0] * 4 + [7] * 6
    assert (whole.token_ids[:4], whole.log_probs[:4]) == (part.token_ids, part.log_probs)


@pytest.mark.parametrize("kind", ["llama-tied", "qwen2"])
def test_tied_weights(models, kind: str) -> None:
    new = checkpoint(models(kind, 1))
    assert "lm_head.weight" not in new
    embedding = new["model.embed_tokens.weight"]
    rest = {name: tensor for name, tensor in new.items() if name != "model.embed_tokens.weight"}
    expected = answers(make_engine(models(kind, 1)))
    for tensors in (  # either name or both, in any order
        {**new, "lm_head.weight": embedding.clone()},
        {"lm_head.weight": embedding.clone(), **new},
        {"lm_head.weight": embedding, **rest},
    ):
        engine = make_engine(models(kind, 0))
        send(engine, tensors, version=1)
        assert answers(engine) == expected
    for size in (1, 100):
        engine = make_engine(models(kind, 0))
        with pytest.raises(ValueError, match=r"tied to another weight of the model and differs"):
            for bucket in buckets({**new, "lm_head.weight": embedding + 1}, size):
                engine.update_weights(bucket)


BAD = {
    "unknown": (lambda t: t | {"model.extra": torch.zeros(2)}, "the model has no weight 'model.extra'"),
    "shape": (
        lambda t: t | {"model.norm.weight": torch.zeros(65)},
        r"'model.norm.weight' has shape \(65,\), the model's has \(64,\)",
    ),
    "dtype": (lambda t: t | {"model.norm.weight": torch.ones(64, dtype=torch.int8)}, "'model.norm.weight' has dtype"),
    "missing": (
        lambda t: {name: tensor for name, tensor in t.items() if name != "model.norm.weight"},
        "the update lacks 1 of 21 weights: model.norm.weight",
    ),
}


@pytest.mark.parametrize("fault", BAD)
def test_a_bad_update_is_refused_and_only_a_whole_one_helps(models, fault: str) -> None:
    engine = make_engine(models())
    before = answers(engine)
    spoil, said = BAD[fault]
    with pytest.raises(ValueError, match=said):
        send(engine, spoil(checkpoint(models(seed=1))), version=1)
    with pytest.raises(RuntimeError, match=r"cannot generate: an update of the weights .* send a complete update"):
        answers(engine)
    with pytest.raises(ValueError, match="the update lacks"):  # the end of the void update does not pass for one
        engine.finish_update(1)
    assert engine.version == 0
    send(engine, checkpoint(models()), version=2)
    assert answers(engine) == before
    assert engine.version == 2


def test_an_unfinished_or_doubled_update(models) -> None:
    engine = make_engine(models())
    first, *others = buckets(checkpoint(models(seed=1)))
    engine.update_weights(first)
    with pytest.raises(RuntimeError, match="has begun and is not finished"):
        answers(engine)
    with pytest.raises(ValueError, match="came twice in one update"):
        engine.update_weights(first)
    for bucket in others:
        engine.update_weights(bucket)
    with pytest.raises(ValueError, match="the update lacks"):
        engine.finish_update(1)


def test_a_bucket_is_taken_whole_or_not_at_all(models) -> None:
    engine = make_engine(models())
    weight = engine.model.model.norm.weight.clone()
    with pytest.raises(ValueError, match="no weight 'x'"):
        engine.update_weights(WeightBucket({"model.norm.weight": weight + 1, "x": weight}))
    assert torch.equal(engine.model.model.norm.weight, weight)


def test_weights_of_another_precision_are_cast(models) -> None:
    engine = make_engine(models())
    half = {name: tensor.bfloat16() for name, tensor in checkpoint(models(seed=1)).items()}
    send(engine, half, version=1)
    assert torch.equal(engine.model.lm_head.weight, half["lm_head.weight"].float())


def test_closed(models) -> None:
    engine = make_engine(models())
    engine.close()
    with pytest.raises(RuntimeError, match="no model"):
        answers(engine)
