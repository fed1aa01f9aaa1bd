"""The report of a trial, and the two sides it compares. Whole trials run in tests/engines/megatron/test_parity.py."""

from __future__ import annotations

import json
import math

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from areal_like.alloc import AllocationError, ModelAllocation
from areal_like.config import OptimizerConfig
from areal_like.data.batch import PackedBatch
from areal_like.preflight import check_layout
from areal_like.spec import ModelSpec
from areal_like.trainers import trial
from areal_like.trainers.reference import ReferenceModel
from areal_like.trainers.tiny_models import TINY_MODELS, make_tiny_model
from areal_like.trainers.trial import StepDifferences, TrialReport

GOOD = {
    "step": 1,
    "loss": 5.0,
    "grad_norm": 2.0,
    "logits": 1e-6,
    "loss_difference": 1e-7,
    "grad_norm_difference": 1e-6,
    "weights": 1e-8,
    "micro_batches": 3,
    "tokens_per_second": 100.0,
}


def report(**changes):
    made = TrialReport("megatron:d1", "tiny-dense", "mbridge", "float32", "cpu", 1, exported_tensors=30)
    made.steps = [StepDifferences(**(GOOD | changes))]
    return made


def test_a_trial_within_tolerance_passes():
    made = report()
    assert made.passed and made.failures == []
    assert "PASS" in made.render() and "bit-equal" in made.render()
    found = json.loads(json.dumps(made.to_dict()))
    assert found["passed"] is True and found["steps"][0]["loss"] == 5.0 and found["tolerance"]["logits"] == 1e-4


@pytest.mark.parametrize(
    ("field", "word"),
    [
        ("logits", "logits"),
        ("loss_difference", "loss"),
        ("grad_norm_difference", "gradient norm"),
        ("weights", "weights"),
    ],
)
@pytest.mark.parametrize("value", [1.01e-4, 1.0, math.inf, math.nan])
def test_each_difference_fails_on_its_own(field, word, value):
    made = report(**{field: value})
    assert not made.passed
    (failure,) = made.failures
    assert failure == f"step 1: {word} differ by {value:.2g}, more than 0.0001"
    assert f"FAIL {failure}" in made.render() and "PASS" not in made.render()
    assert report(**{field: 1e-4}).passed, "the limit itself passes"


def test_an_export_that_differs_fails():
    made = report()
    made.export_differs = ["a", "b", "c", "d"]
    assert made.failures == ["exported weights are not bit-equal: a, b, c"]
    assert "4 differ" in made.render()


def test_a_trial_without_steps_fails():
    made = report()
    made.steps = []
    assert made.failures == ["no step was run"]


@pytest.mark.parametrize("text", ["megatron:d1", "megatron:d3", "megatron:d1t2"])
def test_the_batches_are_packed_and_unequal(text):
    allocation = ModelAllocation.parse(text)
    batches = [trial._batch(step, allocation, 131) for step in (1, 2)]
    for batch in batches:
        assert len(batch) % allocation.dp == (1 if allocation.dp > 1 else 0)
        assert len(set(batch.lengths)) > 3 and max(batch.lengths) == 90 and min(batch.lengths) >= 2
        firsts = batch.tokens["loss_mask"][batch.cu_seqlens[:-1]]
        assert (firsts == 0).all() and batch.tokens["loss_mask"].sum() > 0
        assert int(batch.input_ids.max()) < 131
    assert not torch.equal(batches[0].input_ids[:40], batches[1].input_ids[:40])


@pytest.mark.parametrize("name", TINY_MODELS)
@pytest.mark.parametrize("text", ["megatron:d1", "megatron:d1t3", "megatron:p3t2", "megatron:(attn:d2t2|ffn:e2t2)"])
def test_tiny_models_fit_the_layout_they_are_made_for(tmp_path, name, text):
    allocation = ModelAllocation.parse(text)
    make_tiny_model(name, allocation, tmp_path, dtype=torch.float32)
    spec = ModelSpec.from_path(tmp_path)
    found = [d.code for d in check_layout(allocation, spec)]
    assert found == (["AL307"] if name == "tiny-dense" and "ffn" in text else [])
    assert all(spec.vocab_size % n for n in range(2, 12)), "padding is always exercised"
    if allocation.pp > 1:
        assert spec.num_layers % allocation.pp, "stages are uneven"


