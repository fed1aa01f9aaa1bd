"""float16: the loss scale, steps that are skipped, and what the scale reaches."""

from __future__ import annotations

import math

import pytest
import torch
from megatron.core.optimizer.grad_scaler import DynamicGradScaler

from areal_like.engines.megatron import cpu
from areal_like.engines.megatron.loss_scale import SharedLossScale

slow = pytest.mark.slow
LENGTHS = [90, 5, 17, 2, 31, 44, 8]
FIXED = {"initial_loss_scale": 2.0**10, "loss_scale_window": 1000}
AUX = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 2.0, "moe_z_loss_coeff": 0.2}


def train(ranks, helpers, steps):
    return [ranks.train(helpers.random_batch(LENGTHS, seed)) for seed in range(steps)]


@pytest.mark.parametrize(
    ("kind", "text", "ddp"),
    [
        ("qwen3-moe", "megatron:d2e2", {}),
        ("qwen3", "megatron:p2", {"use_distributed_optimizer": False}),
        pytest.param("qwen3", "megatron:p2", {}, marks=slow),
        pytest.param("qwen3", "megatron:t2", {}, marks=slow),
        pytest.param("qwen3", "megatron:d2", {"grad_reduce_in_fp32": False}, marks=slow),
    ],
)
def test_three_steps_are_those_of_float32(pair, models, helpers, kind, text, ddp):
    """Also through a pipeline: a loss whose scale were lost between the stages would give other gradient norms."""
    pair.build(text, models(kind))
    wanted = train(pair, helpers, 3)
    pair.build(text, models(kind), dtype="float16", optimizer=FIXED, ddp=ddp)
    assert {t.dtype for t in pair.weights().values()} == {torch.float16}
    for ours, theirs in zip(train(pair, helpers, 3), wanted, strict=True):
        assert ours["updated"] == 1 and ours["loss_scale"] == 2**10
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=2e-3)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=2e-2)
        assert "loss_scale" not in theirs


def test_steps_that_overflow_are_skipped(pair, models, helpers):
    """From a scale of 2**32 down, halved after every second overflow at first (hysteresis), then after each."""
    optimizer = {"lr_scheduler_type": "linear", "hysteresis": 2, "initial_loss_scale": 2.0**32}
    pair.build("megatron:d2e2", models("qwen3-moe"), dtype="float16", optimizer=optimizer, total_steps=10)
    before, figures = pair.weights(), []
    for seed in range(30):
        figures.append(pair.train(helpers.random_batch(LENGTHS, seed % 2)))
        if figures[-1]["updated"]:
            break
        assert figures[-1]["grad_norm"] == math.inf and math.isfinite(figures[-1]["loss"])
        after = pair.weights()
        assert all(torch.equal(before[n], after[n]) for n in before)
    scales = [math.log2(f["loss_scale"]) for f in figures]
    assert scales == [32, 32, *range(31, 31 - len(figures) + 2, -1)] and len(scales) > 5
    assert figures[-1]["updated"] == 1 and math.isfinite(figures[-1]["grad_norm"])
    last = pair.train(helpers.random_batch(LENGTHS))
    rates = [f["learning_rate"] for f in figures]
    assert len(set(rates)) == 1, "skipped steps are no steps of the schedule"
    assert last["learning_rate"] == pytest.approx(0.9 * rates[0])


def test_the_scale_grows_and_has_a_floor(solo, models, helpers):
    optimizer = {"initial_loss_scale": 256.0, "loss_scale_window": 2}
    solo.build("megatron:d1", models("qwen3"), dtype="float16", optimizer=optimizer)
    assert [f["loss_scale"] for f in train(solo, helpers, 5)] == [256, 256, 512, 512, 1024]
    optimizer = {"initial_loss_scale": 2.0**30, "min_loss_scale": 2.0**29, "hysteresis": 1}
    solo.build("megatron:d1", models("qwen3"), dtype="float16", optimizer=optimizer)
    figures = train(solo, helpers, 4)
    assert [f["loss_scale"] for f in figures] == [2**30, 2**29, 2**29, 2**29] and not any(f["updated"] for f in figures)


def test_the_scale_reaches_auxiliary_losses(solo, models, helpers):
    """Gradients of the routers, unscaled, at two scales: those of float32. The losses dominate them."""
    batch, name = helpers.random_batch(LENGTHS), "decoder.layers.1.mlp.router.weight"

    def gradient(dtype, scale, megatron):
        optimizer = {"gradient_clipping": 0.0, "initial_loss_scale": scale}
        solo.build("megatron:d1", models("qwen3-moe"), dtype=dtype, optimizer=optimizer, megatron=megatron)
        solo.train(batch)
        return solo.group.call("gradients")[0][name]

    wanted, plain = gradient("float32", 1.0, AUX), gradient("float32", 1.0, {})
    assert (wanted - plain).norm() > 0.5 * wanted.norm()
    for scale in (1.0, 2.0**10):
        assert (gradient("float16", scale, AUX) - wanted).norm() < 0.02 * wanted.norm(), scale


def test_experts_that_overflow_alone_lower_the_one_scale(pair, models, helpers):
    """Megatron-Core's experts have an optimizer of their own; with scales that part, gradients would be wrong."""
    optimizer = FIXED | {"hysteresis": 1}
    pair.build("megatron:d2e2", models("qwen3-moe"), dtype="float16", optimizer=optimizer)
    wanted = pair.train(helpers.random_batch(LENGTHS))["grad_norm"]
    pair.build("megatron:d2e2", models("qwen3-moe"), dtype="float16", optimizer=optimizer)
    pair.group.call("overflow_experts", True)
    assert pair.train(helpers.random_batch(LENGTHS))["updated"] == 0
    pair.group.call("overflow_experts", False)
    figures = pair.train(helpers.random_batch(LENGTHS))
    assert figures["loss_scale"] == 2**9 and figures["updated"] == 1
    assert figures["grad_norm"] == pytest.approx(wanted, rel=1e-2)


def test_a_shared_scale_moves_once_a_step():
    cpu.install()
    shared = SharedLossScale(DynamicGradScaler(64.0, 1.0, 2.0, 0.5, 2, 1), 2)
    for reports, scale in [
        ((False, True), 32),
        ((True, True), 16),
        ((False, False), 16),
        ((False, False), 32),
    ]:
        before = float(shared.scale)
        shared.update(reports[0])
        assert float(shared.scale) == before, "the other optimizer still divides by it"
        shared.update(reports[1])
        assert float(shared.scale) == scale and float(shared.inv_scale) == pytest.approx(1 / scale)
    shared.load_state_dict(shared.state_dict() | {"scale": torch.tensor([8.0])})
    assert float(shared.scale) == 8
