"""Both bridges: the same model, the same settings, the same weights, and back bit for bit.

mbridge and megatron-bridge are two implementations of the formats: that every rank's shards agree between them is a
check of both.
"""

from __future__ import annotations

import bridge_views
import pytest
import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from safetensors.torch import load_file
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from areal_like.config import FP8Config
from areal_like.engines.megatron import fp8
from areal_like.runtime.local import WorkerGroup

slow = pytest.mark.slow
BRIDGES = ("mbridge", "megatron-bridge")
RANKS = {1: "solo", 2: "pair", 4: "quad"}
BATCH = [40, 3, 21, 12]


def build(ranks, bridge, text, folder, **changes):
    megatron = {"bridge_type": bridge} | changes.pop("megatron", {})
    return ranks.build(text, folder, megatron=megatron, **changes)


def ask(ranks, function, *args):
    return ranks.group.call("ask", function, *args)


@pytest.mark.parametrize(
    ("kind", "text", "size"),
    [
        ("qwen3", "megatron:t2", 2),
        ("llama-tied", "megatron:p2", 2),
        ("qwen2", "megatron:t2", 2),
        ("qwen3-deep", "megatron:p2v2", 2),
        ("qwen3-moe", "megatron:d2e2", 2),
        ("qwen3-moe", "megatron:(attn:d1t2|ffn:t2)", 2),
        pytest.param("qwen3-moe", "megatron:(attn:t2|ffn:e2)", 2, marks=slow),
        pytest.param("qwen3", "megatron:d2", 2, marks=slow),
        pytest.param("qwen3", "megatron:c2", 2, marks=slow),
        pytest.param("qwen3", "megatron:t4", 4, marks=slow),  # two key-value heads: ranks hold halves
        pytest.param("llama-tied", "megatron:t2p2", 4, marks=slow),
        pytest.param("qwen3-deep", "megatron:t2p2v2", 4, marks=slow),
        pytest.param("qwen3-moe", "megatron:(attn:p2t2|ffn:e2)", 4, marks=slow),
        pytest.param("qwen3-moe", "megatron:(attn:d2t2|ffn:e2t2)", 4, marks=slow),
        pytest.param("qwen3-moe", "megatron:d4e4", 4, marks=slow),
        pytest.param("qwen3-moe", "megatron:d2p2e2", 4, marks=slow),
    ],
)
def test_the_bridges_agree_and_give_back_what_they_read(request, models, helpers, kind, text, size):
    ranks, folder = request.getfixturevalue(RANKS[size]), models(kind)
    original = load_file(folder / "model.safetensors")
    shards, settings = {}, {}
    for bridge in BRIDGES:
        build(ranks, bridge, text, folder, gradient_checkpointing=True)
        shards[bridge], settings[bridge] = ask(ranks, bridge_views.parameters), ask(ranks, bridge_views.model_settings)
        exported = ranks.weights()
        assert exported.keys() == original.keys()
        assert all(torch.equal(exported[name], original[name]) for name in original), bridge
        assert sorted(ranks.group.call("tensor_names")[0]) == sorted(original)
    assert settings["mbridge"] == settings["megatron-bridge"]
    for ours, theirs in zip(*(shards[b] for b in BRIDGES), strict=True):
        assert ours.keys() == theirs.keys() and all(torch.equal(ours[n], theirs[n]) for n in ours)
    # and again, over weights that training has changed
    ranks.train(helpers.random_batch(BATCH))
    assert any(not torch.equal(t, original[n]) for n, t in ranks.weights().items())
    ranks.group.call("do", "load", str(folder))
    assert all(torch.equal(t, original[n]) for n, t in ranks.weights().items())


@pytest.mark.parametrize("bridge", BRIDGES)
def test_buckets_are_bounded_and_nothing_is_shared_through_globals(pair, models, bridge):
    build(pair, bridge, "megatron:p2", models("qwen3"))
    limit = 3 * 64 * 96 * 4
    buckets, others = pair.group.call("bucket_sizes", limit)
    assert others == [] and len(buckets) > 3
    assert all(size <= limit or len(names) == 1 for size, names in buckets)
    assert ask(pair, bridge_views.globals_of_megatron) == [[], []]


