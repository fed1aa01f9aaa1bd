"""What the keys of adapters do, what is refused, and that a run with adapters resumes under another layout."""

from __future__ import annotations

import pytest
import torch

from areal_like.trainers.lora_reference import logits_of_folder
from areal_like.trainers.trial import run_trial

LENGTHS = [41, 2, 17, 30]
BRIDGE = {"bridge_type": "megatron-bridge"}
LORA = {"use_lora": True, "lora_rank": 4, "lora_alpha": 8.0, "megatron": BRIDGE, "optimizer": {"lr": 2e-3}}


def adapters(ranks):
    return {name: t for bucket in ranks.group.stream("adapter_weights") for name, t in bucket.tensors.items()}


def steps(ranks, helpers, seeds=range(3)):
    figures = [ranks.train(helpers.random_batch(LENGTHS, seed)) for seed in seeds]
    return [(f["loss"], f["grad_norm"]) for f in figures]


def test_full_recomputation_changes_nothing(solo, models, helpers):
    """Without gradients of the embedding's output Megatron-Core would never run the backward pass of a layer."""
    plain = steps(solo.build("megatron:d1", models("qwen3"), **LORA), helpers)
    for _ in range(2):  # the second model may have the first one's `id`, by which megatron-bridge remembers models
        again = steps(solo.build("megatron:d1", models("qwen3"), **LORA, gradient_checkpointing=True), helpers)
        assert again == plain


def test_dropout_is_in_training_alone(solo, models, helpers):
    plain = steps(solo.build("megatron:d1", models("qwen3"), **LORA), helpers)
    solo.build("megatron:d1", models("qwen3"), **LORA, lora_dropout=0.5)
    dropped = steps(solo, helpers)
    assert dropped[0][0] == plain[0][0], "B is 0: nothing to drop yet"
    assert dropped[0][1] != pytest.approx(plain[0][1], rel=0.02), "the gradient of B has seen dropout"
    batch = helpers.random_batch(LENGTHS)
    assert torch.equal(solo.logits(batch), solo.logits(batch))


def test_dropout_drops_the_share_and_differs_where_inputs_are_split(pair, models):
    pair.build("megatron:t2", models("qwen3"), **LORA, lora_dropout=0.25)
    mine, other = pair.group.call("adapter_dropouts", 4000)
    assert len(mine) == len(other) == 12
    for ours, theirs in zip(mine, other, strict=True):
        assert ours.unique().tolist() == pytest.approx([0.0, 4 / 3])
        assert float((ours == 0).float().mean()) == pytest.approx(0.25, abs=0.05)
        assert not torch.equal(ours, theirs), "t2 splits the sequence, or the width"


@pytest.mark.parametrize(("model", "adapter"), [("bfloat16", "float32"), ("float32", "bfloat16")])
def test_a_type_of_their_own(solo, models, helpers, tmp_path, model, adapter):
    changes = LORA | {"optimizer": {"lr": 2e-2}}
    solo.build("megatron:d1", models("qwen3"), **changes, dtype=model, lora_dtype=adapter)
    losses = [solo.train(helpers.random_batch(LENGTHS))["loss"] for _ in range(4)]
    assert losses == sorted(losses, reverse=True) and losses[0] - losses[-1] > 0.05
    assert {t.dtype for t in adapters(solo).values()} == {getattr(torch, adapter)}
    assert {t.dtype for t in solo.weights().values()} == {getattr(torch, model)}
    batch = helpers.random_batch(LENGTHS)
    solo.group.call("do", "save_adapter", str(tmp_path / "a"))
    read = logits_of_folder(models("qwen3"), tmp_path / "a", batch.split_tokens(batch.input_ids), torch.float32)
    assert (solo.logits(batch) - read).abs().max() < 0.15, "rounding of bfloat16"


def test_the_targets_alone_are_trained(solo, models, helpers):
    solo.build("megatron:d1", models("qwen3-moe"), **LORA, target_modules=("linear_proj",))
    steps(solo, helpers, [0])
    assert {name.split(".lora_")[0].rsplit(".", 1)[1] for name in adapters(solo)} == {"o_proj"}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"megatron": {"bridge_type": "mbridge"}}, "bridge_type mbridge has no adapters"),
        ({"target_modules": ("linear_qkv", "router")}, "the router cannot get an adapter"),
        ({"optimizer": None}, "adapters need an optimizer"),
        ({"megatron": BRIDGE | {"moe_router_bias_update_rate": 1e-3}}, "moe_router_bias_update_rate"),
        ({"is_critic": True}, "the head of a value model"),
    ],
    ids=["mbridge", "router", "optimizer", "bias", "critic"],
)
def test_what_the_engine_refuses(solo, models, changes, words):
    (error,) = solo.refuses("megatron:d1", models("qwen3-moe"), **LORA | changes)
    assert error is not None and error[0] == "ValueError" and words in error[1], error


@pytest.mark.parametrize(
    ("text", "changes", "words"),
    [
        ("megatron:t2", {"lora_rank": 3}, "lora_rank 3 does not divide by t2"),
        ("megatron:(attn:t2|ffn:t2)", {}, "experts split by t2 get no adapters"),
    ],
)
def test_what_the_engine_refuses_of_a_layout(pair, models, text, changes, words):
    for error in pair.refuses(text, models("qwen3-moe"), **LORA | changes):
        assert error is not None and error[0] == "ValueError" and words in error[1], error


def test_a_model_without_adapters_has_none_to_send(solo, models, tmp_path):
    solo.build("megatron:d1", models("qwen3"))
    (error,) = solo.attempt("save_adapter", str(tmp_path / "a"))
    assert error is not None and error[0] == "RuntimeError" and "use_lora: false" in error[1]
    assert list(tmp_path.iterdir()) == []


def resume(first, second, texts, folder, helpers, tmp_path):
    first.build(texts[0], folder, **LORA)
    steps(first, helpers, [0, 1])
    first.group.call("do", "save_checkpoint", str(tmp_path / "c"), step=2)
    first.group.call("do", "finish_checkpoint")
    saved, expected = adapters(first), steps(first, helpers, [2, 3])
    second.build(texts[1], folder, **LORA)
    second.group.call("do", "load_checkpoint", str(tmp_path / "c"))
    loaded = adapters(second)
    assert [n for n in saved if not torch.equal(saved[n], loaded[n])] == []
    for ours, theirs in zip(steps(second, helpers, [2, 3]), expected, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)


def test_adapters_resume_under_another_layout(pair, models, helpers, tmp_path):
    resume(pair, pair, ("megatron:t2", "megatron:p2"), models("qwen3"), helpers, tmp_path)


@pytest.mark.slow
def test_adapters_of_experts_resume_under_another_layout(pair, solo, models, helpers, tmp_path):
    resume(pair, solo, ("megatron:d2e2", "megatron:d1"), models("qwen3-moe"), helpers, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "model", "dtype"),
    [
        ("megatron:p2v2", "tiny-dense", "float32"),
        ("megatron:(attn:c2t2|ffn:e4)", "tiny-moe", "float32"),
        ("megatron:t2", "tiny-dense", "bfloat16"),
    ],
)
def test_a_trial_with_adapters(text, model, dtype):
    report = run_trial(text, model=model, bridge="megatron-bridge", lora_rank=4, dtype=dtype, device="cpu")
    assert report.passed, "\n" + report.render()
    assert report.adapter_tensors > 50 and len({s.loss for s in report.steps}) == 3
    if dtype == "float32":
        assert report.adapter_folder_logits < 1e-5 and all(s.weights < 1e-5 for s in report.steps)
