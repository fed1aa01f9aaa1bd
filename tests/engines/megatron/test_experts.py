"""Experts as grouped products: values and gradients, Megatron's gradient buffers, layouts, bridges, checkpoints."""

from __future__ import annotations

import engine_views
import pytest
import torch
from experts_reference import grouped_experts, inputs, largest_difference, one_by_one
from moe_reference import LENGTHS, SGD, Reference, assert_step, build
from safetensors.torch import load_file

from areal_like.engines.megatron import cpu
from areal_like.engines.megatron.experts import expert_weights

slow = pytest.mark.slow
GROUPED = {"moe_grouped_gemm": True}
COUNTS = [[3, 17, 1, 9], [0, 12, 0, 5], [30, 0, 0, 0], [0, 0, 0, 0]]


@pytest.fixture(autouse=True)
def on_the_cpu():
    cpu.install()


# One module


@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_values_and_gradients_are_those_of_a_loop_over_the_experts(counts):
    module = grouped_experts(4, "cpu", torch.float32)
    rows, numbers, probs, grad = inputs(counts, "cpu", torch.float32)
    expected = one_by_one(module, rows, numbers, probs, grad)
    output, bias = module(rows, numbers, probs)
    output.backward(grad)
    weights = {"fc1": module.linear_fc1.weight.grad, "fc2": module.linear_fc2.weight.grad}
    found = {"output": output, "rows": rows.grad, "probs": probs.grad} | weights
    assert bias is None and found.keys() == expected.keys()
    for name, value in expected.items():
        assert largest_difference(found[name], value) < 2e-6, name
    for expert, count in enumerate(counts):
        assert count or not weights["fc1"][expert].any(), "an expert without rows has no gradient"


def test_gradients_of_micro_batches_add_up_in_the_gradient_buffer():
    """A float32 buffer under bfloat16 weights, as in Megatron's DistributedDataParallel, and its hook's conditions."""
    module = grouped_experts(4, "cpu", torch.bfloat16)
    weights = {"fc1": module.linear_fc1.weight, "fc2": module.linear_fc2.weight}
    seen = []
    for weight in weights.values():
        weight.main_grad = torch.zeros(weight.shape)
        accumulation = weight.expand_as(weight).grad_fn.next_functions[0][0]

        def hook(*_, weight=weight, accumulation=accumulation):
            seen.append((weight.grad is not None, weight.grad_added_to_main_grad))
            weight.grad = None

        accumulation.register_hook(hook)
    expected = {name: torch.zeros(w.shape, dtype=torch.float64) for name, w in weights.items()}
    for seed, counts in enumerate(([3, 17, 1, 9], [0, 12, 0, 5])):
        rows, numbers, probs, grad = inputs(counts, "cpu", torch.bfloat16, seed)
        for name in expected:
            expected[name] += one_by_one(module, rows, numbers, probs, grad)[name]
        module(rows, numbers, probs)[0].backward(grad)
    for name, weight in weights.items():
        assert largest_difference(weight.main_grad, expected[name]) < 2e-2, name
        assert weight.grad is None
    assert seen == [(True, True)] * 4


def test_frozen_experts_pass_gradients_on_and_keep_no_rows():
    module = grouped_experts(4, "cpu", torch.float32).requires_grad_(False)
    rows, numbers, probs, grad = inputs([3, 17, 1, 9], "cpu", torch.float32)
    expected = one_by_one(module, rows, numbers, probs, grad)
    output, _ = module(rows, numbers, probs)
    assert output.grad_fn.saved_tensors[0] is None
    output.backward(grad)
    assert largest_difference(rows.grad, expected["rows"]) < 2e-6
    assert module.linear_fc1.weight.grad is None and module.linear_fc2.weight.grad is None


def test_each_expert_has_a_name_and_is_a_part_of_the_stack():
    module = grouped_experts(4, "cpu", torch.float32)
    named = {weight.name: weight for weight in expert_weights(module)}
    assert list(named) == [f"linear_fc{i}.weight{e}" for i in (1, 2) for e in range(4)]
    named["linear_fc1.weight2"].tensor.fill_(7.0)
    assert (module.linear_fc1.weight[2] == 7).all() and not (module.linear_fc1.weight[1] == 7).any()
    plain = torch.nn.Linear(2, 2)
    assert [w.name for w in expert_weights(plain) if w.parameter is getattr(plain, w.name)] == ["weight", "bias"]


def test_a_width_that_grouped_products_cannot_take():
    with pytest.raises(ValueError, match=r"moe_grouped_gemm.* 12 x 64 in torch.bfloat16.* 16 bytes; set it to false"):
        grouped_experts(4, "cpu", torch.bfloat16, width=6)


# In the engine: one step beside Transformers in float64, gradients included


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("megatron:d1", {}),
        ("megatron:d1", {"ddp": {"use_distributed_optimizer": False}}),
        ("megatron:d2e2", {"ddp": {"overlap_grad_reduce": True, "bucket_size": 5000}}),
        ("megatron:(attn:d1t2|ffn:e2)", {}),
        pytest.param("megatron:(attn:d1t2|ffn:t2)", {}, marks=slow),
        pytest.param("megatron:d2", {"ddp": {"overlap_grad_reduce": True, "overlap_param_gather": True}}, marks=slow),
        pytest.param("megatron:t2", {}, marks=slow),
        pytest.param("megatron:c2", {}, marks=slow),
        pytest.param("megatron:p2v2", {}, marks=slow),
        pytest.param("megatron:(attn:d2t2|ffn:e2t2)", {}, marks=slow),
        pytest.param("megatron:(attn:d1p2t2|ffn:e2)", {}, marks=slow),
        pytest.param("megatron:d4e4", {}, marks=slow),
    ],
    ids=str,
)
def test_a_step_is_that_of_transformers(request, models, helpers, text, options):
    folder, batch = models("qwen3-moe-4" if "v2" in text else "qwen3-moe"), helpers.random_batch(LENGTHS)
    ranks = build(request, text, folder, GROUPED, **options)
    ((layer, *_), *_) = ranks.group.call("moe_layers", ["moe_grouped_gemm"])
    assert layer["experts"] == "GroupedExperts" and layer["moe_grouped_gemm"]
    assert_step(ranks, helpers, Reference(folder), batch)


