"""`enable_tree_training`: shared beginnings computed once, beside Transformers on whole sequences."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from areal_like.data.batch import PackedBatch


def answers(seed=0):
    """Three prompts of 11, 17 and 8 tokens with four, three and one answers, of 1 to 15 tokens."""
    generator = torch.Generator().manual_seed(seed)

    def draw(n):
        return torch.randint(0, 131, (n,), generator=generator)

    sequences, masks = [], []
    for prompt, lengths in ((draw(11), [5, 15, 1, 9]), (draw(17), [7, 7, 3]), (draw(8), [12])):
        for n in lengths:
            sequences.append(torch.cat([prompt, draw(n)]))
            masks.append(torch.cat([torch.zeros(len(prompt)), torch.ones(n)]))
    return PackedBatch.from_sequences(sequences, tokens={"loss_mask": masks})


def step_of_transformers(folder, batch, lr):
    """Loss, gradient norm, and the weights after one step of plain gradient descent."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    total = 0.0
    for ids, mask in zip(
        batch.split_tokens(batch.input_ids), batch.split_tokens(batch.tokens["loss_mask"]), strict=True
    ):
        logits = model(ids[None], use_cache=False).logits[0]
        total = total + (F.cross_entropy(logits[:-1], ids[1:], reduction="none") * mask[1:]).sum()
    loss = total / batch.tokens["loss_mask"].sum()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), float("inf"))
    with torch.no_grad():
        weights = {name: p - lr * p.grad for name, p in model.named_parameters()}
    return loss.item(), norm.item(), weights


@pytest.mark.parametrize(
    ("kind", "text", "budget"),
    [
        ("qwen3", "megatron:d1", 96),
        ("llama-tied", "megatron:p2", 40),
        pytest.param("qwen2", "megatron:t2", 64, marks=pytest.mark.slow),
        pytest.param("qwen3", "megatron:d2", 40, marks=pytest.mark.slow),
    ],
)
def test_one_step_equals_transformers(request, models, helpers, kind, text, budget):
    lr, batch = 0.05, answers()
    ranks = request.getfixturevalue("solo" if text == "megatron:d1" else "pair")
    ranks.build(
        text,
        models(kind),
        enable_tree_training=True,
        mb_spec={"max_tokens_per_mb": budget},
        optimizer={"type": "sgd", "lr": lr, "weight_decay": 0.0, "gradient_clipping": 0.0},
    )
    expected = helpers.hugging_face_logits(models(kind), batch)
    assert torch.allclose(ranks.logits(batch), expected, atol=1e-4)
    log_probs, _ = ranks.forward(batch)
    ids = batch.input_ids
    starts = batch.cu_seqlens[:-1]
    theirs = F.pad(expected.log_softmax(-1)[:-1].gather(1, ids[1:, None])[:, 0], (1, 0))
    theirs[starts] = 0.0
    assert torch.allclose(log_probs, theirs, atol=1e-4)
    loss, norm, weights = step_of_transformers(models(kind), batch, lr)
    figures = ranks.train(batch)
    assert figures["loss"] == pytest.approx(loss, rel=1e-5)
    assert figures["grad_norm"] == pytest.approx(norm, rel=1e-4)
    trained = ranks.weights()
    for name, weight in weights.items():
        assert torch.allclose(trained[name], weight, atol=1e-5), name


def test_fewer_tokens_run_through_the_model(solo, models):
    """162 tokens are 100 when the first 10 and 16 of two prompts are there once: one micro-batch instead of two."""
    batch = answers()
    assert batch.input_ids.numel() == 162
    counts = []
    for shared in (False, True):
        solo.build("megatron:d1", models("qwen3"), enable_tree_training=shared, mb_spec={"max_tokens_per_mb": 100})
        counts.append(solo.train(batch)["micro_batches"])
    assert counts == [2, 1]


def test_where_it_cannot_be_had(pair, solo, models):
    """The check says so first (AL561)."""
    for ranks, text, kind in ((pair, "megatron:c2", "qwen3"), (solo, "megatron:d1", "qwen3-moe")):
        for problem in ranks.refuses(text, models(kind), enable_tree_training=True):
            assert problem is not None and problem[0] == "ValueError" and "enable_tree_training needs" in problem[1]
