"""MoE kernels of TransformerEngine, float16 and recomputed parts on one GPU.

`python -m pytest -m gpu tests/engines/megatron/test_moe_gpu.py`
"""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from areal_like.algorithms.sft import SFTLoss
from areal_like.runtime.local import WorkerGroup

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(1200)]

LENGTHS = [90, 5, 17, 2, 31, 44, 8]
BALANCE = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.1, "moe_z_loss_coeff": 0.01}
OFF = {"moe_grouped_gemm": False, "moe_permute_fusion": False, "moe_router_fusion": False}
SELECTIVE = {"recompute_granularity": "selective", "recompute_method": None, "recompute_num_layers": None}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    config = Qwen3MoeConfig(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=3,
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
    path = tmp_path_factory.mktemp("moe-gpu")
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def gpu():
    with WorkerGroup.start("engine", "megatron_hosts:EngineHost", {}, 1, "cuda") as group:
        yield group


@pytest.fixture
def step(gpu, folder, helpers):
    """Figures of one step, and the class of the experts."""

    def run(megatron, **changes):
        changes = {"dtype": "bfloat16"} | changes
        section = helpers.engine_config("megatron:d1", folder, megatron=BALANCE | megatron, **changes)
        gpu.call("build", "megatron:d1", section, device="cuda")
        (figures,) = gpu.call("do", "train_batch", helpers.random_batch(LENGTHS), SFTLoss())
        return figures, gpu.call("moe_layers", [])[0][0]["experts"]

    return run


def assert_same(ours, theirs):
    for name, tolerance in {
        "loss": 2e-3,
        "moe/load_balancing_loss": 1e-2,
        "moe/z_loss": 1e-2,
        "grad_norm": 3e-2,
    }.items():
        assert ours[name] == pytest.approx(theirs[name], rel=tolerance), name


@pytest.mark.parametrize("name", [*OFF, "all"])
def test_a_fused_kernel_takes_the_step_of_the_unfused_ones(step, name):
    plain, kind = step(OFF)
    assert kind == "SequentialMLP"
    fused, kind = step(dict.fromkeys(OFF, True) if name == "all" else OFF | {name: True})
    assert kind == ("GroupedExperts" if name in ("moe_grouped_gemm", "all") else "SequentialMLP")
    assert_same(fused, plain)


def test_kernels_are_on_where_they_exist(step):
    _, kind = step({})
    assert kind == "GroupedExperts"


@pytest.mark.parametrize(
    "parts", [("core_attn",), ("moe",), ("moe_act",), ("layernorm",), ("core_attn", "moe_act")], ids=str
)
def test_recomputed_parts_change_nothing(step, parts):
    plain, _ = step({})
    again, _ = step(SELECTIVE | {"recompute_modules": parts}, gradient_checkpointing=True)
    assert_same(again, plain)


def test_float16_takes_the_step_of_bfloat16(step):
    plain, _ = step({})
    scaled, _ = step({}, dtype="float16", optimizer={"initial_loss_scale": 2.0**10})
    assert scaled["updated"] == 1 and scaled["loss_scale"] == 2**10
    assert scaled["loss"] == pytest.approx(plain["loss"], rel=1e-2)
    assert scaled["grad_norm"] == pytest.approx(plain["grad_norm"], rel=5e-2)


def test_the_expert_bias_moves(step, gpu):
    step({"moe_router_bias_update_rate": 0.01})
    biases = torch.stack(gpu.call("expert_bias")[0]).cpu()
    steps = (biases / 0.01).round()
    assert biases.dtype is torch.float32 and torch.allclose(biases, 0.01 * steps)
    assert steps.abs().max() == 1
