"""MoE options: what reaches Megatron's modules, the gradients of the auxiliary losses, and the expert bias."""

from __future__ import annotations

import pytest
import torch
from moe_reference import LENGTHS, SGD, Reference, assert_step, build, micro_batches

slow = pytest.mark.slow
BOTH = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.3, "moe_z_loss_coeff": 0.05}
GLOBAL = {"moe_router_load_balancing_type": "global_aux_loss", "moe_aux_loss_coeff": 0.3}


# Auxiliary losses


@pytest.mark.parametrize(
    "text",
    [
        "megatron:d1",
        "megatron:d2e2",
        "megatron:t2",
        pytest.param("megatron:p2", marks=slow),
        pytest.param("megatron:c2", marks=slow),
        pytest.param("megatron:p2v2", marks=slow),  # needs four layers
        pytest.param("megatron:(attn:d1t2c2|ffn:e2)", marks=slow),
        pytest.param("megatron:d2", marks=slow),
        pytest.param("megatron:(attn:d1p2t2|ffn:e2)", marks=slow),
        pytest.param("megatron:(attn:d2t2|ffn:e2t2)", marks=slow),
    ],
)
def test_auxiliary_losses_have_the_gradient_of_their_formulas(request, models, helpers, text):
    """The factors are large: without a loss, or with another scale, the weights differ by more than the tolerance."""
    folder, batch = models("qwen3-moe-4" if "v2" in text else "qwen3-moe"), helpers.random_batch(LENGTHS)
    ranks = build(request, text, folder, BOTH)
    _, reported = assert_step(ranks, helpers, Reference(folder), batch, aux=0.3, z=0.05)
    assert reported == {"load_balancing_loss", "z_loss", "busiest_expert"}


@pytest.mark.parametrize(
    "text", ["megatron:d2e2", pytest.param("megatron:t2", marks=slow), pytest.param("megatron:d2p2e2", marks=slow)]
)
def test_the_allgather_dispatcher_with_unequal_sequences(request, models, helpers, text):
    """Micro-batches of the two ranks are padded to one length; the padding counts nowhere."""
    folder, batch = models("qwen3-moe"), helpers.random_batch([95, 20, 20, 20, 20, 15])
    ranks = build(request, text, folder, BOTH | {"moe_token_dispatcher_type": "allgather"})
    (layer, *_), *_ = ranks.group.call("moe_layers", ["moe_token_dispatcher_type"])
    assert layer["dispatcher"] == "MoEAllGatherTokenDispatcher"
    assert_step(ranks, helpers, Reference(folder), batch, aux=0.3, z=0.05)


def test_auxiliary_losses_through_megatron_bridge(solo, models, helpers):
    folder, batch = models("qwen3-moe"), helpers.random_batch(LENGTHS)
    solo.build("megatron:d1", folder, optimizer=SGD, megatron=BOTH | {"bridge_type": "megatron-bridge"})
    assert_step(solo, helpers, Reference(folder), batch, aux=0.3, z=0.05)


def test_the_factors_are_large_enough_to_show(solo, models, helpers):
    """Without the losses the reference is far from the step that the test above compares."""
    folder, batch = models("qwen3-moe"), helpers.random_batch(LENGTHS)
    solo.build("megatron:d1", folder, optimizer=SGD, megatron=BOTH)
    rows = micro_batches(solo, batch, helpers)
    assert len(rows) > 1, "several micro-batches"
    gates = "model.layers.0.mlp.gate.weight"
    plain, aux, z = (
        Reference(folder).step(rows, lr=SGD["lr"], **factors).weights[gates]
        for factors in ({}, {"aux": 0.3}, {"z": 0.05})
    )
    assert (aux - plain).abs().max() > 1e-3 and (z - plain).abs().max() > 1e-3