# The reference itself, against torch without it


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("llama")
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=31, **shape, initializer_range=0.2)).save_pretrained(folder)
    return folder


def test_the_reference_is_a_plain_padded_training_step(llama):
    """The same step written with one padded batch, cross_entropy and AdamW on the model's own parameters."""
    settings = OptimizerConfig(lr=1e-2, weight_decay=0.1, gradient_clipping=0.5)
    rows = [[3, 4, 5, 6, 7], [8, 9], [10, 11, 12]]
    masks = [[0.0, 0, 1, 1, 1], [0.0, 1], [0.0, 1, 0]]
    batch = PackedBatch.from_sequences(rows, tokens={"loss_mask": masks})
    reference = ReferenceModel(llama, settings, dtype=torch.float32, device="cpu")
    model = AutoModelForCausalLM.from_pretrained(llama)
    decayed = [p for p in model.parameters() if p.ndim > 1]
    plain = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.999), eps=1e-8)
    ids = torch.tensor([r + [0] * (5 - len(r)) for r in rows])
    attention = torch.tensor([[1] * len(r) + [0] * (5 - len(r)) for r in rows])
    labels = torch.full((3, 5), -100)
    for i, mask in enumerate(masks):
        for j, value in enumerate(mask):
            if value:
                labels[i, j] = ids[i, j]
    for _ in range(2):
        loss, norm = reference.train(batch)
        optimizer.zero_grad()
        logits = model(ids, attention_mask=attention).logits
        expected = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        expected.backward()
        expected_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        assert loss == pytest.approx(float(expected), rel=1e-5)
        assert norm == pytest.approx(float(expected_norm), rel=1e-4)
    ours = reference.weights()
    for name, parameter in model.named_parameters():
        assert torch.allclose(ours[name], parameter.detach(), atol=1e-5), name
    with torch.no_grad():
        assert torch.allclose(reference.logits(batch)[5:7], model(ids[1:2, :2]).logits[0], atol=1e-5)


def test_the_reference_in_bfloat16_keeps_small_steps(llama):
    """Steps that bfloat16 would round away add up in its float32 copies."""
    settings = OptimizerConfig(lr=1e-4, weight_decay=0.0)
    reference = ReferenceModel(llama, settings, dtype=torch.bfloat16, device="cpu")
    batch = PackedBatch.from_sequences([[3, 4, 5]], tokens={"loss_mask": [[0.0, 1, 1]]})
    before = {n: t.clone() for n, t in reference.weights().items()}
    for _ in range(60):
        reference.train(batch)
    after = reference.weights()
    assert after["model.norm.weight"].dtype == torch.bfloat16
    assert not torch.equal(before["model.norm.weight"], after["model.norm.weight"]), "60 steps of 1e-4 are 2**-7"


@pytest.mark.parametrize("value", [None, 1.01e-4, math.nan])
def test_adapters_that_peft_reads_otherwise_fail(value):
    made = report()
    made.lora_rank, made.adapter_folder_logits = 4, 1e-6
    assert made.passed and "PEFT with the saved folder" in made.render()
    made.adapter_folder_logits = value
    assert not made.passed and "saved adapters" in made.failures[0]


@pytest.mark.parametrize(
    ("text", "bridge", "rank", "code"),
    [("megatron:d1", "mbridge", 4, "AL521"), ("megatron:t2", "megatron-bridge", 3, "AL552")],
)
def test_a_trial_with_adapters_that_cannot_be_is_refused_before_a_process_starts(text, bridge, rank, code):
    with pytest.raises(AllocationError) as raised:
        trial.run_trial(text, bridge=bridge, lora_rank=rank, device="cpu")
    assert [d.code for d in raised.value.diagnostics] == [code]
