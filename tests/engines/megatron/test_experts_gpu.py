"""Experts as grouped products on one GPU: values, gradients, no wait for the host, the same bits again.

`python -m pytest -m gpu tests/engines/megatron/test_experts_gpu.py`
"""

from __future__ import annotations

import engine_views
import pytest
import torch
from experts_reference import grouped_experts, inputs, largest_difference, one_by_one
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from areal_like.algorithms.sft import SFTLoss
from areal_like.engines.megatron.experts import has_grouped_products
from areal_like.runtime.local import WorkerGroup

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

COUNTS = [[3, 17, 1, 9], [0, 500, 0, 13], [30, 0, 0, 0], [0, 0, 0, 0], [129, 128, 127, 1]]
LENGTHS = [90, 5, 17, 2, 31, 44, 8]


@pytest.fixture(autouse=True)
def kernel():
    if not has_grouped_products(torch.device("cuda"), torch.bfloat16):
        pytest.skip("this GPU has no kernel for grouped products")


def run(module, counts, seed=1):
    """Inputs, output and gradients of the rows; gradients of the weights go where the module puts them."""
    rows, numbers, probs, grad = inputs(counts, "cuda", torch.bfloat16, seed)
    output, _ = module(rows, numbers, probs)
    output.backward(grad)
    return (rows, numbers, probs, grad), {"output": output, "rows": rows.grad, "probs": probs.grad}


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "moe_act"])
@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_values_and_gradients_are_those_of_a_loop_over_the_experts(counts, recompute):
    """bfloat16 beside float64: rounding of 8 bits, of sums over 64 and of the product in between."""
    module = grouped_experts(4, "cuda", torch.bfloat16)
    module._recomputes_activation = recompute
    given, found = run(module, counts)
    found |= {"fc1": module.linear_fc1.weight.grad, "fc2": module.linear_fc2.weight.grad}
    for name, value in one_by_one(module, *given).items():
        assert largest_difference(found[name], value) < 2e-2, name
    for expert, count in enumerate(counts):
        assert count or (not found["fc1"][expert].any() and not found["fc2"][expert].any()), "no rows, no gradient"


def test_gradients_of_micro_batches_add_up_in_float32():
    module = grouped_experts(4, "cuda", torch.bfloat16)
    weights = {"fc1": module.linear_fc1.weight, "fc2": module.linear_fc2.weight}
    for weight in weights.values():
        weight.main_grad = torch.zeros(weight.shape, device="cuda")
    expected = {name: torch.zeros(w.shape, dtype=torch.float64) for name, w in weights.items()}
    for seed, counts in enumerate(([3, 17, 1, 9], [0, 500, 0, 13])):
        given, _ = run(module, counts, seed)
        for name in expected:
            expected[name] += one_by_one(module, *given)[name]
    for name, weight in weights.items():
        assert largest_difference(weight.main_grad, expected[name]) < 2e-2, name


def test_the_same_bits_again():
    """What deterministic mode relies on: no sum of a grouped product depends on the order in which blocks finish."""
    module = grouped_experts(16, "cuda", torch.bfloat16)
    counts = [0, 700, 3, 64, 65, 1, 0, 0, 128, 400, 9, 77, 300, 2, 0, 51]
    results = []
    for _ in range(5):
        module.zero_grad()
        _, found = run(module, counts)
        results.append([*found.values(), module.linear_fc1.weight.grad, module.linear_fc2.weight.grad])
    for again in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], again, strict=True))


# In the engine


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    config = Qwen3MoeConfig(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=128,
        norm_topk_prob=True,
        initializer_range=0.1,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("experts-gpu")
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def gpu():
    with WorkerGroup.start("engine", "megatron_hosts:EngineHost", {}, 1, "cuda") as group:
        yield group


def build(gpu, folder, helpers, **changes):
    section = helpers.engine_config("megatron:d1", folder, **({"dtype": "bfloat16"} | changes))
    gpu.call("build", "megatron:d1", section, device="cuda")
    return gpu.call("moe_layers", [])[0][0]


def test_a_moe_layer_does_not_wait_for_the_gpu(gpu, folder, helpers):
    kinds = build(gpu, folder, helpers)
    assert kinds == {"dispatcher": "LocalDispatcher", "experts": "GroupedExperts"}
    assert gpu.call("ask", engine_views.moe_layer_waits) == [None]
    kinds = build(gpu, folder, helpers, megatron={"moe_grouped_gemm": False})
    assert kinds["experts"] == "SequentialMLP"
    (waits,) = gpu.call("ask", engine_views.moe_layer_waits)
    assert waits is not None and "synchronizing" in waits, "the probe can find a wait"


@pytest.mark.parametrize("options", [{}, {"ddp": {"overlap_grad_reduce": True}}], ids=str)
def test_a_step_is_that_of_experts_one_by_one(gpu, folder, helpers, options):
    figures = []
    for grouped in (False, True):
        build(gpu, folder, helpers, megatron={"moe_grouped_gemm": grouped}, **options)
        figures.append(gpu.call("do", "train_batch", helpers.random_batch(LENGTHS), SFTLoss())[0])
    plain, grouped = figures
    assert grouped["loss"] == pytest.approx(plain["loss"], rel=2e-3)
    assert grouped["grad_norm"] == pytest.approx(plain["grad_norm"], rel=3e-2)


def test_transformer_engine_keeps_what_grouped_products_do_not_take(gpu, folder, helpers):
    assert build(gpu, folder, helpers, dtype="float32")["experts"] == "TEGroupedMLP"
    assert build(gpu, folder, helpers, dtype="float16")["experts"] == "TEGroupedMLP"
