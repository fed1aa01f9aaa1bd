"""The cost model: each cause by hand on a small example, properties, and the project's own measurements."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_like.alloc import ModelAllocation
from areal_like.preflight.cost import StepJob, least_seconds, step_cost
from areal_like.preflight.hardware import Hardware, HardwareError, parse_memory
from areal_like.preflight.links import groups
from areal_like.spec import ModelSpec

DENSE = ModelSpec.from_config(
    {
        "model_type": "llama",
        "num_hidden_layers": 4,
        "hidden_size": 1024,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "intermediate_size": 4096,
        "vocab_size": 32768,
        "tie_word_embeddings": False,
    }
)
MOE = ModelSpec.from_config(
    {
        "model_type": "qwen3_moe",
        "num_hidden_layers": 4,
        "hidden_size": 1024,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 4096,
        "vocab_size": 32768,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 512,
        "norm_topk_prob": True,
        "tie_word_embeddings": False,
    }
)
# Round numbers: 460 TFLOP/s, 430 GB/s of memory, 80 and 8 GB/s of links are reached.
TOY = Hardware("toy", 1e15, 80 * 2**30, 1e12, 100e9, 10e9, 8)
JOB = StepJob(sequences=4, sequence_length=1024, micro_tokens=2048)  # two micro-batches of 2,048 tokens with d1

# Forward operations of a token that attends to 512 others: 2 x 4 h^2, 4 x h x 512, 6 x h x 4h; and the vocabulary.
LAYER, HEAD = 8 * 2**20 + 2**21 + 24 * 2**20, 2 * 2**10 * 2**15
LAYER_PARAMETERS = 4 * 2**20 + 12 * 2**20 + 2 * 1024
PARAMETERS = 4 * LAYER_PARAMETERS + 2 * 2**25
ACTIVATIONS = 2048 * 1024 * 2  # bytes of a micro-batch's hidden states


def cost(text: str, spec: ModelSpec = DENSE, hardware: Hardware = TOY, job: StepJob = JOB):
    return step_cost(spec, ModelAllocation.parse(text), hardware, job)


def close(value: float):
    return pytest.approx(value, rel=1e-9)


# By hand


def test_compute_of_one_gpu():
    found = cost("megatron:d1")
    assert found.micro_batches == 2
    assert found.compute == close(2 * 2048 * 3 * (4 * LAYER + HEAD) / 460e12)
    assert found.optimizer == close(PARAMETERS * (34 + 4 + 2 * 10) / 430e9)
    assert found.bubble == found.tensor == found.experts == found.context == found.pipeline == found.gradients == 0
    assert found.seconds == close(found.compute + found.optimizer)


def test_recompute_repeats_the_layers_and_not_the_vocabulary():
    found = cost("megatron:d1", job=replace(JOB, recompute=True))
    assert found.compute == close(2 * 2048 * (4 * 4 * LAYER + 3 * HEAD) / 460e12)


def test_forward_passes_repeat_both():
    found = cost("megatron:d1", job=replace(JOB, forward_passes=1))
    assert found.compute == close(2 * 2048 * 4 * (4 * LAYER + HEAD) / 460e12)


def test_tensor_collectives():
    found = cost("megatron:t2")
    # Two blocks a layer, two collectives a block and pass; embedding and vocabulary one a pass.
    count = 4 * 2 * 2 * 2 + 2 + 2
    assert found.tensor == close(2 * count * (20e-6 + ACTIVATIONS / 2 / 80e9))
    assert found.compute == close(cost("megatron:d1").compute / 2)
    again = cost("megatron:t2", job=replace(JOB, recompute=True))
    assert again.tensor == close(2 * (count + 16) * (20e-6 + ACTIVATIONS / 2 / 80e9))


def test_tensor_collectives_over_two_nodes():
    found = cost("megatron:t4", hardware=replace(TOY, gpus_per_node=2))
    # Two members in a node leave it through two ports: 20 GB/s, 16 reached.
    assert found.tensor == close(2 * 36 * (20e-6 + ACTIVATIONS * 3 / 4 / 16e9))


def test_pipeline_and_bubble():
    found = cost("megatron:p2")
    # By compute the split is 3 layers | 1 layer and the vocabulary; the first is slower.
    first, second = 2048 * 3 * 3 * LAYER / 460e12, 2048 * 3 * (LAYER + HEAD) / 460e12
    send = 2 * (20e-6 + ACTIVATIONS / 80e9)
    assert found.compute == close(2 * first)
    assert found.pipeline == close(2 * send)
    assert found.bubble == close(second + send)
    held = 3 * LAYER_PARAMETERS + 2**25  # of the first stage, which has more
    assert found.optimizer == close(held * (34 + 4 + 2 * 10) / 430e9)


def test_interleaved_stages_shorten_the_bubble_and_send_more():
    equal = replace(DENSE, num_layers=8, vocab_size=1)
    job = StepJob(8, 1024, 1024)
    plain, interleaved = cost("megatron:p2", equal, job=job), cost("megatron:p2v2", equal, job=job)
    assert interleaved.pipeline == close(2 * plain.pipeline)
    stage = plain.compute / 8 + interleaved.pipeline / 8
    assert interleaved.bubble == pytest.approx(stage / 2, rel=1e-3)


def test_gradients_of_the_distributed_optimizer():
    found = cost("megatron:d2")
    assert found.micro_batches == 1
    each = 2 * 20e-6 + PARAMETERS * (4 + 2) / 2 / 80e9
    assert found.gradients == close(each)
    assert found.optimizer == close(PARAMETERS * (34 / 2 + 4 + 10) / 430e9)
    across = cost("megatron:d2", hardware=replace(TOY, gpus_per_node=1))
    assert across.gradients == close(2 * 20e-6 + PARAMETERS * 6 / 2 / 8e9)


def test_a_tied_embedding_is_summed_over_two_stages():
    tied = replace(DENSE, tied_embeddings=True)
    found = cost("megatron:p2", tied)
    assert found.gradients == close(20e-6 + 2**25 * 4 / 80e9)


def test_experts_all_to_all():
    found = cost("megatron:d4e4", MOE)
    assert found.micro_batches == 1
    payload = 1024 * 2 * 1024 * 2  # tokens of a rank, two experts each, bf16
    assert found.experts == close(4 * 2 * 2 * (20e-6 + payload * 3 / 4 / 80e9))
    experts = 4 * 3 * 1024 * 512 * 8
    dense = 4 * (4 * 2**20 + 8 * 1024 + 2 * 1024 + 2 * 128) + 2 * 2**25
    assert found.gradients == close(2 * 20e-6 + dense * 6 * 3 / 4 / 80e9), "each expert is on one rank only"
    assert found.optimizer == close((dense * 34 / 4 + experts / 4 * 34 + (dense + experts / 4) * 14) / 430e9)


def test_experts_over_two_nodes():
    found = cost("megatron:d4e4", MOE, replace(TOY, gpus_per_node=2))
    payload = 1024 * 2 * 1024 * 2
    assert found.experts == close(16 * (20e-6 + payload * 2 / 4 / 8e9)), "half of the ranks are on the other node"


def test_experts_on_a_rank_cost_their_launches():
    layer = 8 * 2**20 + 2**21 + 6 * 1024 * 512 * 2 + 2 * 1024 * 8
    one, four = cost("megatron:d4", MOE), cost("megatron:d4e4", MOE)
    products = 1024 * 3 * (4 * layer + HEAD) / 460e12
    assert one.compute == close(products + 4 * 8 * 0.6e-3)
    assert four.compute == close(products + 4 * 2 * 0.6e-3)


def test_cut_experts_gather_the_tokens_of_their_group():
    found = cost("megatron:(attn:d4|ffn:t2e2)", MOE)
    payload = 1024 * 2 * 1024 * 2
    assert found.tensor == close(16 * (20e-6 + payload * 2 / 2 / 80e9))
    assert found.experts == close(16 * (20e-6 + payload / 2 / 80e9))


def test_context_as_far_as_attention_does_not_hide_it():
    found = cost("megatron:c2")
    key_values = 2 * 8 * 128 * 1024 * 2
    attention = 4 * 1024 * 512 * 1024 / 460e12
    assert found.context == close(2 * 4 * 3 * (20e-6 + key_values / 80e9 - attention))
    hidden = cost("megatron:c2", hardware=replace(TOY, flops=1e12)).context
    assert hidden == close(2 * 4 * 3 * 20e-6), "starting the exchange is never hidden"


def test_idle_replicas_count():
    assert cost("megatron:d3").compute == close(cost("megatron:d2").compute), "4 sequences: 2, 1, 1"


def test_shares_add_up():
    found = cost("megatron:d2t2p2")
    assert sum(found.shares.values()) == close(1.0)
    assert sum(found.causes.values()) == close(found.seconds)
    assert found.flops_per_second * found.seconds * 8 == close(3 * (4 * LAYER + HEAD) * 4096)


# Properties

sizes = st.sampled_from([1, 2, 4])
layouts = st.builds(
    lambda d, t, p, c, e: f"megatron:d{d}t{t}p{p}c{c}e{e if (d * t * c) % e == 0 else 1}",
    sizes,
    sizes,
    sizes,
    sizes,
    sizes,
)
jobs = st.builds(
    lambda n, k, r, f: StepJob(n, 1024, 1024 * k, r, f),
    st.integers(1, 64),
    st.integers(1, 4),
    st.booleans(),
    st.integers(0, 2),
)


@settings(deadline=None, max_examples=150)
@given(
    layouts,
    jobs,
    st.sampled_from(["flops", "memory_bandwidth", "node_bandwidth", "network_bandwidth"]),
    st.floats(1.0, 100.0),
    st.sampled_from([1, 2, 4, 8]),
)
def test_better_hardware_is_never_slower(text, job, field, factor, node):
    hardware = replace(TOY, gpus_per_node=node)
    better = replace(hardware, **{field: getattr(hardware, field) * factor})
    for spec in (DENSE, MOE) if "e1" in text else (MOE,):
        before, after = cost(text, spec, hardware, job).seconds, cost(text, spec, better, job).seconds
        assert after <= before * (1 + 1e-12)


@settings(deadline=None, max_examples=100)
@given(layouts, jobs, st.sampled_from([1, 2, 4, 8]))
def test_the_quick_bound_of_the_time_is_a_bound(text, job, node):
    hardware, allocation = replace(TOY, gpus_per_node=node), ModelAllocation.parse(text)
    assert 0 < least_seconds(MOE, allocation, hardware, job) <= cost(text, MOE, hardware, job).seconds * (1 + 1e-12)


@settings(deadline=None, max_examples=100)
@given(layouts, st.integers(1, 30), st.booleans())
def test_the_bubble_s_share_falls_with_micro_batches(text, count, recompute):
    allocation = ModelAllocation.parse(text)
    shares = []
    for micro_batches in (count, count + 1):
        job = StepJob(micro_batches * allocation.dp, 1024, 1024, recompute)
        found = cost(text, MOE, job=job)
        assert found.micro_batches == micro_batches
        shares.append(found.shares["bubble"])
    assert shares[1] < shares[0] if allocation.pp > 1 else shares == [0.0, 0.0]


@settings(deadline=None, max_examples=150)
@given(st.integers(1, 6), st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), st.integers(1, 9), st.data())
def test_links_are_those_of_the_mesh(d, t, p, c, node, data):
    stage = d * t * c
    e = data.draw(st.sampled_from([n for n in range(1, stage + 1) if stage % n == 0]))
    etp = data.draw(st.sampled_from([n for n in range(1, stage // e + 1) if (stage // e) % n == 0]))
    allocation = ModelAllocation(
        backend="megatron",
        data_parallel_size=d,
        tensor_parallel_size=t,
        pipeline_parallel_size=p,
        context_parallel_size=c,
        expert_parallel_size=e,
        expert_tensor_parallel_size=etp,
    )
    mesh = allocation.mesh()
    for name, group in groups(allocation, node).items():
        counts = []
        leaves = False
        for members in mesh.groups(name):
            nodes = [rank // node for rank in members]
            leaves |= len(set(nodes)) > 1
            counts += [nodes.count(n) for n in nodes]
        assert group.size == mesh.size(name)
        assert group.leaves_node == leaves
        assert group.in_node <= min(counts)
        if all(n & (n - 1) == 0 for n in (d, t, p, c, e, etp, node)):
            assert group.in_node == min(counts)


# Measured


QWEN, QWEN_MOE = "Qwen/Qwen2.5-1.5B", "Qwen/Qwen3-30B-A3B"
MEASURED = [
    # what, model, layers, job, TFLOP/s: benchmarks/results/train_step.md and the stack's first measurements
    ("engine, dense", QWEN, 28, StepJob(64, 1024, 16384), 437),
    ("plain loop, dense, the same call", QWEN, 28, StepJob(64, 1024, 16384), 514),
    ("plain loop, dense, full recompute, another version", QWEN, 28, StepJob(64, 1024, 32768, recompute=True), 349),
    ("engine, MoE", QWEN_MOE, 8, StepJob(64, 1024, 16384), 94),
    ("plain loop, MoE, the same call", QWEN_MOE, 8, StepJob(64, 1024, 16384), 99),
]


@pytest.mark.parametrize(
    ("model", "layers", "job", "tflops"), [row[1:] for row in MEASURED], ids=[r[0] for r in MEASURED]
)
def test_within_a_fifth_of_what_was_measured(model, layers, job, tflops):
    spec = replace(ModelSpec.find(model), num_layers=layers)
    found = cost("megatron:d1", spec, Hardware.find("H200"), job)
    assert found.flops_per_second / 1e12 == pytest.approx(tflops, rel=0.2)


# Hardware


def test_published_numbers():
    h100, h200, a100, b200 = (Hardware.find(name) for name in ("h100", "H200", "A100", "b200"))
    assert h100.flops == h200.flops == 989.5e12 and a100.flops == 312e12 and b200.flops == 2250e12
    assert [round(h.memory / 2**30) for h in (a100, h100, h200, b200)] == [80, 80, 140, 179]
    assert h200.memory_bandwidth == 4.8e12 and h200.node_bandwidth == 900e9 / 2


def test_an_unknown_gpu():
    with pytest.raises(HardwareError, match=r"unknown GPU 'H10': did you mean H100\? known are A100, H100, H200, B200"):
        Hardware.find("H10")


def test_numbers_can_be_replaced():
    hardware = Hardware.find("H100").override(memory=1.0, network_bandwidth=None)
    assert hardware.memory == 1.0 and hardware.network_bandwidth == 50e9
    with pytest.raises(HardwareError, match="flops must be positive"):
        hardware.override(flops=0.0)


@pytest.mark.parametrize(
    ("text", "size"), [("80GiB", 80 * 2**30), ("80 gb", 80e9), ("1.5TiB", 1.5 * 2**40), ("64", 64 * 2**30)]
)
def test_sizes_of_memory(text, size):
    assert parse_memory(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-3GiB", "0", "80 apples", "1e3GiB"])
def test_no_size_of_memory(text):
    with pytest.raises(HardwareError, match="is not a size of memory"):
        parse_memory(text)


@pytest.mark.parametrize(
    "numbers", [(0, 1, 1), (1, 0, 1), (1, 1024, 1023), (-1, 8, 8)], ids=["none", "empty", "too long", "negative"]
)
def test_a_job_that_cannot_be(numbers):
    with pytest.raises(ValueError, match=r"at least 1|does not fit"):
        StepJob(*numbers)
