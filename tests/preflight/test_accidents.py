"""Layout accidents that people reported in public trackers, one case each: the check says it before anything starts.

The numbers are rows of the survey that this project was planned with. A case whose cause cannot arise here says so.
"""

from __future__ import annotations

import re

import pytest

from areal_like.preflight.examples import findings
from areal_like.preflight.pages import examples_of
from areal_like.preflight.registry import Example

MOE = "actor.path=Qwen/Qwen3-30B-A3B"


def found(*changes, cluster="", **model):
    return findings(Example(changes, tuple(model.items()), cluster))


def codes(*changes, cluster="", **model):
    return [d.code for d in found(*changes, cluster=cluster, **model)]


def only(code, *changes, cluster="", **model):
    (d,) = [d for d in found(*changes, cluster=cluster, **model) if d.code == code]
    return d


def test_1_batches_are_counted_against_replicas_not_gpus():
    """verl#1811: the batch had to be a multiple of the GPUs, not of the data-parallel ranks."""
    small = ("train_dataset.batch_size=1", "gconfig.n_samples=4")
    assert "AL510" in codes("actor.backend=megatron:d8", *small)
    assert "AL510" not in codes("actor.backend=megatron:d2t4", *small), "8 GPUs, one replica"


def test_2_ep_larger_than_a_stage():
    """slime#2077: a script for half the nodes kept EP 8 with PP 2: 16 ranks on 8 GPUs."""
    d = only("AL104", MOE, "actor.backend=megatron:d4p2e8")
    assert d.message == "e8 does not divide the 4 ranks of a stage (d4·t1·c1)" and d.alternatives


def test_3_tp4_ep4_etp1_is_legal():
    """Megatron-Bridge#546: a legal layout was refused because a group size was computed wrongly."""
    severe = [d.code for d in found(MOE, "actor.backend=megatron:d1t4e4") if d.severity == "error"]
    assert not {"AL104", "AL306", "AL308"} & set(severe)


def test_4_expert_tensor_pipeline_on_four_ranks():
    """Speech#14838: "why is expert * tensor * pipeline 8 on 4 ranks?" The message names the letters and the product."""
    d = only("AL104", MOE, "actor.backend=megatron:(attn:d1t2p2|ffn:t2e2)")
    assert "t2·e2 = 4" in d.message and "2 ranks of a stage" in d.message


def test_5_the_commonest_errors_have_pages():
    """Megatron-LM#5768, #6434: a page of the eight commonest layout errors was asked for."""
    for code in ("AL104", "AL303", "AL304", "AL305", "AL308", "AL309", "AL401", "AL513"):
        assert examples_of(code) is not None


def test_6_sequence_parallel_needs_multiples_of_t():
    """verl#3296: "first dimension not divisible by TP" inside Megatron. Packed lengths are padded to t here, so the
    only limit is a budget whose last multiple of t is too short."""
    changes = ("train_dataset.max_length=1025", "gconfig.max_new_tokens=1025", "actor.mb_spec.max_tokens_per_mb=2051")
    d = only("AL513", "actor.backend=megatron:t4", *changes)
    assert "2050 tokens" in d.message and d.message.endswith("micro-batch of 2048") and "at least 2052" in d.help
    assert "AL513" not in codes("actor.backend=megatron:d4", *changes)


def test_7_the_rollout_layout_does_not_change_what_the_actor_is_told():
    """verl#4179: numbers of the actor were normalised by the resources of the rollout."""

    def about_actor(rollout):
        return [
            (d.code, d.message) for d in found("actor.backend=megatron:t3", rollout) if (d.key or "")[:5] == "actor"
        ]

    assert about_actor("rollout.backend=huggingface:d5") == about_actor("rollout.backend=sglang:d1t5")


def test_8_a_32b_model_on_8_gpus_of_96_gb():
    """verl#3124: the example was listed as feasible and ran out of memory at the update."""
    changes = ("actor.path=Qwen/Qwen2.5-32B", "actor.backend=megatron:t8", "rollout.backend=huggingface:d8")
    d = only("AL601", *changes, cluster="gpus=8,memory=96GB")
    assert d.severity == "error" and " in its update " in d.message


def test_9_a_layout_that_fits_is_offered():
    """verl#3364: 30B-A3B on 32 GPUs of 141 GB out of memory; sizes were tuned by hand."""
    wasteful = (
        MOE,
        "actor.backend=megatron:d16",
        "rollout.backend=sglang:d2t8",
        "actor.mb_spec.max_tokens_per_mb=32768",
    )
    d = only("AL601", *wasteful, cluster="nodes=4,gpus=8,memory=141GB")
    assert d.alternatives
    for text in d.alternatives:
        again = codes(MOE, f"actor.backend={text}", *wasteful[2:], cluster="nodes=4,gpus=8,memory=141GB")
        assert not {"AL601", "AL303", "AL308", "AL401"} & set(again), text


def test_10_logits_of_a_long_context():
    """verl#5840: a temporary of the logits of 62K tokens, 24 GB, ended the run."""
    changes = (
        "gconfig.max_new_tokens=62000",
        "actor.mb_spec.max_tokens_per_mb=65536",
        "actor.gradient_checkpointing=true",
    )
    d = only("AL601", *changes, cluster="gpus=8,memory=24GiB")  # there is no such temporary: the logits remain
    assert re.search(r"\(logits \d", d.message)


def test_11_colocated_roles_add_up():
    """slime#537: switching from rollout to training ran out of memory when colocated. Both models are counted."""
    alone = (MOE, "actor.backend=megatron:d1t4p2e4", "actor.gradient_checkpointing=true")
    apart = codes(*alone, "rollout.backend=huggingface:d1", cluster="nodes=2,gpus=8,memory=96GiB")
    shared = only("AL601", *alone, "rollout.backend=huggingface:d1", cluster="nodes=1,gpus=8,memory=96GiB")
    assert "AL601" not in apart and "rollout weights" in shared.message


