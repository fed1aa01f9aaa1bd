"""Options of the engine: each against the plain way, against torch, or against values by hand."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import AutoModelForCausalLM

from areal_like.data.batch import PackedBatch
from areal_like.preflight import check_layout
from areal_like.spec import ModelSpec

LENGTHS = [90, 5, 17, 2, 31, 44, 8]


def three_steps(ranks, helpers, text, folder, **changes):
    ranks.build(text, folder, **changes)
    figures = [ranks.train(helpers.random_batch(LENGTHS, seed)) for seed in range(3)]
    return [(f["loss"], f["grad_norm"]) for f in figures], ranks.weights()


@pytest.fixture
def plain(solo, models, helpers, request):
    """Three steps of d1 without any option: figures and weights after them. Made once."""
    made = request.config.stash.setdefault(PLAIN, {})
    if not made:
        made["dense"] = three_steps(solo, helpers, "megatron:d1", models("qwen3"))
    return made["dense"]


PLAIN = pytest.StashKey[dict]()


def assert_same(ours, theirs, tolerance=2e-5):
    for (loss, norm), (other_loss, other_norm) in zip(ours[0], theirs[0], strict=True):
        assert (loss, norm) == pytest.approx((other_loss, other_norm), rel=tolerance)
    assert ours[1].keys() == theirs[1].keys()
    worst = max((float((ours[1][n] - theirs[1][n]).abs().max()), n) for n in theirs[1])
    assert worst[0] < tolerance, worst


DDP_OPTIONS = [
    {},
    {"use_distributed_optimizer": False},
    {"overlap_grad_reduce": True},
    {"overlap_grad_reduce": True, "bucket_size": 2000},
    {"overlap_grad_reduce": True, "overlap_param_gather": True},
    {"overlap_grad_reduce": True, "overlap_param_gather": True, "bucket_size": 2000},
    {"overlap_param_gather": True},
    {"grad_reduce_in_fp32": False},
    {"check_for_nan_in_grad": True},
]


@pytest.mark.parametrize("ddp", DDP_OPTIONS, ids=lambda ddp: "+".join(f"{k}={v}" for k, v in ddp.items()) or "default")
def test_d2_with_every_way_of_reducing_equals_d1(pair, models, helpers, plain, ddp):
    assert_same(three_steps(pair, helpers, "megatron:d2", models("qwen3"), ddp=ddp), plain)


@pytest.mark.slow
def test_overlap_in_a_pipeline(quad, models, helpers, plain):
    ddp = {"overlap_grad_reduce": True, "overlap_param_gather": True}
    assert_same(three_steps(quad, helpers, "megatron:d2p2", models("qwen3"), ddp=ddp), plain)


@pytest.mark.slow
@pytest.mark.parametrize("text", ["megatron:d2p2v2", "megatron:p2c2v2", "megatron:d2c2"])
def test_overlap_with_virtual_stages_and_context_parallelism(quad, solo, models, helpers, text):
    """Several model chunks a rank reduce and gather apart; context-parallel ranks are in the reducing group."""
    folder, ddp = models("qwen3-deep"), {"overlap_grad_reduce": True, "overlap_param_gather": True, "bucket_size": 2000}
    alone = three_steps(solo, helpers, "megatron:d1", folder)
    assert_same(three_steps(quad, helpers, text, folder, ddp=ddp), alone)


@pytest.mark.slow
@pytest.mark.parametrize("text", ["megatron:p2v2", "megatron:c2", "megatron:t2"])
def test_full_recomputation_in_every_layout(pair, solo, models, helpers, text):
    """Positions and documents of each micro-batch are there again when its layers run a second time."""
    folder = models("qwen3-deep")
    alone = three_steps(solo, helpers, "megatron:d1", folder)
    assert_same(three_steps(pair, helpers, text, folder, gradient_checkpointing=True), alone)


def test_weights_loaded_after_an_overlapped_step_stay(pair, models, helpers):
    """The gather of the step before must not put the old weights back."""
    folder = models("qwen3")
    ddp = {"overlap_grad_reduce": True, "overlap_param_gather": True}
    pair.build("megatron:d2", folder, ddp=ddp, optimizer={"lr": 0.05})
    batch = helpers.random_batch(LENGTHS)
    before = pair.logits(batch)
    pair.train(batch)
    assert (pair.logits(batch) - before).abs().max() > 0.1
    pair.train(batch)
    pair.group.call("do", "load", str(folder))
    assert torch.equal(pair.logits(batch), before)
    assert (pair.train(batch)["loss"]) == pytest.approx(_cross_entropy(before, batch), rel=1e-5)


def _cross_entropy(logits, batch):
    total, count = 0.0, 0.0
    rows = zip(*(batch.split_tokens(x) for x in (logits, batch.input_ids, batch.tokens["loss_mask"])), strict=True)
    for row, ids, mask in rows:
        chosen = row[:-1].double().log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        total -= float((chosen * mask[1:]).sum())
        count += float(mask.sum())
    return total / count


@pytest.mark.parametrize(
    "megatron",
    [
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
        {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 2},
        {"recompute_granularity": "selective"},
    ],
    ids=lambda m: "-".join(str(v) for v in m.values()),
)
def test_gradient_checkpointing_changes_nothing(solo, models, helpers, plain, megatron):
    ours = three_steps(solo, helpers, "megatron:d1", models("qwen3"), gradient_checkpointing=True, megatron=megatron)
    assert_same(ours, plain, tolerance=1e-6)


def test_gradient_checkpointing_under_t2(pair, models, helpers, plain):
    ours = three_steps(pair, helpers, "megatron:d1t2", models("qwen3"), gradient_checkpointing=True)
    assert_same(ours, plain)


def test_sgd_makes_the_step_of_torch(solo, models, helpers):
    """Without decay: w - lr * g, with g the clipped gradient of the mean loss."""
    folder = models("llama-tied")
    optimizer = {"type": "sgd", "lr": 0.1, "weight_decay": 0.0, "gradient_clipping": 0.5}
    solo.build("megatron:d1", folder, optimizer=optimizer)
    batch = helpers.random_batch([40, 7, 21])
    figures = solo.train(batch)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    loss = _torch_loss(model, batch)
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert figures["loss"] == pytest.approx(float(loss), rel=1e-5)
    assert figures["grad_norm"] == pytest.approx(float(norm), rel=1e-4)
    assert float(norm) > 0.5, "the test wants clipping to act"
    ours = solo.weights()
    assert len(ours) == len(list(model.parameters()))
    for name, parameter in model.named_parameters():
        assert torch.allclose(ours[name], parameter.detach(), atol=1e-6), name


def _torch_loss(model, batch):
    total = torch.zeros(())
    rows = zip(batch.split_tokens(batch.input_ids), batch.split_tokens(batch.tokens["loss_mask"]), strict=True)
    for ids, mask in rows:
        log_probs = model(ids[None], use_cache=False).logits[0, :-1].log_softmax(-1)
        total = total - (log_probs.gather(1, ids[1:, None])[:, 0] * mask[1:]).sum()
    return total / batch.tokens["loss_mask"].sum()


def test_sgd_with_overlap_and_sharding_asked_for(pair, models, helpers):
    """SGD has no state to shard: the options have nothing to do, and two ranks make the step of one."""
    folder, batch = models("llama-tied"), helpers.random_batch([40, 7, 21])
    optimizer = {"type": "sgd", "lr": 0.1, "weight_decay": 0.0, "gradient_clipping": 0.5}
    ddp = {"overlap_grad_reduce": True, "overlap_param_gather": True, "use_distributed_optimizer": True}
    norm = pair.build("megatron:d2", folder, optimizer=optimizer, ddp=ddp).train(batch)["grad_norm"]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    _torch_loss(model, batch).backward()
    assert norm == pytest.approx(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)), rel=1e-4)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    ours = pair.weights()
    for name, parameter in model.named_parameters():
        assert torch.allclose(ours[name], parameter.detach(), atol=1e-6), name


def test_without_clipping_adam_reports_the_same_norm(pair, models, helpers):
    folder, batch = models("llama-tied"), helpers.random_batch([40, 7, 21])
    norms = [
        pair.build("megatron:d2", folder, optimizer={"gradient_clipping": clip}).train(batch)["grad_norm"]
        for clip in (0.0, 1.0)
    ]
    assert norms[0] == pytest.approx(norms[1], rel=1e-6) and norms[0] > 0


def test_without_clipping_the_gradient_norm_is_reported_and_not_applied(solo, models, helpers):
    folder, batch = models("llama-tied"), helpers.random_batch([40, 7, 21])
    optimizer = {"type": "sgd", "lr": 0.1, "weight_decay": 0.0, "gradient_clipping": 0.0}
    figures = solo.build("megatron:d1", folder, optimizer=optimizer).train(batch)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    _torch_loss(model, batch).backward()
    norm = math.sqrt(sum(float(p.grad.pow(2).sum()) for p in model.parameters()))
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert figures["grad_norm"] == pytest.approx(norm, rel=1e-4)
    ours = solo.weights()
    for name, parameter in model.named_parameters():
        assert torch.allclose(ours[name], parameter.detach(), atol=1e-6), name


@pytest.mark.parametrize(
    ("optimizer", "expected"),
    [
        ({"warmup_steps_proportion": 0.0}, [1.0] * 10),
        ({"warmup_steps_proportion": 0.4}, [0, 0.25, 0.5, 0.75, 1, 1, 1, 1, 1, 1]),
        (
            {"lr_scheduler_type": "linear", "warmup_steps_proportion": 0.2, "min_lr_ratio": 0.2},
            [0, 0.5] + [0.2 + 0.8 * (1 - k / 8) for k in range(8)],
        ),
        (
            {"lr_scheduler_type": "cosine", "warmup_steps_proportion": 0.2, "min_lr_ratio": 0.1},
            [0, 0.5] + [0.1 + 0.9 * (1 + math.cos(math.pi * k / 8)) / 2 for k in range(8)],
        ),
    ],
    ids=["constant", "warm-up", "linear", "cosine"],
)
def test_learning_rates_by_hand(solo, models, helpers, optimizer, expected):
    solo.build("megatron:d1", models("llama-tied"), total_steps=10, optimizer={"lr": 1e-3, **optimizer})
    batch = helpers.random_batch([6])
    rates = [solo.train(batch)["learning_rate"] for _ in range(12)]
    assert rates[:10] == pytest.approx([1e-3 * e for e in expected], abs=1e-12)
    last = optimizer.get("min_lr_ratio", 1.0) * 1e-3
    assert rates[10:] == pytest.approx([last, last], abs=1e-12)


def test_a_decay_needs_an_end(solo, models):
    errors = solo.refuses("megatron:d1", models("qwen3"), optimizer={"lr_scheduler_type": "cosine"})
    assert errors[0][0] == "ValueError"
    assert "lr_scheduler_type 'cosine'" in errors[0][1] and "total_train_steps" in errors[0][1]


def test_without_an_optimizer_the_model_speaks_but_does_not_train(solo, models, helpers):
    batch = helpers.random_batch([9, 4])
    solo.build("megatron:d1", models("qwen3"), optimizer=None)
    expected = helpers.hugging_face_logits(models("qwen3"), batch)
    assert torch.allclose(solo.logits(batch), expected, atol=1e-4)
    assert solo.attempt_training(batch) == [
        ("RuntimeError", "this model has no optimizer: its section of the configuration has `optimizer: null`")
    ]


def test_a_batch_without_loss_tokens_is_refused_on_every_rank(pair, models, helpers):
    batch = helpers.random_batch([9, 4, 7])
    none = PackedBatch(batch.input_ids, batch.cu_seqlens, {"loss_mask": torch.zeros_like(batch.tokens["loss_mask"])})
    pair.build("megatron:d2", models("qwen3"))
    for error in pair.attempt_training(none):
        assert error is not None and error[0] == "ValueError" and "loss_mask is 0 everywhere" in error[1]
    assert pair.train(batch)["loss"] > 0, "the engine goes on after it"


def test_a_sequence_over_the_budget_is_one_error_on_every_rank(pair, models, helpers):
    """Both ranks name the length that is really there, so whichever speaks first is right."""
    pair.build("megatron:d2", models("qwen3"))
    errors = pair.attempt_training(helpers.random_batch([200, 3, 5]))
    for error in errors:
        assert error is not None and error[0] == "SequenceTooLong"
        assert "a sequence of 200 tokens" in error[1] and "at most 96 tokens" in error[1]
        assert "mb_spec.max_tokens_per_mb" in error[1]
    assert pair.train(helpers.random_batch([9, 4, 7]))["loss"] > 0


def test_no_limit_takes_any_length(pair, models, helpers):
    batch = helpers.random_batch([200, 3, 5])
    figures = pair.build("megatron:d2", models("qwen3"), mb_spec={"max_tokens_per_mb": None}).train(batch)
    assert figures["micro_batches"] == 1
    assert figures["loss"] == pytest.approx(
        _cross_entropy(helpers.hugging_face_logits(models("qwen3"), batch), batch), rel=1e-5
    )


@pytest.mark.parametrize("lengths", [[12], [12, 1], [30, 2]], ids=str)
def test_fewer_sequences_than_ranks(pair, solo, models, helpers, lengths):
    batch = helpers.random_batch(lengths)
    two = pair.build("megatron:d2", models("qwen3")).train(batch)
    one = solo.build("megatron:d1", models("qwen3")).train(batch)
    assert (two["loss"], two["grad_norm"]) == pytest.approx((one["loss"], one["grad_norm"]), rel=1e-5)


def test_unequal_numbers_of_micro_batches(pair, solo, models, helpers):
    """One rank has a long sequence, the other short ones; at least three micro-batches are asked for."""
    batch = helpers.random_batch([95, 20, 20, 20, 20, 15])
    mb_spec = {"n_mbs": 3}
    two = pair.build("megatron:d2", models("qwen3"), mb_spec=mb_spec).train(batch)
    one = solo.build("megatron:d1", models("qwen3")).train(batch)
    assert two["micro_batches"] == 3
    assert (two["loss"], two["grad_norm"]) == pytest.approx((one["loss"], one["grad_norm"]), rel=1e-5)


@pytest.mark.parametrize(
    ("kind", "text", "size"),
    [
        ("qwen3", "megatron:d1", 1),
        ("qwen3", "megatron:p2", 2),
        ("qwen3", "megatron:t2", 2),
        ("qwen3-moe", "megatron:t2", 2),
        ("qwen3-moe", "megatron:d2e2", 2),
    ],
)
def test_from_scratch_is_one_model_whatever_the_layout(request, models, helpers, tmp_path, kind, text, size):
    """Every rank holds its part of one random model: Transformers computes the same from the saved folder. Tied
    embeddings on two stages, replicated routers and data-parallel copies have to agree for that."""
    ranks = request.getfixturevalue({1: "solo", 2: "pair"}[size])
    ranks.build(text, models(kind), init_from_scratch=True, disable_dropout=True)
    ranks.group.call("do", "save", str(tmp_path / "model"))
    batch = helpers.random_batch([33, 8, 2])
    logits = ranks.logits(batch)
    assert torch.allclose(logits, helpers.hugging_face_logits(tmp_path / "model", batch), atol=1e-4)
    assert (logits - helpers.hugging_face_logits(models(kind), batch)).abs().max() > 0.01, "weights were loaded"
    assert ranks.train(batch)["loss"] == pytest.approx(math.log(131), rel=0.1), "fresh weights know nothing"


def test_log_probabilities_and_entropy_follow_the_temperature(pair, models, helpers):
    folder, batch = models("qwen2"), helpers.random_batch([50, 1, 20, 3])
    pair.build("megatron:t2", folder)
    log_probs, entropy = pair.forward(batch, temperature=0.7, entropy=True)
    logits = helpers.hugging_face_logits(folder, batch).double() / 0.7
    for ours, h, row, ids in zip(
        *(batch.split_tokens(x) for x in (log_probs, entropy, logits, batch.input_ids)), strict=True
    ):
        expected = row.log_softmax(-1)
        assert ours[0] == 0 and h[0] == 0
        assert torch.allclose(ours[1:].double(), expected[:-1].gather(1, ids[1:, None])[:, 0], atol=1e-4)
        assert torch.allclose(h[1:].double(), -(expected.exp() * expected).sum(-1)[:-1], atol=1e-4)


def test_bfloat16_is_what_leaves_the_engine(pair, models, helpers):
    """Parameters are bfloat16, master weights float32: small steps add up that bfloat16 alone would round away."""
    folder = models("qwen3")
    pair.build("megatron:d2", folder, dtype="bfloat16", optimizer={"lr": 1e-5, "weight_decay": 0.0})
    before = pair.weights()
    assert {t.dtype for t in before.values()} == {torch.bfloat16}
    for seed in range(10):
        pair.train(helpers.random_batch(LENGTHS, seed % 2))
    after = pair.weights()
    name = "model.norm.weight"  # near 1, where bfloat16 has steps of 2**-7: ten times 1e-5 does not show
    assert torch.equal(before[name], after[name])
    name = "model.embed_tokens.weight"
    assert not torch.equal(before[name], after[name])
    assert all(t.isfinite().all() for t in after.values())


def test_deterministic_algorithms_repeat_bit_for_bit(solo, models, helpers):
    folder, megatron = models("qwen3"), {"use_deterministic_algorithms": True}
    runs = [three_steps(solo, helpers, "megatron:d1", folder, megatron=megatron) for _ in range(2)]
    assert solo.group.call("free_algorithms") == [True], "torch was asked for them"
    assert runs[0][0] == runs[1][0]
    assert all(torch.equal(runs[0][1][n], runs[1][1][n]) for n in runs[0][1])


def test_the_tiny_models_here_fit_their_layouts(models):
    from areal_like.alloc import ModelAllocation

    for kind, text in [("qwen3", "megatron:d1t2"), ("qwen3-moe", "megatron:d2e2"), ("qwen2", "megatron:t2")]:
        assert check_layout(ModelAllocation.parse(text), ModelSpec.from_path(models(kind))) == []
