"""Updates of adapters alone: what generates is what PEFT makes of the same folder."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from areal_like.alloc import ModelAllocation
from areal_like.engines.base import GenerationRequest, SamplingParams, WeightBucket
from areal_like.engines.huggingface import HuggingFaceEngine

RANK, ALPHA = 4, 6.0
PREFIX = "base_model.model."


def make_engine(folder: Path) -> HuggingFaceEngine:
    engine = HuggingFaceEngine(ModelAllocation.parse("huggingface:d1"), config=None, model_path=str(folder))
    engine.initialize()
    return engine


def adapters(engine: HuggingFaceEngine, seed: int) -> dict[str, torch.Tensor]:
    """Random adapters for every matrix of the layers, under PEFT's names."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, weight in engine.updates.targets.items():
        if name.endswith("_proj.weight"):
            stem = PREFIX + name.removesuffix(".weight")
            tensors[f"{stem}.lora_A.weight"] = torch.randn(RANK, weight.shape[1], generator=generator) / 8
            tensors[f"{stem}.lora_B.weight"] = torch.randn(weight.shape[0], RANK, generator=generator) / 8
    return tensors


def buckets(tensors: dict[str, torch.Tensor], size: int = 3) -> Iterator[WeightBucket]:
    """An odd size: the halves of an adapter come in different buckets."""
    names = list(tensors)
    for i in range(0, len(names), size):
        yield WeightBucket({name: tensors[name] for name in names[i : i + size]}, adapter_scaling=ALPHA / RANK)


def send(engine: HuggingFaceEngine, tensors: dict[str, torch.Tensor], version: int) -> None:
    for bucket in buckets(tensors):
        engine.update_weights(bucket)
    engine.finish_update(version)


def answers(engine: HuggingFaceEngine) -> list[Any]:
    asked = [GenerationRequest([9 + i, 30, 8], SamplingParams(12, seed=i)) for i in range(4)]
    return engine.generate(asked)


def merged_by_peft(base: Path, tensors: dict[str, torch.Tensor], folder: Path) -> Path:
    """The folder that PEFT reads the adapters from, merges, and writes."""
    source = folder / "adapter"
    source.mkdir(parents=True)
    save_file(tensors, source / "adapter_model.safetensors", metadata={"format": "pt"})
    targets = sorted({name.split(".lora_")[0].rsplit(".", 1)[1] for name in tensors})
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": targets}
    (source / "adapter_config.json").write_text(json.dumps(config))
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    peft.PeftModel.from_pretrained(model, source).merge_and_unload().save_pretrained(folder / "merged")
    return folder / "merged"


@pytest.mark.parametrize("kind", ["qwen2", "qwen3-moe"])
def test_an_update_gives_the_model_that_peft_merges(models, tmp_path, kind: str) -> None:
    engine = make_engine(models(kind))
    before = [c.token_ids for c in answers(engine)]
    for number in (1, 2):  # the second is added to the base, not to the first
        tensors = adapters(engine, number)
        send(engine, tensors, version=number)
        expected = make_engine(merged_by_peft(models(kind), tensors, tmp_path / str(number)))
        worst = max(
            float((ours - expected.updates.targets[name]).abs().max()) for name, ours in engine.updates.targets.items()
        )
        assert worst < 1e-6
        found, wanted = answers(engine), answers(expected)
        assert [c.token_ids for c in found] == [c.token_ids for c in wanted] != before
        for ours, theirs in zip(found, wanted, strict=True):
            assert ours.log_probs == pytest.approx(theirs.log_probs, abs=1e-4)
        assert found[0].versions[-1] == number


def test_adapters_of_zeros_give_the_base_back_bit_for_bit(models) -> None:
    engine = make_engine(models("qwen3"))
    before = {name: t.clone() for name, t in engine.updates.targets.items()}
    tensors = adapters(engine, 1)
    send(engine, tensors, version=1)
    assert not torch.equal(
        engine.updates.targets["model.layers.0.mlp.up_proj.weight"], before["model.layers.0.mlp.up_proj.weight"]
    )
    send(engine, {n: torch.zeros_like(t) if ".lora_B." in n else t for n, t in tensors.items()}, version=2)
    assert all(torch.equal(t, before[name]) for name, t in engine.updates.targets.items())


def test_whole_weights_become_the_base(models) -> None:
    engine, other = make_engine(models("qwen3")), make_engine(models("qwen3", 1))
    tensors = adapters(engine, 1)
    send(engine, tensors, version=1)
    engine.update_weights(WeightBucket({n: t.clone() for n, t in other.updates.targets.items()}))
    engine.finish_update(2)
    send(engine, tensors, version=3)
    send(other, tensors, version=3)
    assert all(torch.equal(t, other.updates.targets[name]) for name, t in engine.updates.targets.items())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: {"x": t.popitem()[1], **t}, "'x' is not the name of an adapter"),
        (lambda t: {PREFIX + "model.nothing.lora_A.weight": t.popitem()[1], **t}, "no weight 'model.nothing.weight'"),
        (lambda t: {n: x[:, :-1] if n.endswith("k_proj.lora_A.weight") else x for n, x in t.items()}, "have shapes"),
        (lambda t: dict(list(t.items())[:-1]), "down_proj.lora_B.weight"),
        (lambda t: dict(list(t.items())[2:]), "q_proj.weight"),
    ],
    ids=["name", "module", "shape", "half", "adapter"],
)
def test_an_update_that_is_no_good_is_named_and_stops_generation(models, change, words: str) -> None:
    engine = make_engine(models("qwen3"))
    tensors = adapters(engine, 1)
    send(engine, tensors, version=1)
    with pytest.raises(ValueError, match=words.replace(".", r"\.")):
        send(engine, change(dict(tensors)), version=2)
    with pytest.raises(RuntimeError, match="send a complete update"):
        answers(engine)
    send(engine, tensors, version=3)
    assert answers(engine)[0].versions[-1] == 3


def test_weights_and_adapters_in_one_update(models) -> None:
    engine = make_engine(models("qwen3"))
    tensors = adapters(engine, 1)
    engine.update_weights(next(buckets(tensors)))
    with pytest.raises(ValueError, match="in the middle of an update of adapters"):
        engine.update_weights(WeightBucket({"model.norm.weight": torch.ones(64)}))
    engine = make_engine(models("qwen3"))
    engine.update_weights(WeightBucket({"model.norm.weight": torch.ones(64)}))
    with pytest.raises(ValueError, match="in the middle of an update of weights"):
        engine.update_weights(next(buckets(tensors)))
