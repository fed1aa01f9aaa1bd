"""The stream of weights: planned or not, on the device or on the host, it is what the bridge exports, bit for bit."""

from __future__ import annotations

import ctypes
import pickle
import sys
from unittest.mock import patch

import numpy as np
import pytest
import torch
import weight_views
from torch import nn

from areal_like.alloc import ModelAllocation
from areal_like.engines.base import PackedTensors, TensorPlace, WeightBucket
from areal_like.engines.megatron import weight_copy, weight_plan
from areal_like.engines.megatron.weight_copy import TILE, KernelCopier, PieceCopier, tiles
from areal_like.engines.megatron.weight_plan import (
    Piece,
    PlanError,
    PlannedBucket,
    Source,
    aligned,
    make_plan,
    why_unplanned,
)
from areal_like.runtime.local import WorkerGroup
from areal_like.runtime.wire import Packet, _unpack

slow = pytest.mark.slow
BRIDGES = ("mbridge", "megatron-bridge")
RANKS = {1: "solo", 2: "pair"}
BATCH = [40, 3, 21, 12]


def ask(ranks, name, *args):
    return ranks.group.call("ask", getattr(weight_views, name), *args)


@pytest.mark.parametrize("bridge", BRIDGES)
@pytest.mark.parametrize("kind", ["llama-tied", "qwen2", "qwen3", "qwen3-moe"])
def test_the_planned_stream_is_what_the_bridge_exports(solo, models, helpers, kind, bridge):
    folder = models(kind)
    # With grouped experts a projection of all experts is one parameter.
    solo.build("megatron:d1", folder, megatron={"bridge_type": bridge, "moe_grouped_gemm": bridge == "mbridge"})
    assert ask(solo, "why_unplanned") == [None]
    assert ask(solo, "differing", str(folder)) == [[]]
    solo.train(helpers.random_batch(BATCH))
    assert ask(solo, "differing") == [[]]
    assert any(n for n in ask(solo, "differing", str(folder))[0])  # training changed them
    solo.group.call("do", "offload")
    solo.group.call("do", "onload")
    assert ask(solo, "differing") == [[]]
    solo.group.call("do", "load", str(folder))
    assert ask(solo, "differing", str(folder)) == [[]]


@pytest.mark.parametrize("bridge", BRIDGES)
def test_parameters_that_moved_or_were_replaced_are_followed(solo, models, bridge):
    folder = models("qwen2")
    solo.build("megatron:d1", folder, megatron={"bridge_type": bridge}, optimizer=None)
    assert ask(solo, "differing", str(folder)) == [[]]
    assert ask(solo, "move_parameters")[0] > 20
    assert ask(solo, "differing", str(folder)) == [[]]


def test_weights_that_leave_the_device_end_the_stream(solo, models):
    solo.build("megatron:d1", models("qwen3"))
    ((kind, message),) = solo.attempt("ask", weight_views.offload_inside)
    assert kind == "OffloadedError" and "onload(parameters=True)" in message


@pytest.mark.parametrize(
    ("kind", "text", "bridge", "reason"),
    [
        ("qwen3", "megatron:d2", "mbridge", None),
        ("qwen3", "megatron:c2", "megatron-bridge", None),
        ("qwen2", "megatron:t2", "mbridge", "the weights are split over ranks (tp2)"),
        ("llama-tied", "megatron:p2", "megatron-bridge", "the weights are split over ranks (pp2)"),
        ("qwen3-moe", "megatron:d2e2", "mbridge", "the weights are split over ranks (ep2)"),
        ("qwen3-moe", "megatron:(attn:d2|ffn:t2)", "megatron-bridge", "the weights are split over ranks (etp2)"),
    ],
)
def test_where_ranks_hold_parts_the_bridge_exports_tensor_by_tensor(pair, models, kind, text, bridge, reason):
    folder = models(kind)
    pair.build(text, folder, megatron={"bridge_type": bridge})
    assert ask(pair, "why_unplanned") == [reason, reason]
    found = ask(pair, "differing", str(folder))
    assert found[0] == [] and all("on_device" not in name for name in found[1])


def test_adapters_are_merged_without_a_plan(solo, models, helpers):
    solo.build("megatron:d1", models("qwen3"), megatron={"bridge_type": "megatron-bridge"}, use_lora=True, lora_rank=4)
    solo.train(helpers.random_batch(BATCH))
    assert ask(solo, "why_unplanned") == ["adapters are merged into the weights"]
    assert ask(solo, "differing") == [[]]