@pytest.mark.parametrize("text", ["megatron:d1", pytest.param("megatron:d2e2", marks=slow)])
def test_global_load_balancing(request, models, helpers, text):
    """The shares of the experts are those of all tokens of the global batch so far."""
    folder, batch = models("qwen3-moe"), helpers.random_batch(LENGTHS)
    ranks = build(request, text, folder, GLOBAL)
    _, reported = assert_step(ranks, helpers, Reference(folder), batch, global_aux=0.3)
    assert reported == {"global_load_balancing_loss", "busiest_expert"}
    # The shares of a step are not those of the one before.
    weights = Reference(folder)
    weights.step(micro_batches(ranks, batch, helpers), lr=SGD["lr"], global_aux=0.3)
    assert_step(ranks, helpers, weights, helpers.random_batch(LENGTHS, seed=1), tolerance=1e-4, global_aux=0.3)


@pytest.mark.parametrize(
    "recomputation",
    [
        {"recompute_granularity": "full"},
        {"recompute_granularity": "selective", "recompute_modules": ("moe",)},
        pytest.param(
            {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 2}, marks=slow
        ),
    ],
    ids=str,
)
def test_recomputed_layers_count_once(solo, models, helpers, recomputation):
    folder, batch = models("qwen3-moe"), helpers.random_batch(LENGTHS)
    solo.build("megatron:d1", folder, optimizer=SGD, megatron=BOTH | recomputation, gradient_checkpointing=True)
    assert_step(solo, helpers, Reference(folder), batch, aux=0.3, z=0.05)


def test_a_rank_without_sequences_adds_nothing(pair, models, helpers):
    """One sequence for two data-parallel ranks: the other runs padding alone."""
    folder, batch = models("qwen3-moe"), helpers.random_batch([40])
    pair.build("megatron:d2e2", folder, optimizer=SGD, megatron=BOTH)
    assert_step(pair, helpers, Reference(folder), batch, aux=0.3, z=0.05)


def test_passes_without_gradient_count_nothing(solo, models, helpers):
    folder, batch = models("qwen3-moe"), helpers.random_batch(LENGTHS)
    megatron = BOTH | {"moe_router_bias_update_rate": 0.01}
    solo.build("megatron:d1", folder, optimizer=SGD, megatron=megatron)
    before = solo.group.call("expert_bias")
    solo.forward(batch)
    assert solo.group.call("counted") == [0.0]
    after = solo.group.call("expert_bias")
    assert all(torch.equal(a, b) for a, b in zip(before[0], after[0], strict=True))


# Expert bias


@pytest.mark.parametrize("text", ["megatron:d2e2", pytest.param("megatron:(attn:d1p2t2|ffn:e2)", marks=slow)])
def test_the_expert_bias_chooses_experts_and_follows_their_load(request, models, helpers, text):
    """Routing, losses and gradients with a bias; then bias + rate * sign(mean load - load) over the global batch."""
    folder, batch = models("qwen3-moe"), helpers.random_batch(LENGTHS)
    ranks = build(request, text, folder, {"moe_router_bias_update_rate": 0.01})
    bias = 0.3 * torch.randn(3, 4, generator=torch.Generator().manual_seed(1))
    stages = [bias[:2], bias[2:]] if ranks.mesh.size("pp") == 2 else [bias]
    here = [stages[ranks.mesh.coordinates(rank).pp] for rank in range(ranks.count)]
    ranks.group.call_each("set_expert_bias", [(part,) for part in here])
    expected, _ = assert_step(ranks, helpers, Reference(folder, bias), batch)
    unbiased = Reference(folder).step(micro_batches(ranks, batch, helpers), lr=0.0)
    assert not torch.equal(unbiased.counts, expected.counts), "the bias changed choices"
    counts = expected.counts
    moved = bias + 0.01 * torch.sign(counts.mean(1, keepdim=True) - counts).float()
    for rank, biases in enumerate(ranks.group.call("expert_bias")):
        stage = ranks.mesh.coordinates(rank).pp
        wanted = moved if len(stages) == 1 else (moved[:2], moved[2:])[stage]
        assert torch.allclose(torch.stack(biases), wanted, atol=1e-7)


