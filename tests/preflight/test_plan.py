"""The planner: complete, legal, fitting, sensible and fast."""

from __future__ import annotations

import itertools
import time
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_like.alloc import AllocationError, ModelAllocation
from areal_like.preflight import check_layout
from areal_like.preflight.cost import StepJob, step_cost
from areal_like.preflight.enumeration import Layout, training_layouts
from areal_like.preflight.hardware import GIB, Hardware
from areal_like.preflight.plan_memory import least_memory, peak_memory
from areal_like.preflight.planner import FILL, NoPlanError, Plan, Request, plan
from areal_like.preflight.rollout_plan import shares
from areal_like.spec import ModelSpec
from areal_like.spec.bundled import bundled_names

SMALL, MIXTURE = ModelSpec.find("Qwen/Qwen2.5-1.5B"), ModelSpec.find("Qwen/Qwen3-30B-A3B")
LARGE = ModelSpec.from_config(  # the shape of Llama-3-70B, without its rotary scaling
    {
        "model_type": "llama",
        "num_hidden_layers": 80,
        "hidden_size": 8192,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "intermediate_size": 28672,
        "vocab_size": 128256,
        "max_position_embeddings": 8192,
    }
)
H100, H200 = Hardware.find("H100"), Hardware.find("H200")
GPUS_80 = H100.override(memory=80 * GIB)


def request(spec=SMALL, gpus=8, hardware=H100, sequences=256, length=4096, **more) -> Request:
    return Request(spec, gpus, hardware, sequences, length, **more)


def assert_sound(p: Plan, asked: Request, gpus: int) -> None:
    assert ModelAllocation.parse(str(p.allocation)) == p.allocation
    assert p.allocation.world_size == gpus
    assert [d for d in check_layout(p.allocation, asked.spec) if d.severity == "error"] == []
    assert p.peak <= FILL * asked.hardware.memory and p.headroom == asked.hardware.memory - p.peak
    assert p.peak == peak_memory(asked.spec, p.allocation, p.job, asked.hardware)
    assert p.cost == step_cost(asked.spec, p.allocation, asked.hardware, p.job)
    assert p.job.micro_tokens >= asked.sequence_length


@settings(deadline=None, max_examples=40)
@given(
    st.sampled_from([SMALL, MIXTURE, LARGE]),
    st.integers(1, 96),
    st.sampled_from([H100, H200, Hardware.find("B200")]),
    st.integers(1, 300),
    st.sampled_from([700, 4096, 32768]),
)
def test_every_plan_is_sound(spec, gpus, hardware, sequences, length):
    asked = request(spec, gpus, hardware, sequences, length)
    try:
        plans = plan(asked)
    except NoPlanError as error:
        assert str(error)
        return
    for p in plans:
        assert_sound(p, asked, gpus)
    assert [p.seconds for p in plans] == sorted(p.seconds for p in plans)
    assert len({str(p.allocation) for p in plans}) == len(plans) <= 10


def all_layouts(gpus: int):
    """Every allocation of so many ranks that the language has, whatever the model, with the sizes of v tried."""
    sizes = [n for n in range(1, gpus + 1) if gpus % n == 0]
    for d, t, p, c in itertools.product(sizes, repeat=4):
        if d * t * p * c == gpus:
            for e, etp, v in itertools.product(sizes, sizes, (1, 2, 4)):
                text = f"megatron:(attn:d{d}t{t}p{p}c{c}v{v}|ffn:t{etp}e{e})"
                try:
                    yield ModelAllocation.parse(text)
                except AllocationError:
                    continue


@pytest.mark.parametrize(("spec", "gpus"), [(SMALL, 8), (MIXTURE, 16), (SMALL, 12)], ids=["dense", "moe", "twelve"])
def test_nothing_better_exists(spec, gpus):
    """Brute force over the language, with the token budgets that the planner tries."""
    asked = request(spec, gpus, H200, sequences=64, length=8192)
    best: dict[str, float] = {}
    for allocation in all_layouts(gpus):
        if check_layout(allocation, spec) or allocation.tp > 8 or allocation.etp > 8:
            continue
        if 4096 * allocation.cp > 8192:  # pieces that AL703 warns about
            continue
        for tokens, recompute in itertools.product((8192, 16384, 32768, 65536), (False, True)):
            job = StepJob(64, 8192, tokens, recompute)
            if peak_memory(spec, allocation, job, H200) <= FILL * H200.memory:
                seconds = step_cost(spec, allocation, H200, job).seconds
                best[str(allocation)] = min(seconds, best.get(str(allocation), seconds))
    expected = sorted(best.values())[:10]
    assert [p.seconds for p in plan(asked)] == pytest.approx(expected, rel=1e-8)