@slow
def test_two_layouts_in_one_process(models, helpers):
    folders = {"actor": models("qwen3-moe"), "reference": models("llama-tied")}
    layouts = {"actor": "megatron:(attn:d1t2|ffn:e2)", "reference": "megatron:p2"}
    with WorkerGroup.start("two", "megatron_hosts:TwoEngines", {}, 2) as group:
        for name, text in layouts.items():
            section = helpers.engine_config(text, folders[name], megatron={"bridge_type": "megatron-bridge"})
            group.call("build", name, text, section)
        for name in (*layouts, *reversed(layouts)):  # whichever was built, read and written last
            exported = {n: t for bucket in group.stream("weights", name) for n, t in bucket.tensors.items()}
            original = load_file(folders[name] / "model.safetensors")
            assert exported.keys() == original.keys()
            assert all(torch.equal(exported[n], original[n]) for n in original)
            group.call("do", name, "load", str(folders[name]))
        assert group.call("globals_of_megatron") == [[], []]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["qwen2", "llama3-scaled", "qwen3-moe"])
def test_the_bridges_agree_on_a_gpu(models, helpers, kind, dtype):
    folder, names = models(kind), BRIDGES[1:] if kind == "llama3-scaled" else BRIDGES
    original = load_file(folder / "model.safetensors")
    shards = []
    for bridge in names:
        section = helpers.engine_config("megatron:d1", folder, dtype=dtype, megatron={"bridge_type": bridge})
        with WorkerGroup.start("engine", "megatron_hosts:EngineHost", {}, 1, "cuda") as group:
            group.call("build", "megatron:d1", section, device="cuda")
            exported = {n: t for bucket in group.stream("weights") for n, t in bucket.tensors.items()}
            shards += group.call("ask", bridge_views.parameters)
        assert exported.keys() == original.keys()
        assert all(torch.equal(t, original[n].to(t.dtype)) for n, t in exported.items()), bridge
    assert all(torch.equal(shards[0][n], shards[-1][n]) for n in shards[0])


# Settings: the model says what it was built with

RECOMPUTE = ["recompute_granularity", "recompute_method", "recompute_num_layers", "recompute_modules"]


@pytest.mark.parametrize(
    ("kind", "changes", "expected"),
    [
        ("qwen3", {}, {"recompute_granularity": None, "recompute_method": None, "deterministic_mode": False}),
        (
            "qwen3",
            {"gradient_checkpointing": True, "megatron": {"recompute_method": "block", "recompute_num_layers": 2}},
            dict(zip(RECOMPUTE[:3], ("full", "block", 2), strict=True)),
        ),
        (
            "qwen3",
            {
                "gradient_checkpointing": True,
                "megatron": {"recompute_granularity": "selective", "recompute_modules": ("mlp", "core_attn")},
            },
            {"recompute_granularity": "selective", "recompute_modules": ["mlp", "core_attn"], "recompute_method": None},
        ),
        ("qwen2", {"disable_dropout": False}, {"attention_dropout": 0.0, "hidden_dropout": 0.0}),
        (
            "qwen3-moe",
            {
                "megatron": {
                    "moe_token_dispatcher_type": "allgather",
                    "moe_router_dtype": "fp64",
                    "moe_router_load_balancing_type": "aux_loss",
                    "moe_aux_loss_coeff": 0.25,
                    "moe_z_loss_coeff": 0.5,
                    "moe_router_bias_update_rate": 0.125,
                }
            },
            {
                "moe_token_dispatcher_type": "allgather",
                "moe_router_dtype": "fp64",
                "moe_router_load_balancing_type": "aux_loss",
                "moe_aux_loss_coeff": 0.25,
                "moe_z_loss_coeff": 0.5,
                "moe_router_bias_update_rate": 0.125,
                "moe_router_enable_expert_bias": True,
            },
        ),
        (
            "qwen3-moe",
            {},
            {"moe_router_load_balancing_type": "none", "moe_aux_loss_coeff": 0.0, "moe_grouped_gemm": False},
        ),
    ],
    ids=["nothing", "full", "selective", "dropout", "moe", "moe-nothing"],
)
def test_settings_reach_the_model(solo, models, kind, changes, expected):
    found = {}
    for bridge in BRIDGES:
        build(solo, bridge, "megatron:d1", models(kind), **{**changes, "megatron": dict(changes.get("megatron", {}))})
        (((chunk,)),) = ask(solo, bridge_views.model_settings)
        assert {name: chunk[name] for name in expected} == expected, bridge
        assert all(of_the_chunk for _, of_the_chunk, _, _ in chunk["layers"]), "no layer has a configuration of its own"
        found[bridge] = chunk
    assert found["mbridge"] == found["megatron-bridge"]