def test_the_expert_bias_is_float32_and_survives_a_load(solo, models, helpers):
    """A rate of 2**-12 would vanish beside 1 in bfloat16. Loading weights is no reason to forget the bias."""
    folder, batch = models("qwen3-moe"), helpers.random_batch(LENGTHS)
    solo.build("megatron:d1", folder, dtype="bfloat16", megatron={"moe_router_bias_update_rate": 2.0**-12})
    solo.group.call("set_expert_bias", torch.ones(3, 4))
    solo.train(batch)
    (biases,) = solo.group.call("expert_bias")
    steps = {float(x) for bias in biases for x in (bias - 1) * 2**12}
    assert steps <= {-1.0, 0.0, 1.0} and len(steps) > 1
    solo.group.call("do", "load", str(folder))
    solo.forward(batch)
    assert torch.equal(torch.stack(solo.group.call("expert_bias")[0]), torch.stack(biases))


@slow
def test_the_expert_bias_is_in_a_recovery_checkpoint(pair, models, helpers, tmp_path):
    """Saved under d2e2 and loaded under p2: each stage has the biases of its layers."""
    folder, options = models("qwen3-moe"), {"moe_router_bias_update_rate": 0.01}
    pair.build("megatron:d2e2", folder, megatron=options)
    pair.train(helpers.random_batch(LENGTHS))
    saved, _ = pair.group.call("expert_bias")
    pair.group.call("do", "save_checkpoint", tmp_path / "saved", step=1)
    pair.group.call("do", "finish_checkpoint")
    pair.build("megatron:p2", folder, megatron=options)
    pair.group.call("do", "load_checkpoint", tmp_path / "saved")
    first, second = pair.group.call("expert_bias")
    assert torch.equal(torch.stack([*first, *second]), torch.stack(saved)) and torch.stack(saved).abs().max() > 0


# What reaches Megatron's modules

EVERYTHING = {
    "moe_router_load_balancing_type": "aux_loss",
    "moe_aux_loss_coeff": 0.02,
    "moe_z_loss_coeff": 0.003,
    "moe_router_dtype": "fp64",
    "moe_router_bias_update_rate": 0.004,
}
DEFAULTS = {
    "moe_token_dispatcher_type": "alltoall",
    "moe_router_load_balancing_type": "none",
    "moe_aux_loss_coeff": 0.0,
    "moe_z_loss_coeff": None,
    "moe_router_dtype": "fp32",
    "moe_router_fusion": False,
    "moe_router_enable_expert_bias": False,
    "moe_grouped_gemm": False,
    "moe_permute_fusion": False,
    "moe_shared_expert_overlap": False,
}


@pytest.mark.parametrize("bridge", ["mbridge", "megatron-bridge"])
def test_options_reach_every_layer(solo, models, bridge):
    """Also those that are off: megatron-bridge's own defaults would add a load-balancing loss and fuse kernels."""
    named = {"bridge_type": bridge}
    solo.build("megatron:d1", models("qwen3-moe"), megatron=EVERYTHING | named)
    wanted = EVERYTHING | {"moe_router_enable_expert_bias": True}
    (layers,) = solo.group.call("moe_layers", list(wanted))
    kinds = {"dispatcher": "LocalDispatcher", "experts": "SequentialMLP"}
    assert layers == [wanted | kinds] * 3
    solo.build("megatron:d1", models("qwen3-moe"), megatron=named)
    (layers,) = solo.group.call("moe_layers", list(DEFAULTS))
    assert layers == [DEFAULTS | kinds] * 3


@pytest.mark.parametrize(
    ("megatron", "words"),
    [
        ({"moe_permute_fusion": True}, "moe_permute_fusion: true needs TransformerEngine"),
        ({"moe_router_fusion": True}, "moe_router_fusion: true needs TransformerEngine"),
        ({"moe_token_dispatcher_type": "flex"}, "needs the package deep_ep"),
        ({"moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 0.1}, "seq_aux_loss"),
        ({"moe_router_load_balancing_type": "sinkhorn"}, "sinkhorn"),
        ({"moe_shared_expert_overlap": True}, "no shared experts"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_cannot_be_done_is_refused_by_the_engine_too(solo, models, megatron, words):
    (error,) = solo.refuses("megatron:d1", models("qwen3-moe"), megatron=megatron)
    assert error is not None and error[0] == "ValueError" and words in error[1], error