@settings(deadline=None, max_examples=200)
@given(st.data())
def test_the_quick_bound_is_a_bound(data):
    spec = ModelSpec.find(data.draw(st.sampled_from(bundled_names())))
    gpus, length = data.draw(st.sampled_from([1, 4, 8, 24, 64, 128])), data.draw(st.sampled_from([512, 4096, 32768]))
    layouts = list(
        training_layouts(spec, gpus, letters="dtpcev", sequences=256, sequence_length=length, gpus_per_node=8)
    )
    layout = data.draw(st.sampled_from(layouts))
    job = StepJob(256, length, length * data.draw(st.integers(1, 4)), data.draw(st.booleans()))
    least, peak = least_memory(spec, layout, job), peak_memory(spec, layout.allocation("megatron"), job, H100)
    assert least <= peak


# Sense


def test_a_small_dense_model_wants_replicas_only():
    for gpus in (1, 2, 8, 64):
        assert str(plan(request(gpus=gpus))[0].allocation) == f"megatron:d{gpus}"


def test_experts_are_spread_rather_than_cut():
    for gpus in (16, 64):
        best = plan(request(MIXTURE, gpus, GPUS_80, length=32768))[0].allocation
        assert best.ep > 1 and best.etp == 1


def test_experts_stay_in_a_node():
    best = plan(request(MIXTURE, 64, GPUS_80, length=32768))[0].allocation
    assert best.ep * best.etp <= 8


def test_a_large_dense_model_is_cut():
    plans = plan(request(LARGE, 32, GPUS_80))
    assert plans and all(p.allocation.tp * p.allocation.pp > 1 for p in plans)
    assert all(p.allocation.tp * p.allocation.pp > 1 for p in plan(request(LARGE, 8, Hardware.find("B200"))))


def test_a_large_dense_model_on_one_node_is_said_not_to_fit():
    """70.6 billion parameters and Adam are 18 bytes each: 1,183 GiB for 640."""
    with pytest.raises(
        NoPlanError, match=r"nothing fits: megatron:\S+, the leanest, needs \d+\.\d GiB a GPU; 95% of 80.0"
    ):
        plan(request(LARGE, 8, GPUS_80))


def test_more_memory_is_never_slower_and_a_faster_network_neither():
    before = plan(request(MIXTURE, 16, GPUS_80, length=32768))[0].seconds
    assert plan(request(MIXTURE, 16, GPUS_80.override(memory=140 * GIB), length=32768))[0].seconds <= before
    assert plan(request(MIXTURE, 16, GPUS_80.override(network_bandwidth=100e9), length=32768))[0].seconds <= before


def test_a_slow_network_keeps_traffic_in_the_node():
    """With a hundredth of the bandwidth a mixture over two nodes prefers what sends least between them."""
    slow = plan(request(MIXTURE, 16, H200.override(network_bandwidth=0.5e9), length=8192))[0]
    assert slow.allocation.ep <= 8


def test_a_budget_that_is_given_is_kept():
    assert {p.job.micro_tokens for p in plan(request(micro_tokens=5000))} == {5000}


def test_no_layout_at_all():
    with pytest.raises(NoPlanError, match="no layout has 29 ranks"):
        plan(request(gpus=29, sequences=3))
    with pytest.raises(ValueError, match="does not fit into a micro-batch of 100"):
        request(micro_tokens=100)


# Engines


def test_this_version_s_engines_bound_the_plan():
    scaled = replace(SMALL, rope_scaling="yarn")
    with pytest.raises(NoPlanError, match=r"no layout is legal: .*rotary"):
        plan(request(scaled))
    assert str(plan(request(scaled, any_engine=True))[0].allocation) == "megatron:d8"