def test_12_host_memory():
    """slime#1845: the host ran out of memory at a checkpoint."""
    assert "AL603" in codes(MOE, cluster="gpus=8,memory=80GiB,host-memory=16GiB")


def test_13_host_memory_of_offloading():
    """slime#113: offloading wasted host memory. The copies are counted, and pinned without rounding up."""
    cluster = "gpus=8,memory=80GiB,host-memory=96GiB"
    model, together = "actor.path=Qwen/Qwen2.5-7B", ("actor.backend=megatron:d2t4", "rollout.backend=huggingface:d8")
    assert "AL603" not in codes(model, *together, cluster=cluster)
    assert "AL603" in codes(model, *together, "enable_offload=true", cluster=cluster)


def test_14_no_room_for_log_probabilities():
    """skypilot#10269: 14B with TP 4: weights and optimizer left no room for log-probabilities in float32."""
    changes = ("actor.path=Qwen/Qwen2.5-14B", "actor.backend=megatron:t4", "actor.mb_spec.max_tokens_per_mb=16384")
    d = only("AL601", *changes, cluster="gpus=8,memory=80GiB")
    assert "optimizer" in d.message


def test_15_a_memory_calculator():
    """Automodel#1592, Megatron-Bridge#1673: asked for. `areal-like explain` is one, and AL601 refers to it."""
    from areal_like.preflight.registry import RULES

    assert "areal-like explain" in RULES["AL601"].why


def split(message):
    """Layers by stage of "30 layers over 4 stages: 8, 8, 8, 6 layers" or "...: 16 x 2, 3 layers"."""
    parts = re.findall(r"(?:(\d+) x )?(\d+)(?=,| layers)", message.split(":")[1])
    return [int(n) * int(times or 1) for times, n in parts]


@pytest.mark.parametrize(
    ("layers", "layout", "gpus"),
    [(30, "p4", 8), (80, "p16v2", 20), (46, "p4", 8), (94, "p8", 12)],
    ids=["16-megatron-1304", "17-megatron-468", "18-ms-swift-5737", "18-megatron-381"],
)
def test_16_17_18_no_layer_is_lost(layers, layout, gpus):
    """30 layers on 4 stages trained 28, 80 on 16 with 2 virtual ones 64, and uneven splits could not be said."""
    changes = (f"actor.backend=megatron:{layout}", f"cluster.n_gpus_per_node={gpus}")
    every = found(*changes, num_hidden_layers=layers)
    (shown,) = [d for d in every if d.code == "AL312"]
    assert sum(split(shown.message)) == layers
    errors = [d.code for d in every if d.severity == "error"]
    assert errors == []


def test_19_fewer_key_value_heads_than_t():
    """torchtitan#2574, Automodel#799: a reshape crashed. Megatron and the servers copy heads."""
    heads = {"num_attention_heads": 16, "num_key_value_heads": 2}
    assert "AL213" in codes("actor.backend=archon:t4", **heads)
    assert not {"AL213", "AL304"} & set(codes("actor.backend=megatron:t4", **heads))
    assert "AL304" in codes("actor.backend=megatron:t4", num_attention_heads=16, num_key_value_heads=6)
    server = codes("rollout.backend=sglang:t4", "actor.backend=megatron:t2", **heads)
    assert not {"AL213", "AL304"} & set(server), "servers copy heads"


def test_20_experts_and_e():
    """torchtitan#4258: refused early."""
    assert "AL308" in codes(MOE, "actor.backend=megatron:d6e6")


def test_21_padding_of_the_vocabulary_is_told():
    """Pai-Megatron-Patch#338: 102400 rows or 102416, depending on TP."""
    assert "AL313" not in codes("actor.backend=megatron:t8", "cluster.n_gpus_per_node=12", vocab_size=102400)
    d = only("AL313", "actor.backend=megatron:t8", "cluster.n_gpus_per_node=12", vocab_size=102401)
    assert d.message == "102401 rows of the vocabulary become 102408 with t8" and d.severity == "info"


@pytest.mark.parametrize("layout", ["vllm:d4", "vllm:d1t8"], ids=["22-verl-4497", "23-verl-4876"])
def test_22_23_weights_for_vllm(layout):
    """Names of fused experts and loaders of single parameters in vLLM: this version has no vLLM engine, and says so."""
    assert "AL205" in codes(f"rollout.backend={layout}")


def test_24_padded_rows_are_not_exported():
    """Megatron-Bridge#625: they leaked into the export. Here they never do (tests of the engine's weights)."""
    d = only("AL313", "actor.backend=megatron:t8", "cluster.n_gpus_per_node=12", vocab_size=102401)
    assert "never loaded or exported" in d.help


def test_25_experts_with_biases():
    """SkyRL#1505: biases of experts were lost on the way to the rollout engine. Such models are refused."""
    assert "AL301" in codes(model_type="gpt_oss", num_local_experts=8, num_experts_per_tok=2, moe_intermediate_size=768)


@pytest.mark.parametrize("row", ["29-megatron-1517", "31-radixark-66"])
def test_29_31_resuming_under_another_layout(row):
    """Optimizer shards could not be read under another layout. Here they can (tests/engines/megatron/test_checkpoints);
    another model is named before anything starts."""
    at = ("cluster.fileroot={examples}", "recover={mode: auto, freq_steps: 50}")
    assert "AL586" in codes(*at)
    assert not {"AL586", "AL587"} & set(codes(*at, "trial_name=data", "actor.backend=megatron:d2t2"))
