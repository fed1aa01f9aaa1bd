"""Value models beside Transformers' sequence-classification models with one label: values, a step, what is saved."""

from __future__ import annotations

import pytest
import torch
from megatron_hosts import ReturnLoss
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification

from areal_like.data.batch import PackedBatch

LENGTHS = [40, 7, 1, 21, 33]
slow = pytest.mark.slow


@pytest.fixture(scope="module")
def value_model(models, tmp_path_factory):
    """A folder with a random head."""

    def make(kind):
        folder = tmp_path_factory.mktemp("value") / kind
        torch.manual_seed(3)
        AutoModelForSequenceClassification.from_pretrained(models(kind), num_labels=1).save_pretrained(folder)
        return folder

    return make


def transformers_values(model, batch):
    """The value of the state in which each token was drawn: the head's output at the token before it."""
    found = []
    for ids in batch.split_tokens(batch.input_ids):
        hidden = model.model(ids[None], use_cache=False).last_hidden_state[0]
        found += [hidden.new_zeros(1), model.score(hidden)[:-1, 0]]
    return torch.cat(found)


def with_returns(batch):
    generator = torch.Generator().manual_seed(9)
    returns = torch.randn(batch.input_ids.numel(), generator=generator)
    return PackedBatch(batch.input_ids, batch.cu_seqlens, {**batch.tokens, "returns": returns})


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("llama-tied", "megatron:p2"),
        ("qwen3", "megatron:c2"),
        ("qwen2", "megatron:t2"),
        pytest.param("qwen3-moe", "megatron:d2e2", marks=slow),
    ],
)
def test_values_and_a_step(pair, helpers, value_model, tmp_path, kind, text):
    _compare(pair, helpers, value_model(kind), text, tmp_path)


@slow
def test_values_with_every_dimension(quad, helpers, models, tmp_path, tmp_path_factory):
    folder = tmp_path_factory.mktemp("value") / "four"
    torch.manual_seed(3)
    from transformers import Qwen3Config, Qwen3ForSequenceClassification

    config = Qwen3Config(**{**helpers.SIZES, "num_hidden_layers": 5}, head_dim=32, num_labels=1)
    Qwen3ForSequenceClassification(config).save_pretrained(folder)
    _compare(quad, helpers, folder, "megatron:p2c2v2", tmp_path)


def _compare(ranks, helpers, folder, text, tmp_path):
    batch = with_returns(helpers.random_batch(LENGTHS))
    optimizer = {"type": "sgd", "lr": 0.1, "weight_decay": 0.0}
    ranks.build(text, folder, is_critic=True, optimizer=optimizer)
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        expected = transformers_values(model, batch)
    assert torch.allclose(ranks.values(batch), expected, atol=1e-5) and expected.std() > 0.01
    figures = ranks.train(batch, ReturnLoss())
    mask = batch.tokens["loss_mask"]
    loss = ((transformers_values(model, batch) - batch.tokens["returns"]).square() * mask).sum() / mask.sum()
    loss.backward()
    norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert figures["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert figures["grad_norm"] == pytest.approx(norm, rel=1e-4)
    ranks.group.call("do", "save", str(tmp_path / "saved"))
    saved = AutoModelForSequenceClassification.from_pretrained(tmp_path / "saved", dtype=torch.float32)
    assert saved.config.num_labels == 1
    for name, parameter in saved.named_parameters():
        assert torch.allclose(parameter, dict(model.named_parameters())[name], atol=1e-6), name


def test_a_language_model_becomes_a_value_model_that_starts_at_zero(pair, helpers, models):
    pair.build("megatron:t2", models("qwen3"), is_critic=True)
    batch = with_returns(helpers.random_batch(LENGTHS))
    assert pair.values(batch).abs().max() == 0
    first = pair.train(batch, ReturnLoss())["loss"]
    assert all(pair.train(batch, ReturnLoss())["loss"] < first for _ in range(2))
    assert pair.weights()["score.weight"].abs().max() > 0


def test_a_head_of_another_shape_is_refused(solo, value_model, tmp_path):
    folder = value_model("qwen3")
    tensors = load_file(folder / "model.safetensors")
    tensors["score.weight"] = torch.zeros(2, 64)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    ((kind, text),) = solo.refuses("megatron:d1", folder, is_critic=True)
    assert kind == "CheckpointError" and "score.weight has shape (2, 64)" in text and "one label" in text