def test_context_parallelism_where_sequences_are_few_and_long():
    """8 sequences for 64 GPUs: c shares them out, in pieces of 4,096 tokens at the least; short ones are not cut."""
    plans = plan(request(SMALL, 64, sequences=8, length=32768))
    assert plans[0].allocation.cp > 1
    for p in plans:
        assert p.allocation.dp * p.allocation.cp * p.allocation.tp * p.allocation.pp == 64
        assert 32768 // p.allocation.cp >= 4096
    short = plan(request(SMALL, 64, sequences=8, length=2048), top=100)
    assert {p.allocation.cp for p in short} == {1}


def test_virtual_stages_where_a_pipeline_would_wait():
    """A pipeline that is needed for memory, and eight micro-batches of one long sequence each."""
    gpus = GPUS_80.override(memory=64 * GIB)
    asked = request(MIXTURE, 16, gpus, sequences=64, length=32768)
    best = plan(asked)[0]
    assert best.allocation.pp > 1 and best.allocation.vpp > 1
    plain = best.allocation.model_copy(update={"virtual_pipeline_parallel_size": 1})
    assert step_cost(MIXTURE, plain, gpus, best.job).bubble > 1.5 * best.cost.bubble
    assert {p.allocation.vpp for p in plan(request(SMALL, 8), top=50) if p.allocation.pp == 1} == {1}


def test_backends():
    with pytest.raises(AllocationError, match="AL201"):
        plan(request(backend="megatorn"))
    with pytest.raises(AllocationError, match="AL207"):
        plan(request(backend="sglang"))
    with pytest.raises(AllocationError, match="AL207"):
        plan(request(rollout="megatron"))


# Rollout


def test_trainer_and_rollout_share_the_gpus():
    asked = request(MIXTURE, 32, GPUS_80, length=16384, rollout="sglang")
    plans = plan(asked)
    for p in plans:
        assert p.rollout is not None
        assert p.allocation.world_size + p.rollout.allocation.world_size == 32
        assert_sound(p, asked, p.allocation.world_size)
        assert p.seconds == max(p.cost.seconds, p.rollout.cost.seconds)
        assert p.rollout.cost.weights + p.rollout.cost.cache <= 80 * GIB
        assert p.rollout.allocation.backend == "sglang"
        assert check_layout(p.rollout.allocation, MIXTURE) == []
    assert [p.seconds for p in plans] == sorted(p.seconds for p in plans)


def test_a_rollout_that_has_only_replicas():
    found = plan(request(SMALL, 8, rollout="huggingface"))
    assert {p.rollout.allocation.tp for p in found} == {1}
    with pytest.raises(NoPlanError, match="GPUs for huggingface: no layout holds weights and one sequence"):
        plan(request(LARGE, 64, rollout="huggingface"))


def test_shares_are_whole_nodes():
    assert shares(8, 8) == [(n, 8 - n) for n in range(1, 8)]
    assert shares(32, 8) == [(8, 24), (16, 16), (24, 8)]
    assert all(a % 8 == b % 8 == 0 and a + b == 1024 for a, b in shares(1024, 8)) and len(shares(1024, 8)) == 7
    assert shares(1, 8) == []


def test_one_gpu_cannot_be_shared():
    with pytest.raises(NoPlanError, match="1 GPUs cannot be shared"):
        plan(request(gpus=1, rollout="sglang"))


# Time


@pytest.mark.parametrize("more", [{}, {"any_engine": True}, {"rollout": "sglang"}], ids=["this", "any", "rollout"])
def test_a_thousand_gpus_take_two_seconds(more):
    asked = request(MIXTURE, 1024, GPUS_80, sequences=2048, length=32768, **more)
    start = time.process_time()
    assert len(plan(asked)) == 10
    assert time.process_time() - start < 10.0, "2 s of `benchmarks/plan.py`, with room for a slow machine"


def test_layouts_are_what_they_say():
    assert str(Layout(4, 2, 1, 1, 2, 2, 1).allocation("megatron")) == "megatron:(attn:d4t2|ffn:t2e2)"


def test_a_model_that_no_engine_here_trains_is_said_so():
    """Not that it does not fit, which is also true."""
    asked = request(ModelSpec.find("moonshotai/Kimi-K2-Base"), 8, length=8192)
    with pytest.raises(NoPlanError, match=r"^no layout is legal: architecture"):
        plan(asked)
    with pytest.raises(NoPlanError, match=r"^nothing fits"):
        plan(replace(asked, any_engine=True))