def test_fp8_weights_are_dequantised_without_a_plan(solo, models):
    solo.build("megatron:d1", models("qwen3"))
    assert ask(solo, "with_a_quantised_weight") == [("FP8 weights are dequantised", [])]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_value_model_is_planned_with_its_head(solo, models, helpers, dtype):
    solo.build("megatron:d1", models("qwen2"), is_critic=True, dtype=dtype)
    assert ask(solo, "why_unplanned") == [None]
    assert ask(solo, "differing") == [[]]
    names = {n: t for b in solo.group.stream("weights", on_device=True) for n, t in b.tensors.items()}
    assert tuple(names["score.weight"].shape) == (1, 64) and "lm_head.weight" not in names


# Plans


class Holder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.matrix = nn.Parameter(torch.randn(12, 5, generator=generator))
        self.vector = nn.Parameter(torch.randn(12, generator=generator))
        self.experts = nn.Parameter(torch.randn(3, 4, 5, generator=generator, dtype=torch.float64))


def planned(holder, export):
    def run(value):
        yield from export(holder, value).items()

    return make_plan(run, [holder])


def replay(plan, copier=PieceCopier, limit=10**6):
    found = {}
    for bucket in plan.buckets(limit):
        buffer = torch.full((bucket.nbytes,), 255, dtype=torch.uint8)
        copier(plan.sources)(bucket, buffer)
        found |= {n: t.clone() for n, t in PackedTensors(buffer, bucket.layout).items()}
    return found


def interleaved(h, value):
    """As fused queries, keys and values are: two groups of 3 + 1 + 2 rows."""
    groups, vector = value(h.matrix).view(2, 6, 5), value(h.vector).view(2, 6)
    parts = {"q": slice(0, 3), "k": slice(3, 4), "v": slice(4, 6)}
    tensors = {name: groups[:, part].reshape(-1, 5) for name, part in parts.items()}
    tensors |= {f"{name}.bias": vector[:, part].reshape(-1) for name, part in parts.items()}
    experts = value(h.experts)
    tensors |= {f"{e}.gate": expert[:2] for e, expert in enumerate(experts)}
    return tensors | {f"{e}.up": experts[e][2:] for e in (2, 0, 1)} | {"cut": value(h.matrix)[:11]}


def test_a_plan_holds_the_pieces(monkeypatch):
    monkeypatch.setattr(weight_plan, "COMPARED_AT_ONCE", 16)
    holder = Holder()
    plan = planned(holder, interleaved)
    by_name = {place.name: (place, pieces) for place, pieces in plan.tensors}
    # matrix is the first parameter asked for: rows of 5 float32 numbers, 20 bytes
    assert by_name["q"][1] == (Piece(0, 0, 60, 0), Piece(0, 120, 60, 60))
    assert by_name["k"][1] == (Piece(0, 60, 20, 0), Piece(0, 180, 20, 20))
    assert by_name["v.bias"][1] == (Piece(1, 16, 8, 0), Piece(1, 40, 8, 8))
    assert by_name["2.up"][0] == TensorPlace("2.up", (2, 5), torch.float64, 0)
    assert by_name["2.up"][1] == (Piece(2, 2 * 160 + 80, 80, 0),)
    assert by_name["cut"][1] == (Piece(0, 0, 220, 0),)
    for limit in (1, 300, 10**6):
        buckets = plan.buckets(limit)
        assert len(buckets) == {1: 13, 10**6: 1}.get(limit, len(buckets))
        assert all(b.nbytes % 256 == 0 and (b.nbytes <= aligned(limit) or len(b.layout) == 1) for b in buckets)
        with torch.no_grad():
            holder.matrix.mul_(1.5)
        found, expected = replay(plan, limit=limit), interleaved(holder, lambda p: p.detach())
        assert list(found) == list(expected)
        assert all(torch.equal(found[n], t) and found[n].dtype == t.dtype for n, t in expected.items())


@pytest.mark.parametrize(
    ("export", "reason"),
    [
        (lambda h, value: {"x": value(h.matrix).T}, "x does not consist of whole rows"),
        (lambda h, value: {"x": value(h.matrix)[:, :4]}, "x does not consist of whole rows"),
        (lambda h, value: {"x": value(h.matrix).flip(1)}, "x does not consist of whole rows"),
        (lambda h, value: {"x": value(h.matrix).reshape(5, 12)}, "x does not consist of whole rows"),
        (lambda h, value: {"x": value(h.matrix) + 1}, "x "),
        (lambda h, value: {"x": value(h.vector) + 1}, "x "),
        (lambda h, value: {"x": -value(h.vector)}, "x "),
        (lambda h, value: {"x": value(h.vector) * 1.0}, "x is converted to another type"),
        (lambda h, value: {"x": value(h.vector).double()}, "x is converted to another type"),
        (
            lambda h, value: {
                "x": value(h.vector).to(torch.float16) if value(h.vector).is_floating_point() else value(h.vector)
            },
            "x is exported as torch.float16",
        ),
        (lambda h, value: {"x": value(h.vector).abs()}, "x is not a copy of what the plan found it to be"),
        (lambda h, value: {"x": torch.cat([value(h.matrix), value(h.experts)[0]])}, "x is made of several types"),
        (lambda h, value: {"x": value(h.matrix)[:1].expand(12, 5)}, "x has 240 bytes of which the plan fills 20"),
        (lambda h, value: {"x": torch.sigmoid(value(h.vector))}, "x is converted to another type"),
        (lambda h, value: {"x" if value(h.vector).is_floating_point() else "y": value(h.vector)}, "y is exported"),
    ],
)
def test_what_is_no_copy_of_rows_is_not_planned(export, reason):
    with pytest.raises(PlanError) as refused:
        planned(Holder(), export)
    assert str(refused.value).startswith(reason)


