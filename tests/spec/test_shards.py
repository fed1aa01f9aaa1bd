"""What each rank holds: against the model's own count, against hand-made layouts, and against real Megatron ranks."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from areal_like.alloc import ModelAllocation
from areal_like.spec import ModelSpec, shards
from areal_like.spec.buffers import buffers, optimizer_elements

BENCHMARKS = str(Path(__file__).parents[2] / "benchmarks")

DENSE = {
    "model_type": "qwen2",
    "num_hidden_layers": 5,
    "hidden_size": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 96,
    "vocab_size": 256,
    "max_position_embeddings": 64,
}
MOE = {
    **DENSE,
    "model_type": "qwen3_moe",
    "head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "norm_topk_prob": True,
}
SPECS = {
    "dense": ModelSpec.from_config(DENSE),
    "tied": ModelSpec.from_config({**DENSE, "tie_word_embeddings": True}),
    "moe": ModelSpec.from_config(MOE),
}
LAYOUTS = [
    ("dense", "megatron:d1"),
    ("dense", "megatron:d4t2p2"),
    ("dense", "megatron:t4p5"),
    ("tied", "megatron:d3p3"),
    ("tied", "megatron:d2t2"),
    ("tied", "megatron:p2v2"),
    ("moe", "megatron:d4t2p2e4"),
    ("moe", "megatron:(attn:d2t2p2|ffn:t2e2)"),
    ("moe", "megatron:(attn:d2t4|ffn:t1e8)"),
]


@pytest.mark.parametrize(("kind", "text"), LAYOUTS)
def test_the_shards_of_one_replica_are_the_model(kind: str, text: str) -> None:
    """Every element is on one rank of a replica, but for what is whole on every tensor rank and for a tied output."""
    spec, allocation = SPECS[kind], ModelAllocation.parse(text)
    mesh, held = allocation.mesh(), {}
    for rank in range(mesh.world_size):
        here = mesh.coordinates(rank)
        for parameter in shards.rank_parameters(spec, allocation, rank):
            owner = (here.ep, here.etp) if parameter.kind == "expert" else (here.tp,)
            held[(parameter.name, *owner)] = parameter.elements
    whole = sum(
        elements
        for (name, *owner), elements in held.items()
        if not (("norm" in name or "router" in name) and any(owner)) and not (kind == "tied" and name[:6] == "output")
    )
    assert whole == spec.parameters()


@pytest.mark.parametrize(("kind", "text"), LAYOUTS)
def test_counts_are_the_sums_of_the_parameters(kind: str, text: str) -> None:
    spec, allocation = SPECS[kind], ModelAllocation.parse(text)
    for ranks in shards.rank_classes(spec, allocation):
        for rank in (ranks.first_rank, ranks.first_rank + ranks.ranks - 1):
            parameters = shards.rank_parameters(spec, allocation, rank)
            for name in ("embedding", "dense", "expert", "output"):
                assert getattr(ranks.counts, name) == sum(p.elements for p in parameters if p.kind == name)


def test_layers_of_a_rank() -> None:
    spec, allocation = SPECS["dense"], ModelAllocation.parse("megatron:p2")
    first, last = shards.rank_classes(spec, allocation)
    assert (*first.layers[0], *last.layers[0]) == (0, 1, 2, 3, 4)
    virtual = shards.rank_layers(spec, ModelAllocation.parse("megatron:p2v2"), 1)
    assert len(virtual) == 2 and virtual[1].stop == 5


def test_a_written_split_reaches_everything() -> None:
    spec, allocation, layout = SPECS["dense"], ModelAllocation.parse("megatron:p2"), (1, 4)
    first, last = shards.rank_classes(spec, allocation, layout)
    assert (first.num_layers, last.num_layers) == (1, 4)
    assert last.counts.dense - spec.hidden_size == 4 * first.counts.dense
    held = {p.name for p in shards.rank_parameters(spec, allocation, 1, layout)}
    assert "decoder.layers.1.mlp.linear_fc1.weight" in held
    assert "decoder.layers.0.mlp.linear_fc1.weight" not in held
    whole = [optimizer_elements(spec, allocation, rank, layout=layout) for rank in (0, 1)]
    assert whole == [first.counts.total, last.counts.total]
    with pytest.raises(ValueError, match="it has 6 layers, the model 5"):
        shards.rank_classes(spec, allocation, (2, 4))


def test_a_rank_by_hand() -> None:
    """t2 of the dense model, last of two stages: two heads of keys, half the MLP, 128 words."""
    allocation = ModelAllocation.parse("megatron:t2p2")
    rank = {p.name: p.elements for p in shards.rank_parameters(SPECS["dense"], allocation, 3)}
    layer = "decoder.layers.4."
    assert rank[f"{layer}self_attention.linear_qkv.weight"] == (32 + 2 * 16) * 64
    assert rank[f"{layer}self_attention.linear_qkv.bias"] == 64
    assert rank[f"{layer}self_attention.linear_proj.weight"] == 64 * 32
    assert rank[f"{layer}mlp.linear_fc1.weight"] == 2 * 48 * 64
    assert rank[f"{layer}mlp.linear_fc2.weight"] == 64 * 48
    assert rank["decoder.final_layernorm.weight"] == 64
    assert rank["output_layer.weight"] == 128 * 64
    assert "embedding.word_embeddings.weight" not in rank


def test_the_vocabulary_is_padded() -> None:
    spec = ModelSpec.from_config({**DENSE, "vocab_size": 131})
    assert shards.stage_counts(spec, ModelAllocation.parse("megatron:t4"), 0).embedding == 33 * 64


@pytest.mark.parametrize(("kind", "text"), LAYOUTS)
@pytest.mark.parametrize("bucket", [None, 5000])
def test_optimizer_shards_cover_a_stage_once(kind: str, text: str, bucket: int | None) -> None:
    spec, allocation = SPECS[kind], ModelAllocation.parse(text)
    mesh = allocation.mesh()
    for rank in range(0, mesh.world_size, mesh.world_size // allocation.pp):
        replicas = mesh.group("dp-cp", rank)
        if shards.has_expert_buffer(spec, allocation):  # experts have other partners
            dense, expert = buffers(spec, allocation, rank, bucket_size=bucket)
            assert sum(dense.owned(i) for i in range(len(replicas))) == sum(b - a for a, b in dense.spans)
            assert sum(expert.owned(i) for i in range(allocation.edp)) == sum(b - a for a, b in expert.spans)
            continue
        owned = [optimizer_elements(spec, allocation, r, bucket_size=bucket) for r in replicas]
        assert sum(owned) == shards.stage_counts(spec, allocation, mesh.coordinates(rank).pp).total
        whole = optimizer_elements(spec, allocation, rank, distributed=False)
        assert whole == sum(owned)


def test_buckets_end_where_ranks_divide_them() -> None:
    allocation = ModelAllocation.parse("megatron:d3")
    (buffer,) = buffers(SPECS["dense"], allocation, 0, bucket_size=4000)
    assert len(buffer.buckets) > 3
    for start, end in buffer.buckets:
        assert (end - start) % 3 == 0 and end % 128 == 0
    assert all(start % 64 == 0 for start, _ in buffer.spans)


def test_parameters_begin_at_a_multiple_of_64() -> None:
    """Norms of 16 elements (queries and keys) leave gaps of 48."""
    (buffer,) = buffers(SPECS["moe"], ModelAllocation.parse("megatron:d1"), 0)
    small = [(start, end) for start, end in buffer.spans if end - start == 16]
    assert len(small) == 10 and all(start % 64 == 0 for start, _ in buffer.spans)
    (plain,) = buffers(SPECS["moe"], ModelAllocation.parse("megatron:d1"), 0, distributed=False)
    assert plain.elements == SPECS["moe"].parameters() < buffer.elements


@pytest.mark.parametrize(
    ("text", "apart"),
    [
        ("megatron:d4", False),
        ("megatron:d4e2", True),
        ("megatron:d2t2", True),
        ("megatron:(attn:d2t2|ffn:t2)", False),
        ("megatron:(attn:d2t2|ffn:t2e2)", True),
    ],
)
def test_experts_placed_otherwise_have_a_buffer(text: str, apart: bool) -> None:
    """`group_params_for_buffers` of Megatron-Core: by expert or expert tensor parallelism. In `megatron:d2t2` the
    experts are whole on each tensor rank."""
    allocation = ModelAllocation.parse(text)
    assert shards.has_expert_buffer(SPECS["moe"], allocation) == apart
    assert not shards.has_expert_buffer(SPECS["dense"], allocation)
    assert len(buffers(SPECS["moe"], allocation, 0)) == 1 + apart


def test_families_without_an_engine_are_counted() -> None:
    """DeepSeek-V3 on one rank is the whole model; its parameters have no Megatron names here."""
    spec = ModelSpec.find("deepseek-ai/DeepSeek-V3")
    allocation = ModelAllocation.parse("megatron:d1")
    assert shards.stage_counts(spec, allocation, 0).total == spec.parameters()
    with pytest.raises(ValueError, match="deepseek_v3"):
        shards.rank_parameters(spec, allocation, 0)


def counted(layouts: list[str], ranks: int) -> list[dict]:
    if BENCHMARKS not in sys.path:
        sys.path.insert(0, BENCHMARKS)
    import memory

    chosen = [x for x in memory.LAYOUTS if f"{x.model} {x.allocation}" in layouts or not layouts]
    chosen = [x for x in chosen if ModelAllocation.parse(x.allocation).world_size == ranks]
    assert chosen
    return memory.count_layouts(chosen, ranks)


@pytest.mark.slow
def test_four_gloo_ranks_hold_what_is_said() -> None:
    """Parameters, gradient buffers and optimizer states of every rank after one step, in bfloat16 too."""
    rows = counted(["moe megatron:d2p2e2", "qwen2 megatron:d2t2"], 4)
    assert len(rows) == 2 and [row["differences"] for row in rows] == [[], []]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [4, 8])
def test_every_layout_on_gloo(ranks: int) -> None:
    rows = counted([], ranks)
    assert len(rows) >= 5 and [row["differences"] for row in rows] == [[]] * len(rows)
