"""Gradients that products add to the buffer themselves, on one GPU.

`python -m pytest -m gpu tests/engines/megatron/test_gradients_gpu.py`
"""

from __future__ import annotations

import optimizer_views
import pytest
import torch
from torch.nn.functional import log_softmax
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen3MoeConfig

from areal_like.algorithms.sft import SFTLoss
from areal_like.runtime.local import WorkerGroup

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(1200)]

LENGTHS = [90, 5, 17, 2, 31, 44, 8, 77, 60]
SIZES = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.1,
}
EXPERTS = {"head_dim": 64, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Models with biases (whose gradients come out of the same product) and tied embeddings, and with experts."""
    root = tmp_path_factory.mktemp("gradients-gpu")
    configs = {
        "dense": Qwen2Config(**SIZES, tie_word_embeddings=True),
        "moe": Qwen3MoeConfig(**SIZES, **EXPERTS, norm_topk_prob=True, tie_word_embeddings=False),
    }
    for name, config in configs.items():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(root / name)
    return {name: root / name for name in configs}


@pytest.fixture(scope="module")
def gpu():
    with WorkerGroup.start("engine", "megatron_hosts:EngineHost", {}, 1, "cuda") as group:
        yield group


@pytest.fixture
def gradients(gpu, folders, helpers):
    """Of one step by names in the model; the layers that add to the buffer themselves, and the marked weights."""

    def run(model, megatron=None, step=0, **changes):
        # Blockwise FP8 rounds a micro-batch up to 128 tokens.
        changes = {
            "dtype": "bfloat16",
            "optimizer": {"gradient_clipping": 0.0},
            "mb_spec": {"max_tokens_per_mb": 128},
        } | changes
        section = helpers.engine_config("megatron:d1", folders[model], megatron=megatron or {}, **changes)
        gpu.call("build", "megatron:d1", section, device="cuda")
        batch = helpers.random_batch(LENGTHS)
        gpu.call("do", "forward", batch)  # what comes before must not count
        for _ in range(step + 1):
            (figures,) = gpu.call("do", "train_batch", batch, SFTLoss())
        assert figures["micro_batches"] > 2
        (fused,) = gpu.call("ask", optimizer_views.fused_layers)
        return gpu.call("gradients")[0], fused

    return run


def assert_close(ours, theirs, tolerance):
    assert ours.keys() == theirs.keys()
    for name, gradient in ours.items():
        distance, size = (gradient.float() - theirs[name].float()).norm(), theirs[name].float().norm()
        assert distance <= tolerance * size, (name, float(distance / size))


OPTIONS = {
    "plain": {},
    "recomputed": {
        "gradient_checkpointing": True,
        "megatron": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    },
    "overlapped": {"ddp": {"overlap_grad_reduce": True, "overlap_param_gather": True}},
    "in 16 bits": {"ddp": {"grad_reduce_in_fp32": False}},
    "second step": {"step": 1},
    "fp8": {"megatron": {"fp8_config": {"recipe": "tensorwise"}}},
    "fp8 parameters": {"megatron": {"fp8_config": {"recipe": "blockwise", "param": True}}},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_fused_gradients_are_those_of_the_hook(gradients, name):
    """Both add the same products; the hook rounds each to bfloat16 first. In 16 bits every sum is rounded too."""
    options = dict(OPTIONS[name])
    megatron = options.pop("megatron", {})
    apart, none = gradients("dense", megatron | {"gradient_accumulation_fusion": False}, **options)
    fused, layers = gradients("dense", megatron, **options)
    assert none == 0 and layers == 12  # four products a layer
    assert_close(fused, apart, 5e-2 if name in ("in 16 bits", "second step") or "fp8" in name else 1e-2)


@pytest.mark.parametrize("fp8", [None, {"recipe": "blockwise"}])
def test_fused_gradients_of_experts(gradients, fp8):
    apart, _ = gradients("moe", {"fp8_config": fp8, "gradient_accumulation_fusion": False})
    fused, layers = gradients("moe", {"fp8_config": fp8})
    assert layers >= 6
    assert_close(fused, apart, 1e-2 if fp8 is None else 5e-2)


def test_fused_gradients_are_those_of_transformers(gpu, gradients, folders, helpers):
    """In float32; bfloat16 products are off by about 1 %. The tied embedding's gradient is the sum of two ways."""
    _, layers = gradients("dense")
    assert layers == 12
    (ours,) = gpu.call("ask", optimizer_views.named_gradients)
    model = AutoModelForCausalLM.from_pretrained(folders["dense"], dtype=torch.float32)
    batch = helpers.random_batch(LENGTHS)
    masks = batch.split_tokens(batch.fields["loss_mask"])
    total = 0.0
    for ids, mask in zip(batch.split_tokens(batch.input_ids), masks, strict=True):
        log_probs = log_softmax(model(ids[None], use_cache=False).logits[0, :-1], dim=-1)
        total = total - (log_probs.gather(1, ids[1:, None])[:, 0] * mask[1:]).sum()
    (total / sum(float(mask.sum()) for mask in masks)).backward()
    theirs = {name: p.grad for name, p in model.named_parameters() if p.ndim == 2}
    assert_close({n: ours[n] for n in theirs}, theirs, 6e-2)


def test_a_model_that_is_not_trained_has_no_buffer_to_add_to(gpu, folders, helpers):
    section = helpers.engine_config("megatron:d1", folders["dense"], dtype="bfloat16", optimizer=None)
    gpu.call("build", "megatron:d1", section, device="cuda")
    (outputs,) = gpu.call("do", "forward", helpers.random_batch(LENGTHS))
    assert torch.isfinite(outputs.log_probs).all()
    assert gpu.call("ask", optimizer_views.fused_layers) == [0]


def test_adapters_train_beside_frozen_weights(gpu, folders, helpers):
    changes = {"use_lora": True, "lora_rank": 4, "megatron": {"bridge_type": "megatron-bridge"}}
    section = helpers.engine_config("megatron:d1", folders["dense"], dtype="bfloat16", **changes)
    gpu.call("build", "megatron:d1", section, device="cuda")
    batch = helpers.random_batch(LENGTHS)
    (first,), (second,) = (gpu.call("do", "train_batch", batch, SFTLoss()) for _ in range(2))
    assert second["loss"] < first["loss"]
    assert gpu.call("ask", optimizer_views.fused_layers) == [0]