def test_a_bridge_that_cannot_export_numbers_is_not_planned():
    with pytest.raises(PlanError, match="the bridge cannot export whole numbers: "):
        planned(Holder(), lambda h, value: {"x": torch.nn.functional.gelu(value(h.matrix))})


def test_a_tensor_in_too_many_pieces_is_not_planned():
    holder = nn.Linear(2, 4000)
    with pytest.raises(PlanError, match="x comes in 4000 pieces"):
        planned(holder, lambda h, value: {"x": value(h.weight).flip(0)})


def test_a_parameter_of_another_shape_is_an_error():
    holder = Holder()
    plan = planned(holder, interleaved)
    holder.vector.data = torch.zeros(13)
    with pytest.raises(RuntimeError, match=r"Holder.vector was \(12,\) of torch.float32 .* is \(13,\)"):
        replay(plan)


def test_only_whole_models_can_be_planned():
    def reason(text):
        return why_unplanned(ModelAllocation.parse(text).mesh(), [], has_adapters=False)

    assert reason("megatron:d4c2") is None
    assert reason("megatron:d2t2p2") == "the weights are split over ranks (tp2 pp2)"
    assert reason("megatron:d4e4") == "the weights are split over ranks (ep4)"


# Copies


def copy_by_hand(rows, buffer):
    """What the kernel does."""
    for address, offset, size, wide in rows.T.tolist():
        target = buffer.data_ptr() + offset
        assert 0 < size <= TILE and bool(wide) == (address % 16 == target % 16 == size % 16 == 0)
        ctypes.memmove(target, address, size)


def test_the_tables_of_the_kernel_are_made_anew_when_memory_moves():
    holder = Holder()
    plan = planned(holder, interleaved)
    copier = KernelCopier(plan.sources)
    (bucket,) = plan.buckets(10**6)
    made = []
    with (
        patch.object(weight_copy, "copy_tiles", copy_by_hand),
        patch.object(weight_copy, "tiles", lambda *args: made.append(1) or tiles(*args)),
    ):

        def check(buffer):
            copier(bucket, buffer)
            expected = interleaved(holder, lambda p: p.detach())
            assert all(torch.equal(t, expected[n]) for n, t in PackedTensors(buffer, bucket.layout).items())

        buffers = [torch.zeros(bucket.nbytes + 64, dtype=torch.uint8) for _ in range(2)]
        check(buffers[0][: bucket.nbytes])
        check(buffers[1][: bucket.nbytes])
        with torch.no_grad():
            holder.matrix.add_(1)
        check(buffers[0][: bucket.nbytes])
        assert len(made) == 1
        check(buffers[0][8 : bucket.nbytes + 8])
        assert len(made) == 2
        old = holder.matrix.data
        holder.matrix.data = old.clone()
        old.fill_(9)
        check(buffers[0][: bucket.nbytes])
        assert len(made) == 3
        holder.vector = nn.Parameter(torch.randn(12))
        check(buffers[0][: bucket.nbytes])
        assert len(made) == 4
        holder.experts.data = holder.experts.data.float()
        with pytest.raises(RuntimeError, match=r"Holder.experts was"):
            check(buffers[0][: bucket.nbytes])


def odd_bucket(device, offsets=(0, 4096, 70_000, 170_003, 400_000)):
    """Pieces of odd sizes at odd places of two parameters: what the kernel is to get right."""
    generator = torch.Generator().manual_seed(1)
    module = nn.Module()
    module.a = nn.Parameter(torch.randint(0, 256, (300_000,), generator=generator).to(device, torch.float32))
    module.b = nn.Parameter(torch.randn(3, generator=generator).to(device))
    sources = [Source(module, name, p.shape, p.dtype) for name, p in module.named_parameters()]
    shapes = [(1, 0, 12), (0, 4, 60_000), (0, 16, 3 * TILE), (0, 3, 2 * TILE + 77), (0, 500_000, 5 * TILE + 16)]
    pieces = tuple(Piece(s, start, size, offset) for (s, start, size), offset in zip(shapes, offsets, strict=True))
    return sources, PlannedBucket((), aligned(offsets[-1] + shapes[-1][2]), pieces)


