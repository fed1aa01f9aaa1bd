"""Predicted memory: against peaks measured on a GPU, against the engine's own constants and code, and by hand."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import json
import re
import shlex
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from areal_like.alloc import ModelAllocation
from areal_like.cli import main
from areal_like.cli.explain import memory
from areal_like.spec import ModelSpec
from areal_like.spec.memory import (
    GIB,
    PARTS,
    LoRA,
    MemoryJob,
    kv_cache,
    layers,
    logits,
    predict,
    recovery,
    schedule,
    transfer,
)
from areal_like.spec.memory.host import PROCESS
from areal_like.spec.memory.megatron_formula import megatron_estimate

ROOT = Path(__file__).parents[2]
ONE = ModelAllocation.parse("megatron:d1")
QWEN = ModelSpec.find("Qwen/Qwen2.5-1.5B")
MOE30 = ModelSpec.find("Qwen/Qwen3-30B-A3B")
MOE8 = ModelSpec.from_config(
    {
        "model_type": "qwen3_moe",
        "num_hidden_layers": 8,
        "hidden_size": 2048,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "vocab_size": 151936,
        "max_position_embeddings": 32768,
    }
)
PEAKS = [(QWEN, 62.5), (MOE8, 113.8)]
"""GiB of an update on one H200, four micro-batches of 16,384 tokens in sequences of 1,024: a plain Megatron-Core loop
whose fused cross-entropy (TransformerEngine's) writes the gradient over the logits too."""


@pytest.mark.parametrize(("spec", "peak"), PEAKS)
def test_measured_peaks(spec: ModelSpec, peak: float) -> None:
    job = MemoryJob(micro_tokens=16384, seq=1024, micro_batches=4, gradient_accumulation_fusion=False)
    plan = predict(spec, ONE, job)
    assert plan.ranks[0].phase("update").allocated / GIB == pytest.approx(peak, rel=0.005)


def test_a_dense_layer_by_hand() -> None:
    """Qwen2.5-1.5B, 16,384 tokens: the tensors that TransformerEngine's layers save."""
    layer = layers.layer_memory(QWEN, ONE, MemoryJob(16384, 1024), experts=False)
    per_token = 4 * 3072 + 2 * 4 + (3072 + 2 * 512) + 3072 + 48 + 3 * 17920
    assert layer.total == 16384 * per_token
    assert layer.boundary == 16384 * 3072 and layer.routing_tables == 0


def test_attention_without_gradients_by_hand() -> None:
    """Where it needs more than the MLP: its input, the fused projection and what leaves it; rotated in place or not."""
    small = dataclasses.replace(QWEN, intermediate_size=8)
    job, projection = MemoryJob(16384, 1024), 3072 + 2 * 512
    assert layers.layer_memory(small, ONE, job, experts=False).forward == 16384 * (3072 + 2 * projection)
    normed, local = dataclasses.replace(small, qk_norm=True), dataclasses.replace(job, transformer_engine=False)
    for other in (
        layers.layer_memory(normed, ONE, job, experts=False),
        layers.layer_memory(small, ONE, local, experts=False),
    ):
        assert other.forward == 16384 * (3072 + 2 * projection + 3072)


def test_fused_gradients_leave_dummies_and_take_no_gradient_beside_the_buffer() -> None:
    """Qwen2.5-1.5B: one dummy for each shape of qkv, proj, fc1, fc2; the down projection's gradient is gone."""
    apart, fused = (MemoryJob(1024, 1024, gradient_accumulation_fusion=fuse) for fuse in (False, True))
    dummies = 2 * (2048 * 1536 + 1536 * 1536 + 17920 * 1536 + 1536 * 8960)
    one, other = (
        predict(QWEN, ONE, job).ranks[0].phase("weight transfer").parts["workspaces"] for job in (apart, fused)
    )
    assert other - one == dummies
    one, other = (layers.layer_memory(QWEN, ONE, job, experts=False).backward for job in (apart, fused))
    assert one == 1024 * (3072 + 17920) + 2 * 1536 * 8960 and other == 1024 * (3072 + 2 * 17920)
    for changes in ({"optimizer": None}, {"lora": LoRA(8)}, {"transformer_engine": False}):
        assert not dataclasses.replace(fused, **changes).fuses_gradients


def test_an_expert_layer_by_hand() -> None:
    layer = layers.layer_memory(MOE8, ONE, MemoryJob(16384, 1024), experts=True)
    attention = 2 * 4096 + 4 + (8192 + 1024 + 4 * 36) + (8192 + 2 * 1024) + 8192 + 128
    experts = 2 * 4096 + 4 + 8 * 4096 + 8 * 3 * 1536
    routing = 4 * 257 + 12 * 8 + 4 * 8
    assert layer.total == 16384 * (attention + experts + routing) and layer.routing_tables == 0


def test_experts_that_are_spread_keep_their_tables_and_sort_twice() -> None:
    """Without imbalance a rank of e4 has as many rows; the tables stay with the dispatcher."""
    alone = layers.layer_memory(MOE8, ONE, MemoryJob(16384, 1024), experts=True)
    job = MemoryJob(16384, 1024, imbalance=1.0)
    spread = layers.layer_memory(MOE8, ModelAllocation.parse("megatron:d4e4"), job, experts=True)
    assert spread.saved["routing"] == 16384 * (128 * 5 + 4 * 257 + 12 * 8 + 12 * 8)
    assert spread.routing_tables == 16384 * (128 * 5 + 4 * 257)
    assert spread.total - alone.total == spread.saved["routing"] - alone.saved["routing"]


def test_the_backward_pass_of_experts_by_hand() -> None:
    """Beside what is saved, 16,384 tokens of 8 experts: rows 2 x 2048, width 2 x 768, gradients of 128 matrices."""
    row, rows, wide, down = 16384 * 4096, 8 * 16384 * 4096, 8 * 16384 * 1536, 128 * 768 * 2048 * 2

    def backward(**changes: Any) -> int:
        return layers.layer_memory(MOE8, ONE, MemoryJob(16384, 1024, **changes), experts=True).backward

    assert backward() == row + rows + down  # a gradient of the output, and of the down projection's weights
    parts = {"recompute": "selective", "recompute_modules": ("moe_act",)}
    assert backward(**parts) == row + rows + 3 * wide  # ... and the product, its gradient, and that of gate and up
    assert backward(hopper=False, gradient_accumulation_fusion=False) == row + rows + wide + down
    assert backward(hopper=False) == row + rows + 2 * wide  # TransformerEngine adds the weights' gradients itself


def test_tensor_and_expert_ranks_divide_activations() -> None:
    whole = layers.layer_memory(MOE8, ONE, MemoryJob(16384, 1024), experts=True)
    split = ModelAllocation.parse("megatron:(attn:d1t4|ffn:t4)")
    job = MemoryJob(16384, 1024)
    assert (
        layers.layer_memory(MOE8, split, job, experts=True).saved["rows of experts"] == whole.saved["rows of experts"]
    )  # gathered over the expert tensor ranks
    dense = layers.layer_memory(QWEN, ModelAllocation.parse("megatron:t2"), job, experts=False)
    assert dense.total * 2 == layers.layer_memory(QWEN, ONE, job, experts=False).total
    spread = layers.layer_memory(MOE8, ModelAllocation.parse("megatron:d8e8"), job, experts=True)
    assert spread.saved["rows of experts"] == whole.saved["rows of experts"] * layers.IMBALANCE


@pytest.mark.parametrize(
    ("text", "micro_batches", "expected"),
    [
        ("megatron:p4", 8, [[(0, (4,))], [(0, (3,))], [(0, (2,))], [(0, (1,))]]),
        ("megatron:p4", 2, [[(0, (2,))], [(0, (2,))], [(0, (2,))], [(0, (1,))]]),
        ("megatron:d1", 8, [[(0, (1,))]]),
        # Two micro-batches: rank 0 runs F0 F0 F1 F1 B1 B1 B0 B0; rank 1 F0 F0 F1 B1 F1 B1 B0 B0.
        # More: rank 0 goes on with F0 B1 F0 B1 F1 B0 F1 B0 before the passes above end.
        ("megatron:p2v2", 2, [[(0, (2, 0)), (1, (2, 2))], [(0, (2, 0)), (1, (2, 1))]]),
        ("megatron:p2v2", 8, [[(c, w) for c in (0, 1) for w in ((4, 1), (3, 2))], [(0, (3, 0)), (1, (2, 1))]]),
    ],
)
def test_passes_that_wait(text: str, micro_batches: int, expected: list) -> None:
    allocation = ModelAllocation.parse(text)
    for stage, known in enumerate(expected):
        found = schedule.moments(allocation.pp, allocation.vpp, stage, micro_batches)
        assert {tuple(moment) for moment in found} == set(known), (stage, found)


def test_many_stages_are_bounded_from_above(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the sizes of the chunks, the bound is not below what is followed pass by pass."""
    exact = [schedule.moments(4, 3, stage, 12) for stage in range(4)]
    monkeypatch.setattr(schedule, "EXACT", 8)
    for stage, known in enumerate(exact):
        for sizes in ((1, 1, 1), (5, 2, 1), (1, 3, 9)):
            at_once = [
                max(sum(n * size for n, size in zip(m.waiting, sizes, strict=True)) for m in moments)
                for moments in (known, schedule.moments(4, 3, stage, 12))
            ]
            assert at_once[0] <= at_once[1]


def test_recompute() -> None:
    peaks = {}
    for kind in ("none", "selective", "full"):
        plan = predict(QWEN, ONE, MemoryJob(16384, 1024, recompute=kind))
        peaks[kind] = plan.ranks[0].phase("update").parts["activations"]
    assert peaks["none"] - peaks["selective"] == 28 * 16384 * 4 * 12  # the log-sum-exp of twelve heads
    assert peaks["full"] == (28 + 2) * 16384 * 3072  # one input a layer, and the final norm
    pairs = predict(QWEN, ONE, MemoryJob(16384, 1024, recompute="full", recompute_layers=2))
    assert pairs.ranks[0].phase("update").parts["activations"] == (14 + 2) * 16384 * 3072


def update(spec: ModelSpec, text: str = "megatron:d1", **options: Any) -> dict[str, int]:
    job = MemoryJob(**({"micro_tokens": 16384, "seq": 1024, "recompute": "none"} | options))
    return predict(spec, ModelAllocation.parse(text), job).ranks[0].phase("update").parts


def test_selective_recompute_by_hand() -> None:
    """What each part leaves out of a layer, in bytes a token."""
    for spec, experts, parts, left_out in (
        (QWEN, False, ("core_attn",), 4 * 12),
        (QWEN, False, ("mlp",), 3 * 17920 + 3072 + 4),  # gate, up, product, and the norm before them
        (QWEN, False, ("core_attn", "mlp"), 4 * 12 + 3 * 17920 + 3072 + 4),
        (QWEN, False, ("layernorm", "moe", "moe_act"), 2 * (3072 + 4)),  # its two norms; no experts
        (QWEN, False, ("layernorm", "mlp"), 3 * 17920 + 2 * (3072 + 4)),
        (MOE8, True, ("moe_act",), 8 * 768 * 2),
        (MOE8, True, ("layernorm",), 2 * (4096 + 4)),
        (MOE8, True, ("moe",), 8 * 4096 + 8 * 3 * 1536 + 4 * 257 + 12 * 8 + 4 * 8),
        (MOE8, True, ("moe", "moe_act"), 8 * 4096 + 8 * 3 * 1536 + 4 * 257 + 12 * 8 + 4 * 8),
        (MOE8, True, ("mlp",), 0),
    ):
        job = MemoryJob(16384, 1024, recompute="selective", recompute_modules=parts)
        layer = layers.layer_memory(spec, ONE, job, experts=experts)
        assert layer.recomputed == 16384 * left_out, parts
        assert layer.kept + layer.recomputed == layer.total


def test_flex_attention_keeps_padded_rows() -> None:
    """Queries, keys, values, output and log-sum-exp of twelve heads and two key-value heads of 128, by hand."""
    for tokens, padded in ((16384, 16384), (13107, 16384), (8193, 12288)):
        fused, flex = (
            layers.layer_memory(QWEN, ONE, MemoryJob(tokens, 1024, attention_backend=a), experts=False)
            for a in ("fused", "flex")
        )
        assert flex.total - fused.total == (padded - tokens) * ((12 + 2 + 2 + 12) * 128 * 2 + 4 * 12)
        assert flex.forward >= fused.forward
        deterministic = MemoryJob(tokens, 1024, deterministic=True)
        assert layers.layer_memory(QWEN, ONE, deterministic, experts=False) == flex
        without = MemoryJob(tokens, 1024, attention_backend="flex", transformer_engine=False)
        assert layers.layer_memory(QWEN, ONE, without, experts=False).saved == fused.saved


def test_block_recompute_keeps_the_layers_behind_it_whole() -> None:
    layer = layers.layer_memory(QWEN, ONE, MemoryJob(16384, 1024), experts=False)
    none = update(QWEN)["activations"]
    block = update(QWEN, recompute="full", recompute_method="block", recompute_layers=10)["activations"]
    assert none - block == 10 * (layer.total - layer.boundary)


def test_context_parallelism_shares_out_tokens_and_logits() -> None:
    one, two = update(QWEN, micro_tokens=32768), update(QWEN, "megatron:d1c2", micro_tokens=32768)
    assert one["activations"] == 2 * two["activations"] and one["logits"] == 2 * two["logits"]
    assert one["weights"] == two["weights"] and one["optimizer"] == 2 * two["optimizer"]
    long = [
        predict(QWEN, ModelAllocation.parse(text), MemoryJob(32768, 32768)) for text in ("megatron:d1c2", "megatron:d1")
    ]
    assert long[0].peak < long[1].peak


def test_virtual_stages_keep_more_passes() -> None:
    """p2v2 of 28 layers, split 9, 9, 9, 1: rank 0 has four passes of chunk 0 and one of chunk 1 in flight."""
    layer = layers.layer_memory(QWEN, ONE, MemoryJob(8192, 1024), experts=False)
    virtual = predict(QWEN, ModelAllocation.parse("megatron:p2v2"), MemoryJob(8192, 1024, pipeline_layout=(9, 9, 9, 1)))
    assert virtual.split == [18, 10]
    kept = 5 * 9 * layer.total + 5 * layer.boundary  # and the output of each
    assert virtual.ranks[0].phase("update").parts["activations"] == kept + layer.backward
    last = virtual.ranks[1].phase("update").parts
    # Three passes of chunk 0 are more than two, one of the end of the model, and its logits.
    assert last["activations"] == 3 * (9 * layer.total + layer.boundary) + layer.backward and "logits" not in last


def test_adapters() -> None:
    """Rank 16 on all four matrices of Qwen2.5-1.5B: r (inputs + outputs) each; nothing else is trained."""
    each = 16 * ((1536 + 2048) + (1536 + 1536) + (1536 + 2 * 8960) + (8960 + 1536))
    parts = update(QWEN, lora=LoRA(16))
    assert parts["weights"] == 2 * QWEN.parameters() + 2 * 28 * each
    assert parts["gradients"] == 4 * 28 * each and parts["optimizer"] == 12 * 28 * each
    assert update(QWEN, lora=LoRA(16, dtype="float32"))["optimizer"] == 8 * 28 * each
    attention = update(QWEN, lora=LoRA(16, ("linear_qkv",)))
    assert attention["gradients"] == 4 * 28 * 16 * (1536 + 2048)
    plan = predict(QWEN, ModelAllocation.parse("megatron:t2"), MemoryJob(4096, 1024, lora=LoRA(16)))
    assert plan.ranks[0].phase("weight transfer").parts["export"] == 2 * 16 * (1536 + 2 * 8960) * 2


def test_float16_is_as_large_as_bfloat16() -> None:
    assert update(QWEN, dtype="float16") == update(QWEN)


@pytest.mark.parametrize(
    ("spec", "recipe", "bfloat16", "fp8"), [(QWEN, "tensorwise", 62.5, 59.9), (MOE8, "blockwise", 113.8, 120.7)]
)
def test_what_fp8_changes(spec: ModelSpec, recipe: str, bfloat16: float, fp8: float) -> None:
    """GiB more than in bfloat16, within 1 % of the peak: a plain loop on one H200 with the micro-batches of `PEAKS`.

    Products keep their inputs in one byte, weights have two copies of one byte: dense models win, experts lose.
    """
    with_fp8, without = (sum(update(spec, fp8=name).values()) for name in (recipe, None))
    assert (with_fp8 - without) / GIB == pytest.approx(fp8 - bfloat16, abs=0.01 * bfloat16)
    assert (with_fp8 < without) == (fp8 < bfloat16)


def test_weights_in_fp8() -> None:
    """Two bytes, once by rows and once by columns, for those of layers; embedding and projection stay as they are."""
    layers_ = QWEN.parameters() - 151936 * 1536
    parts = update(QWEN, fp8="blockwise", fp8_param=True)
    assert "FP8 copies" not in {part for part, size in parts.items() if size}
    assert parts["weights"] == 2 * 151936 * 1536 + 2 * layers_
    assert update(QWEN, fp8="blockwise")["FP8 copies"] == 2 * layers_


@pytest.mark.parametrize(
    ("text", "dtype", "options", "each"),
    [
        ("megatron:d1", "bfloat16", {}, (2, 4, 12)),
        ("megatron:d4", "bfloat16", {}, (2, 4, 3)),
        ("megatron:d4", "bfloat16", {"distributed_optimizer": False}, (2, 4, 12)),
        ("megatron:d2c2", "float32", {}, (4, 4, 2)),
        ("megatron:d4", "bfloat16", {"optimizer": "sgd"}, (2, 4, 4)),
        ("megatron:d4", "bfloat16", {"optimizer": None}, (2, 0, 0)),
        ("megatron:d4", "bfloat16", {"grad_reduce_in_fp32": False}, (2, 2, 3)),
    ],
)
def test_states(text: str, dtype: str, options: dict, each: tuple[int, int, int]) -> None:
    """Bytes a parameter of weights, gradients and optimizer."""
    plan = predict(QWEN, ModelAllocation.parse(text), MemoryJob(1024, 1024, dtype=dtype, **options))
    parts = plan.ranks[0].phase("log-probs").parts
    n = QWEN.parameters()
    assert (parts["weights"], parts["gradients"], parts["optimizer"]) == tuple(n * size for size in each)


def test_the_last_stage_has_the_logits() -> None:
    plan = predict(QWEN, ModelAllocation.parse("megatron:p2"), MemoryJob(8192, 1024))
    first, last = (rank.phase("update").parts for rank in plan.ranks)
    assert "logits" not in first and last["logits"] == 8192 * (151936 * 2 + 16)
    assert last["head gradients"] == 2 * 1536 * 8192  # that of the weight goes into the buffer
    apart = predict(
        QWEN, ModelAllocation.parse("megatron:p2"), MemoryJob(8192, 1024, gradient_accumulation_fusion=False)
    )
    assert apart.ranks[1].phase("update").parts["head gradients"] == 2 * 1536 * (8192 + 151936)
    assert sum(plan.split) == 28 and plan.split[0] > plan.split[1]


def test_without_gradient_there_is_a_chunk_of_logits() -> None:
    """A model that no layer of is larger than 512 MiB; and one whose whole micro-batch is smaller than a chunk."""
    for tokens, rows in ((32768, 1664), (1000, 1000)):
        job = MemoryJob(tokens, 1024, micro_batches=1, optimizer=None)
        parts = predict(QWEN, ONE, job).ranks[0].phase("log-probs").parts
        layer = layers.layer_memory(QWEN, ONE, job, experts=False)
        made = rows * 151936 * 2 + 16 * tokens
        if layer.boundary + made >= layer.forward:
            assert parts["logits"] == made and parts["activations"] == layer.boundary
        else:
            assert "logits" not in parts and parts["activations"] == layer.forward
        assert parts.get("logits", 0) < 2**30
    one, several = (
        predict(QWEN, ONE, MemoryJob(1000, 1000, micro_batches=n)).ranks[0].phase("log-probs").parts["activations"]
        for n in (1, 2)
    )
    assert several - one == 1000 * 1536 * 2, "the output of the pass before"


def test_the_gradient_of_a_tied_weight_waits() -> None:
    """With recomputation of large groups of layers the backward pass of a layer is the fullest moment."""
    options = {"recompute": "full", "recompute_layers": 28, "gradient_accumulation_fusion": False}
    for tied, changes, size in (
        (True, {}, 32000 * 1536 * 2),
        (False, {}, 0),
        (True, {"lora": LoRA(16)}, 0),
        (True, {"gradient_accumulation_fusion": True}, 0),
    ):
        spec = dataclasses.replace(QWEN, vocab_size=32000, tied_embeddings=tied)
        plan = predict(spec, ONE, MemoryJob(8192, 1024, **(options | changes)))
        assert plan.ranks[0].phase("update").parts["head gradients"] == size


def test_an_empty_gradient_larger_than_the_logits() -> None:
    """Few tokens: what autograd gets in place of a gradient that is in the buffer is larger than the logits were."""
    for tied in (True, False):
        spec = dataclasses.replace(QWEN, tied_embeddings=tied)
        found = logits.gradients(spec, ONE, MemoryJob(512, 512))
        assert found == 2 * 1536 * 512 + (0 if tied else 2 * 151936 * (1536 - 512))


def test_gathered_hidden_states() -> None:
    """t2: the same layers' inputs, half the logits, and every token's hidden states beside the head."""
    one, two = (
        predict(QWEN, ModelAllocation.parse(text), MemoryJob(8192, 1024, recompute="full"))
        .ranks[0]
        .phase("update")
        .parts
        for text in ("megatron:d1", "megatron:t2")
    )
    assert two["activations"] - one["activations"] // 2 == 8192 * 1536 * 2
    assert two["logits"] == 8192 * (151936 + 16) and one["logits"] == 8192 * (2 * 151936 + 16)


def constant(path: str, name: str) -> int:
    """A module's constant without importing it (and torch's distributed parts with it)."""
    for node in ast.parse((ROOT / "areal_like" / path).read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            return eval(ast.unparse(node.value))
    raise KeyError(name)


def test_constants_are_the_engines() -> None:
    assert constant("engines/megatron/output_head.py", "CHUNK_BYTES") == logits.CHUNK_BYTES
    assert constant("engines/megatron/output_head.py", "TILE") == logits.TILE
    assert constant("engines/megatron/weights.py", "BUCKET_BYTES") == transfer.BUCKET
    assert constant("engines/megatron/weights.py", "SHARD_BYTES") == transfer.SHARD


class Live(TorchDispatchMode):
    """Bytes of the storages made while it is on that are alive, and their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[int, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self.sizes and storage.nbytes():
                    known = any(
                        isinstance(x, torch.Tensor) and x.untyped_storage()._cdata == storage._cdata
                        for x in torch.utils._pytree.tree_leaves((args, kwargs))
                    )
                    if not known:
                        self.sizes[storage._cdata] = storage.nbytes()
                        weakref.finalize(storage, self.sizes.pop, storage._cdata, None)
        self.peak = max(self.peak, sum(self.sizes.values()))
        return out


class _Alone:
    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 1


@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("tokens", [8192, 2048])
def test_what_the_head_allocates(monkeypatch: pytest.MonkeyPatch, with_entropy: bool, tokens: int) -> None:
    """Every storage that the engine's head makes, at its fullest moment, but the float32 chunks of the CPU's passes,
    whose place on GPUs kernels take: those are made small here."""
    from areal_like.engines.megatron import log_probs, output_head

    monkeypatch.setattr(log_probs, "CHUNK_BYTES", 4 * 4 * 512)
    for module in (output_head, logits):
        monkeypatch.setattr(module, "CHUNK_BYTES", 4096 * 1024)
    columns, width = 512, 64
    spec = ModelSpec.from_config(
        {
            "model_type": "llama",
            "num_hidden_layers": 1,
            "hidden_size": width,
            "num_attention_heads": 4,
            "intermediate_size": 64,
            "vocab_size": columns,
            "max_position_embeddings": 64,
        }
    )
    job = MemoryJob(tokens, 1024, gradient_accumulation_fusion=False)
    hidden = torch.randn(tokens, width, dtype=torch.bfloat16)
    weight = torch.randn(columns, width, dtype=torch.bfloat16)
    labels = torch.randint(0, columns, (tokens,))

    def run() -> tuple[Any, Any]:
        return output_head.token_log_probs(
            hidden,
            weight,
            labels,
            group=_Alone(),
            vocab_size=columns,
            with_entropy=with_entropy,
            chunk_bytes=output_head.CHUNK_BYTES,
        )

    with torch.no_grad(), Live() as live:
        run()
    statistics = logits.statistics(ONE, job)
    few = 2 * statistics  # beside the statistics the results, and what they are made of
    assert 0 <= live.peak - logits.chunk(spec, ONE, job) - statistics < few
    assert logits.chunk(spec, ONE, job) == min(tokens, 4096) * columns * 2
    hidden.requires_grad_(True)
    weight.requires_grad_(True)
    with Live() as live:
        values, entropies = run()
        (values.sum() + (entropies.sum() if with_entropy else 0.0)).backward()
    made = logits.logits(spec, ONE, job) + logits.gradients(spec, ONE, job)
    assert -0.01 * made <= live.peak - made - statistics < few
    assert hidden.grad is not None and weight.grad is not None


@pytest.mark.parametrize(
    ("text", "spec", "size"),
    [
        ("megatron:d8", QWEN, 0),
        ("megatron:t2", QWEN, 2 * 151936 * 1536 * 2),  # the embedding: its shards and the whole
        ("megatron:d8e8", MOE8, 9 * 2 * 768 * 2048 * 2),  # one expert of each rank, and the own one
        ("megatron:(attn:d2t2|ffn:t2e2)", MOE8, 2 * 151936 * 2048 * 2),
    ],
)
def test_export_buffers(text: str, spec: ModelSpec, size: int) -> None:
    assert transfer.export_buffers(spec, ModelAllocation.parse(text), MemoryJob(64, 64)) == size


def test_keys_and_values() -> None:
    job = MemoryJob(4096, 4096, gpu_memory=80 * GIB)
    rollout = ModelAllocation.parse("sglang:d1t8")
    assert kv_cache.sequence_bytes(QWEN, ModelAllocation.parse("huggingface:d1"), job) == 4096 * 2 * 28 * 256 * 2
    assert kv_cache.sequence_bytes(QWEN, rollout, job) == 4096 * 2 * 28 * 128 * 2  # two heads on eight ranks: repeated
    deepseek = ModelSpec.find("deepseek-ai/DeepSeek-V3")
    assert kv_cache.sequence_bytes(deepseek, rollout, job) == 4096 * 61 * (512 + 64) * 2


def test_a_colocated_rollout_shares_the_gpu() -> None:
    rollout = ModelAllocation.parse("huggingface:d1")
    apart = predict(QWEN, ONE, MemoryJob(4096, 4096, rollout=rollout, gpu_memory=80 * GIB))
    shared = predict(QWEN, ONE, MemoryJob(4096, 4096, rollout=rollout, colocated=True, gpu_memory=80 * GIB))
    assert apart.rollout is not None and [p.name for p in apart.rollout.phases] == ["rollout"]
    both = shared.ranks[0].phase("rollout").parts
    assert shared.rollout is None and both["rollout weights"] == both["weights"] == 2 * QWEN.parameters()
    taken = sum(size for part, size in both.items() if part != "KV cache")
    assert both["KV cache"] == (80 * GIB - taken) // 2
    for phase in shared.ranks[0].phases:  # it stays beside everything that the trainer does
        assert phase.parts["rollout weights"] == 2 * QWEN.parameters()
        assert phase.parts["CUDA context"] == 2 * apart.ranks[0].phase("load").parts["CUDA context"]
    assert apart.rollout.phase("rollout").parts["KV cache"] == 256 * 4096 * 28 * 2 * 256 * 2


def test_offloaded_parts_are_there_only_when_they_are_needed() -> None:
    """Parameters for every use, gradients and optimizer for the update; the host has a copy of what it keeps."""
    layout, rollout = ModelAllocation.parse("megatron:d2"), ModelAllocation.parse("huggingface:d2")
    plain = predict(QWEN, layout, MemoryJob(4096, 4096, rollout=rollout, colocated=True))
    parts = ("weights", "gradients", "optimizer")
    whole = {part: plain.ranks[0].phase("update").parts[part] for part in parts}
    assert whole == {"weights": 2 * 1543714304, "gradients": 4 * 1543714304, "optimizer": 12 * 1543714304 // 2}
    job = MemoryJob(4096, 4096, rollout=rollout, colocated=True, offload=frozenset(PARTS))
    plan = predict(QWEN, layout, job)
    held = {p.name: {part for part in parts if p.parts[part]} for p in plan.ranks[0].phases}
    assert held == {
        "load": {"weights", "gradients"},
        "rollout": set(),
        "log-probs": {"weights"},
        "update": set(parts),
        "weight transfer": {"weights"},
        "checkpoint": {"weights"},
        "at rest": set(),
    }
    here, there = plan.ranks[0], plain.ranks[0]
    assert there.phase("log-probs").total - here.phase("log-probs").total == whole["gradients"] + whole["optimizer"]
    assert here.phase("rollout").parts["KV cache"] >= there.phase("rollout").parts["KV cache"]
    copies = 2 * (whole["weights"] + whole["optimizer"])  # two ranks; dropped gradients have no copy
    assert plan.host["checkpoint"] - plain.host["checkpoint"] == copies and plan.host["load"] == plain.host["load"]
    dropped = predict(QWEN, layout, MemoryJob(4096, 4096, offload=frozenset({"gradients"})))
    assert dropped.host["at rest"] == 2 * PROCESS
    assert "at rest" not in plain.host and "GiB of the fullest GPU are free while the model rests" in plan.render()
    with pytest.raises(ValueError, match="offload knows parameters, gradients, optimizer; not weights"):
        MemoryJob(1, 1, offload=frozenset({"weights"}))


def test_host_memory_grows_with_the_phases() -> None:
    plan = predict(MOE30, ModelAllocation.parse("megatron:d2t8"), MemoryJob(4096, 4096))
    assert plan.host["checkpoint"] > 4 * GIB + 8 * 3 * GIB
    assert set(plan.host) == {"load", "weight transfer", "checkpoint"}


def test_megatrons_formula_by_hand() -> None:
    """Llama-2-7B on one rank: 18 bytes a parameter, and the coarse activation term with its 5 %."""
    spec = ModelSpec.from_config(
        {
            "model_type": "llama",
            "num_hidden_layers": 32,
            "hidden_size": 4096,
            "num_attention_heads": 32,
            "intermediate_size": 11008,
            "vocab_size": 32000,
            "max_position_embeddings": 4096,
        }
    )
    tokens, h = 4096, 4096
    parameters = spec.parameters()
    passes = tokens * h * 34 * 32 + 9 * tokens + tokens * (h - 1) + 2 * tokens * (32000 + h)
    assert megatron_estimate(spec, ONE, MemoryJob(tokens, tokens)) == round(18 * parameters + 1.05 * passes)


def test_it_is_quick() -> None:
    import time

    allocation = ModelAllocation.parse("megatron:d2t8p4e8")
    predict(MOE30, allocation, MemoryJob(4096, 4096))
    start = time.process_time()
    for tokens in range(100):
        predict(MOE30, allocation, MemoryJob(4096 + tokens, 4096))
    assert (time.process_time() - start) / 100 < 0.002


@pytest.mark.parametrize(
    "wrong", [{"micro_tokens": 0}, {"seq": 0}, {"micro_batches": 0}, {"colocated": True}, {"rollout_sequences": 0}]
)
def test_a_job_without_sense(wrong: dict) -> None:
    with pytest.raises(ValueError):
        MemoryJob(**({"micro_tokens": 1, "seq": 1} | wrong))


# The command


def test_explain(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["explain", "megatron:d1", "--model", "Qwen/Qwen2.5-1.5B", "--seq", "1024", "--micro-tokens", "16384"]
    assert main([*command, "--gpu-memory", "139GiB"]) == 0
    text = capsys.readouterr().out
    assert "stages: 28 = 28 layers" in text and "1,543,714,304 parameters" in text and "139.00: fits" in text
    assert "Megatron-LM's formula" in text and "host memory" in text
    assert main([*command, "--gpu-memory", "40GiB"]) == 1
    assert "does NOT fit" in capsys.readouterr().out
    assert main([*command, "--gpu-memory", "139GiB", "--offload"]) == 0
    shown = capsys.readouterr().out
    assert "offload of parameters, gradients, optimizer: 25.88 GiB" in shown and "at rest" in shown
    assert main([*command, "--offload", "gradients,nothing"]) == 2
    assert "--offload knows parameters, gradients, optimizer; not nothing" in capsys.readouterr().err


def test_every_part_has_a_place_in_the_table() -> None:
    from areal_like.spec.memory.report import ORDER

    rollout = ModelAllocation.parse("huggingface:d1")
    for spec in (QWEN, MOE8):
        for options in (
            {},
            {"recompute": "full", "grad_reduce_in_fp32": False},
            {"rollout": rollout, "colocated": True},
        ):
            for rank in predict(spec, ModelAllocation.parse("megatron:t2p2"), MemoryJob(64, 64, **options)).ranks:
                assert {part for phase in rank.phases for part in phase.parts} <= set(ORDER)


def test_the_document_shows_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    text = (ROOT / "docs" / "memory.md").read_text()
    command, shown = re.search(r"```sh\nareal-like (.*?)\n```\n\n```text\n(.*?)```", text, re.DOTALL).groups()
    assert main(shlex.split(command)) == 0
    assert capsys.readouterr().out == shown


def test_explain_json(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["explain", "megatron:d2t2p2e2", "--model", "Qwen/Qwen3-30B-A3B", "--seq", "8192", "--json"]
    assert main([*command, "--rollout", "huggingface:d8", "--colocated", "--recompute", "full"]) == 1
    data = json.loads(capsys.readouterr().out)
    assert [rank["stage"] for rank in data["ranks"]] == [0, 1] and sum(data["stages"]) == 48
    for rank in data["ranks"]:
        names = ["load", "rollout", "log-probs", "update", "weight transfer", "checkpoint"]
        assert list(rank["phases"]) == names
        for phase in rank["phases"].values():
            assert phase["total"] == sum(phase["parts"].values()) > phase["allocated"]
    assert data["worst"]["bytes"] == max(p["total"] for r in data["ranks"] for p in r["phases"].values())
    assert data["fits"] is False


def test_explain_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "megatron:t3", "--model", "Qwen/Qwen2.5-1.5B"]) == 1
    assert "key-value heads" in capsys.readouterr().err
    assert main(["explain", "megatron:d1", "--model", "no/such-model"]) == 2
    assert "no/such-model" in capsys.readouterr().err
    assert main(["explain", "megatron:d1q2", "--model", "Qwen/Qwen2.5-1.5B"]) == 2
    assert main(["explain", "megatron:d1", "--model", "Qwen/Qwen2.5-1.5B", "--colocated"]) == 2


@pytest.mark.parametrize(
    ("text", "size"), [("80GiB", 80 * 2**30), ("80GB", 80 * 10**9), ("0.5TiB", 2**39), ("1024", 1024), ("1 gib", 2**30)]
)
def test_amounts_of_memory(text: str, size: int) -> None:
    assert memory(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "80 apples", "0GiB"])
def test_no_amounts_of_memory(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="80GiB"):
        memory(text)


@pytest.mark.parametrize(
    ("text", "job", "expected"),
    [
        # 14 bytes a parameter with Adam: bfloat16, float32 copy, two moments (Qwen2.5-1.5B ties its embeddings)
        ("megatron:d1", {}, 1_543_714_304 * 14),
        ("megatron:d8", {"dtype": "float32"}, 1_543_714_304 * 12),
        ("megatron:t3", {"optimizer": "sgd"}, (1_543_714_304 + 2 * 1536) * 6),  # 151,936 rows become 151,938
        ("megatron:d2", {"optimizer": None}, 0),
    ],
)
def test_size_of_a_recovery_checkpoint(text: str, job: dict[str, Any], expected: int) -> None:
    allocation, given = ModelAllocation.parse(text), MemoryJob(micro_tokens=64, seq=64, recovery=True, **job)
    assert recovery.checkpoint_bytes(QWEN, allocation, given) == expected
    plan = predict(QWEN, allocation, given)
    rest = plan.host["recovery checkpoint"] - min(8, allocation.world_size) * PROCESS
    assert expected <= rest < expected + 8
    assert plan.to_dict()["recovery_checkpoint"] == expected


def test_host_memory_of_a_recovery_checkpoint_is_the_part_of_a_node() -> None:
    job = MemoryJob(micro_tokens=64, seq=64, gpus_per_node=8, recovery=True)
    allocation = ModelAllocation.parse("megatron:d32")
    whole = recovery.checkpoint_bytes(QWEN, allocation, job)
    assert recovery.held_on_first_node(QWEN, allocation, job) == pytest.approx(whole / 4, rel=1e-6)
    alone = dataclasses.replace(job, distributed_optimizer=False)
    assert recovery.held_on_first_node(QWEN, allocation, alone) == whole


def test_the_precision_aware_optimizer_by_hand() -> None:
    """Bytes a parameter: 2 + 4 (gradient) + 12 ordinarily; 16 bits beside the parameter; moments in bfloat16."""
    elements = 1_543_714_304  # Qwen2.5-1.5B
    plain = MemoryJob(2048, 1024)
    aware = dataclasses.replace(plain, precision_aware=True)
    moments = dataclasses.replace(aware, exp_avg="bfloat16", exp_avg_sq="bfloat16")
    half = dataclasses.replace(moments, grad_reduce_in_fp32=False)
    for job, size in ((plain, 18), (aware, 16), (moments, 12), (half, 10)):
        rank = predict(QWEN, ONE, job).ranks[0]
        parts = rank.phase("update").parts
        assert sum(parts[name] for name in ("weights", "gradients", "optimizer")) == size * elements
        assert rank.phase("load").parts["optimizer"] == (4 * elements if job is plain else 0)
        # Copies of both moments while a step works on them, in the place of what the passes needed.
        stay = {
            "weights",
            "FP8 copies",
            "gradients",
            "optimizer",
            "workspaces",
            "CUDA context",
            "communicators",
            "batch",
        }
        stay |= {"gradients in float32", "moments in float32"}
        passes = sum(size for name, size in parts.items() if name not in stay)
        assert parts["moments in float32"] == max(0, (8 if size < 16 else 0) * elements - passes)
        assert parts["gradients in float32"] == 0
    assert predict(QWEN, ONE, half).ranks[0].phase("update").parts["moments in float32"] > 0
    offload = dataclasses.replace(moments, offload=frozenset({"optimizer"}))
    assert predict(QWEN, ONE, offload).host["at rest"] == PROCESS + 6 * elements
    stored = [recovery.checkpoint_bytes(QWEN, ONE, job) for job in (plain, half)]
    assert stored[0] == stored[1] == 14 * elements  # either optimizer reads it