def test_stages_reach_the_model(pair, models):
    for bridge in BRIDGES:
        build(pair, bridge, "megatron:p2v2", models("qwen3-deep"), megatron={"pipeline_layout": (2, 1, 1, 1)})
        ranks = ask(pair, bridge_views.model_settings)
        assert [[[layer[0] for layer in chunk["layers"]] for chunk in rank] for rank in ranks] == [
            [[1, 2], [4]],
            [[3], [5]],
        ]
        assert [[chunk["vp_stage"] for chunk in rank] for rank in ranks] == [[0, 1], [0, 1]]
        assert {chunk["virtual_pipeline_model_parallel_size"] for rank in ranks for chunk in rank} == {2}


def test_fp8_reaches_the_configuration(solo, models):
    """The model itself needs a GPU."""
    build(solo, "mbridge", "megatron:d1", models("qwen3"))
    asked = fp8.settings(
        FP8Config(mode="e4m3", recipe="blockwise", first_last_layers_bf16=True, num_layers_at_start_in_bf16=2)
    )
    found = [ask(solo, bridge_views.bridge_config, b, str(models("qwen3")), asked)[0] for b in BRIDGES]
    assert found[0] == found[1]
    assert {name: found[0][name] for name in asked} == asked and asked["fp8"] == "e4m3"
    assert asked["num_layers_at_start_in_bf16"] == 2 and asked["first_last_layers_bf16"] is True


def test_an_unknown_setting_is_refused(solo, models):
    build(solo, "mbridge", "megatron:d1", models("qwen3"))
    for bridge in BRIDGES:
        (error,) = solo.attempt("ask", bridge_views.bridge_config, bridge, str(models("qwen3")), {"no_such_field": 1})
        assert error is not None and error[0] == "TypeError" and "no_such_field" in error[1]


# Scaled rotary positions


@pytest.mark.parametrize(
    ("kind", "text", "size"),
    [
        ("llama3-scaled", "megatron:d1", 1),
        ("llama-linear", "megatron:d1", 1),
        pytest.param("llama3-scaled", "megatron:p2", 2, marks=slow),
        pytest.param("llama3-scaled", "megatron:t2", 2, marks=slow),
    ],
)
def test_scaled_positions_are_those_of_transformers(request, models, helpers, kind, text, size):
    ranks, folder = request.getfixturevalue(RANKS[size]), models(kind)
    batch = helpers.random_batch([90, 60, 5])
    build(ranks, "megatron-bridge", text, folder)
    expected = helpers.hugging_face_logits(folder, batch)
    assert torch.allclose(ranks.logits(batch), expected, atol=1e-4)
    plain = helpers.hugging_face_logits(folder, batch, rope_parameters={"rope_type": "default", "rope_theta": 1e4})
    assert (expected - plain).abs().max() > 0.01, "the scaling shows"
    for error in ranks.refuses(text, folder, megatron={"bridge_type": "mbridge"}):
        assert error is not None and error[0] == "CheckpointError" and "rotary scaling" in error[1]


def test_megatron_core_still_has_the_numbers_of_llama_3_1_alone(models):
    """When this fails, `megatron_bridge._scale_positions` can hand the numbers on instead."""
    config = AutoConfig.from_pretrained(models("llama3-scaled"))
    expected, factor = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    theirs = RotaryEmbedding(
        config.head_dim, 1.0, rotary_base=1e4, rope_scaling=True, rope_scaling_factor=4.0, use_cpu_initialization=True
    )
    assert factor == 1.0 and expected.shape == theirs.inv_freq.shape
    assert not torch.allclose(theirs.inv_freq.cpu(), expected)