def check_copier(device, offsets=None, shift=0):
    sources, bucket = odd_bucket(device, *([offsets] if offsets else []))
    buffer = torch.full((bucket.nbytes + shift,), 255, dtype=torch.uint8, device=device)[shift:]
    KernelCopier(sources)(bucket, buffer)
    untouched = torch.ones(bucket.nbytes, dtype=torch.bool, device=device)
    for piece in bucket.pieces:
        source = sources[piece.source].parameter().detach().view(torch.uint8)
        place = slice(piece.offset, piece.offset + piece.nbytes)
        assert torch.equal(buffer[place], source[piece.start : piece.start + piece.nbytes]), piece
        untouched[place] = False
    assert bool((buffer[untouched] == 255).all())


@pytest.mark.parametrize("shift", [0, 16, 5])
def test_the_kernel_as_triton_interprets_it(monkeypatch, shift):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.delitem(sys.modules, "areal_like.engines.megatron.kernels.copy_tiles", raising=False)
    try:
        check_copier("cpu", shift=shift)
    finally:
        del sys.modules[
            "areal_like.engines.megatron.kernels.copy_tiles"
        ]  # no later test is to have the interpreted one


gpu = pytest.mark.gpu
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@gpu
@needs_cuda
@pytest.mark.parametrize("shift", [0, 16, 5])
def test_the_kernel_on_a_gpu(shift):
    check_copier("cuda", shift=shift)


@gpu
@needs_cuda
def test_the_kernel_beyond_two_gigabytes():
    far = 2**31
    check_copier("cuda", offsets=(0, 4096, far + 256, far + 170_003, far + 400_000))


@gpu
@needs_cuda
@pytest.mark.parametrize(("kind", "bridge"), [("qwen2", "mbridge"), ("qwen3-moe", "megatron-bridge")])
def test_the_stream_on_a_gpu(models, helpers, kind, bridge):
    folder = models(kind)
    section = helpers.engine_config("megatron:d1", folder, dtype="bfloat16", megatron={"bridge_type": bridge})
    with WorkerGroup.start("engine", "megatron_hosts:EngineHost", {}, 1, "cuda") as group:
        group.call("build", "megatron:d1", section, device="cuda")
        assert group.call("ask", weight_views.why_unplanned) == [None]
        assert group.call("ask", weight_views.differing, str(folder)) == [[]]
        group.call("do", "train_batch", helpers.random_batch(BATCH), helpers.SFTLoss())
        group.call("do", "offload")
        group.call("do", "onload")
        assert group.call("ask", weight_views.differing) == [[]]
        assert any(group.call("ask", weight_views.differing, str(folder))[0])


# Buckets


def test_packed_tensors_are_views_and_travel_as_one_buffer():
    layout = [
        TensorPlace("a", (2, 3), torch.float32, 0),
        TensorPlace("b", (5,), torch.bfloat16, 256),
        TensorPlace("c", (), torch.float64, 512),
    ]
    packed = PackedTensors(torch.zeros(768, dtype=torch.uint8), layout)
    packed["a"].copy_(torch.arange(6.0).view(2, 3))
    packed["b"].fill_(2.0)
    packed["c"].fill_(3.0)
    assert packed.buffer[:24].view(torch.float32).tolist() == [0, 1, 2, 3, 4, 5]
    assert list(packed) == ["a", "b", "c"] and len(packed) == 3 and "d" not in packed
    assert [place.nbytes for place in packed.layout] == [24, 10, 8]
    for received in (pickle.loads(pickle.dumps(packed)), _over_the_wire(WeightBucket(packed)).tensors):
        assert received.layout == tuple(layout)
        assert all(torch.equal(received[n], t) and received[n].dtype == t.dtype for n, t in packed.items())
    wire = Packet(WeightBucket(packed))
    assert len(pickle.loads(wire.frame)[0]) == 2  # what is pickled, and one buffer


def _over_the_wire(value):
    packet = Packet(value)
    return _unpack(packet.frame, packet.descriptor)


def test_tiles_of_a_piece_follow_one_another():
    bucket = PlannedBucket((), 2**20, (Piece(0, 32, 2 * TILE + 8, 512), Piece(1, 0, 16, 0)))
    rows = tiles(bucket, {0: 1 << 40, 1: (1 << 33) + 4}, 0)
    start = (1 << 40) + 32
    expected = [
        [start, 512, TILE, 1],
        [start + TILE, 512 + TILE, TILE, 1],
        [start + 2 * TILE, 512 + 2 * TILE, 8, 0],
        [(1 << 33) + 4, 0, 16, 0],
    ]
    assert rows.dtype == np.int64 and rows.T.tolist() == expected
