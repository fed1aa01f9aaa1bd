"""Adapters of the Megatron engine beside PEFT and torch's AdamW, under every kind of layout."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from areal_like.alloc import ModelAllocation
from areal_like.spec import ModelSpec
from areal_like.spec.lora import adapter_elements
from areal_like.spec.shards import rank_classes
from areal_like.trainers.lora_reference import AdapterReference, logits_of_folder

LENGTHS = [90, 5, 17, 2, 31, 44, 8]
LORA = {
    "use_lora": True,
    "lora_rank": 4,
    "lora_alpha": 8.0,
    "megatron": {"bridge_type": "megatron-bridge"},
    "optimizer": {"lr": 2e-3, "weight_decay": 0.01},
}
REFERENCES = pytest.StashKey[dict]()


def adapters(ranks) -> dict[str, torch.Tensor]:
    return {name: t for bucket in ranks.group.stream("adapter_weights") for name, t in bucket.tensors.items()}


def worst(ours, theirs) -> tuple[float, str]:
    assert ours.keys() == theirs.keys()
    return max((float((ours[n].float() - theirs[n].float()).abs().max()), n) for n in theirs)


def three_steps_of_peft(config, initial, helpers, stash):
    """What PEFT makes of three batches; every layout has the same adapters at the start, so once for each model."""
    key = (config.path, config.target_modules)
    if key not in stash:
        reference = AdapterReference(config, initial, dtype=torch.float32, device="cpu")
        figures = [reference.train(helpers.random_batch(LENGTHS, seed)) for seed in range(3)]
        batch = helpers.random_batch([41, 2, 17, 30])
        stash[key] = (initial, figures, reference.adapters(), reference.weights(), reference.logits(batch))
    return stash[key]


def check_parity(ranks, helpers, stash, text, folder, tmp_path, **changes):
    ranks.build(text, folder, **LORA | changes)
    batch = helpers.random_batch([41, 2, 17, 30])
    assert torch.allclose(ranks.logits(batch), helpers.hugging_face_logits(folder, batch), atol=1e-4), "B starts at 0"
    initial, base = adapters(ranks), ranks.group.call("frozen_parameters")
    figures = [ranks.train(helpers.random_batch(LENGTHS, seed)) for seed in range(3)]
    config = helpers.engine_config(text, folder, **LORA | changes)
    same, expected, theirs, merged, logits = three_steps_of_peft(config, initial, helpers, stash)
    assert worst(initial, same) == (0.0, max(same)), "another layout starts from other adapters"
    for ours, (loss, grad_norm) in zip(figures, expected, strict=True):
        assert ours["loss"] == pytest.approx(loss, rel=1e-5)
        assert ours["grad_norm"] == pytest.approx(grad_norm, rel=1e-4)
    trained = adapters(ranks)
    assert worst(trained, theirs)[0] < 1e-4, worst(trained, theirs)
    assert worst(trained, initial)[0] > 1e-3
    for before, after in zip(base, ranks.group.call("frozen_parameters"), strict=True):
        assert before.keys() == after.keys() and before
        assert [n for n in before if not torch.equal(before[n], after[n])] == []
    assert worst(ranks.weights(), merged)[0] < 1e-4
    assert (ranks.logits(batch) - logits).abs().max() < 2e-4
    ranks.group.call("do", "save_adapter", str(tmp_path / "adapter"))
    read = logits_of_folder(folder, tmp_path / "adapter", batch.split_tokens(batch.input_ids), torch.float32)
    assert (ranks.logits(batch) - read).abs().max() < 1e-4
    assert worst(load_file(tmp_path / "adapter" / "adapter_model.safetensors"), trained)[0] == 0.0
    assert_elements(ranks, text, folder, config)


def assert_elements(ranks, text, folder, config):
    """What `spec` says each rank trains is what each rank trains, and what its optimizer has states for."""
    spec, allocation = ModelSpec.from_path(folder), ModelAllocation.parse(text)
    mesh = allocation.mesh()
    for rank, (trained, states) in enumerate(ranks.group.call("trained_elements")):
        stage = rank_classes(spec, allocation)[mesh.coordinates(rank).pp]
        layers = [layer for chunk in stage.layers for layer in chunk]
        expected = adapter_elements(spec, allocation, config.target_modules, config.lora_rank, layers)
        assert trained == expected.total
        assert 0 < states <= trained


FAST = [("solo", "megatron:d1", "qwen3"), ("pair", "megatron:t2", "qwen3"), ("pair", "megatron:d2e2", "qwen3-moe")]
SLOW = [
    ("pair", "megatron:d2", "qwen3"),
    ("pair", "megatron:p2", "llama-tied"),
    ("pair", "megatron:c2", "qwen3"),
    ("pair", "megatron:(attn:t2|ffn:e2)", "qwen3-moe"),
    ("solo", "megatron:d1", "qwen3-moe"),
    ("quad", "megatron:t2p2", "qwen2"),
    ("quad", "megatron:d2t2", "qwen3"),
    ("quad", "megatron:(attn:t2p2|ffn:p2e2)", "qwen3-moe"),
]


@pytest.mark.parametrize(
    ("ranks", "text", "kind"), [*FAST, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)]
)
def test_three_steps_are_those_of_peft(request, models, helpers, tmp_path, ranks, text, kind):
    stash = request.config.stash.setdefault(REFERENCES, {})
    check_parity(request.getfixturevalue(ranks), helpers, stash, text, models(kind), tmp_path)