@pytest.mark.parametrize(
    "recomputation",
    [
        {"recompute_granularity": "full"},
        {"recompute_granularity": "selective", "recompute_modules": ("moe_act",)},
        pytest.param({"recompute_granularity": "selective", "recompute_modules": ("moe",)}, marks=slow),
    ],
    ids=str,
)
def test_recomputation_changes_nothing(solo, models, helpers, recomputation):
    folder, batch = models("qwen3-moe"), helpers.random_batch(LENGTHS)
    megatron = GROUPED | recomputation
    solo.build("megatron:d1", folder, optimizer=SGD, megatron=megatron, gradient_checkpointing=True)
    assert_step(solo, helpers, Reference(folder), batch)


def test_a_rank_without_sequences_adds_nothing(pair, models, helpers):
    folder, batch = models("qwen3-moe"), helpers.random_batch([40])
    pair.build("megatron:d2e2", folder, optimizer=SGD, megatron=GROUPED)
    assert_step(pair, helpers, Reference(folder), batch)


# What bridges, the optimizer and checkpoints see


@pytest.mark.parametrize(
    ("text", "size"), [("megatron:d1", "solo"), pytest.param("megatron:(attn:d1t2|ffn:t2)", "pair", marks=slow)]
)
@pytest.mark.parametrize("bridge", ["mbridge", "megatron-bridge"])
def test_what_was_loaded_is_exported(request, models, bridge, text, size):
    folder, ranks = models("qwen3-moe"), request.getfixturevalue(size)
    ranks.build(text, folder, megatron=GROUPED | {"bridge_type": bridge})
    written, exported = load_file(folder / "model.safetensors"), ranks.weights()
    assert exported.keys() == written.keys()
    assert [n for n in written if not torch.equal(exported[n], written[n])] == []


def test_a_layer_has_two_expert_parameters(solo, models):
    """Not two for each expert: what loops over parameters (buffers, hooks, the optimizer) does so once a projection."""
    solo.build("megatron:d1", models("qwen3-moe"), megatron=GROUPED)
    (shapes,) = solo.group.call("ask", engine_views.expert_shapes)
    assert shapes == [(4, 64, 64), (4, 64, 32)] * 3


@pytest.mark.parametrize(
    ("text", "options", "other", "others"),
    [
        ("megatron:d2e2", GROUPED, "megatron:d1", GROUPED),
        ("megatron:d2e2", GROUPED, "megatron:d1", {}),
        pytest.param("megatron:d1", {}, "megatron:(attn:d1t2|ffn:t2)", GROUPED, marks=slow),
        pytest.param("megatron:(attn:d1t2|ffn:t2)", GROUPED, "megatron:d2", GROUPED, marks=slow),
    ],
    ids=str,
)
def test_either_kind_of_experts_goes_on_from_the_others_checkpoint(
    request, models, helpers, tmp_path, text, options, other, others
):
    folder, batches = models("qwen3-moe"), [helpers.random_batch(LENGTHS, seed=i) for i in range(3)]
    sizes = {"megatron:d1": "solo"}
    first = request.getfixturevalue(sizes.get(text, "pair")).build(text, folder, megatron=options)
    first.train(batches[0])
    first.group.call("do", "save_checkpoint", str(tmp_path / "saved"), step=1)
    unbroken = [first.train(batch) for batch in batches[1:]]
    second = request.getfixturevalue(sizes.get(other, "pair")).build(other, folder, megatron=others)
    second.train(batches[2])  # what is loaded replaces the state of an optimizer that has one
    second.group.call("do", "load_checkpoint", str(tmp_path / "saved"))
    second.group.call("do", "save_checkpoint", str(tmp_path / "again"), step=1)
    continued = [second.train(batch) for batch in batches[1:]]
    for a, b in zip(unbroken, continued, strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=2e-6) and b["grad_norm"] == pytest.approx(
            a["grad_norm"], rel=5e-6
        )
    saved, again = helpers.tensors(tmp_path / "saved"), helpers.tensors(tmp_path / "again")
    assert helpers.unequal(saved, again) == []
    assert saved["decoder.layers.mlp.experts.experts.linear_fc1.weight"].shape == (3, 4, 64, 64)


def test_adapters_of_grouped_experts_are_refused(solo, models):
    lora = {"use_lora": True, "lora_rank": 4, "megatron": GROUPED | {"bridge_type": "megatron-bridge"}}
    (error,) = solo.refuses("megatron:d1", models("qwen3-moe"), **lora)
    assert error is not None and "ExpertLinear" in error[1] and "moe_grouped_gemm: false" in error[1]
    solo.build("megatron:d1", models("qwen3-moe"), **lora, target_modules=["linear_qkv"])
