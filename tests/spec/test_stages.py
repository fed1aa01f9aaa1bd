"""A model's layers on its stages: costs worked by hand, and a written layout."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from areal_like.alloc import ModelAllocation
from areal_like.spec import ModelSpec, PipelineLayoutError, stage_sizes
from areal_like.spec.stages import ATTENDED, StageCount, layer_costs, layout_faults

SMALL: dict[str, Any] = {
    "num_hidden_layers": 8,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 512,
    "vocab_size": 100,
    "max_position_embeddings": 4096,
}
DENSE = {"model_type": "qwen3", **SMALL}
MIXED = {
    "model_type": "qwen3_moe",
    **SMALL,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "mlp_only_layers": [0, 1],
}
PROJECTIONS = 2 * 64 * (4 * 16 + 2 * 2 * 16 + 4 * 16)  # queries, keys and values, output; two operations each
SCORES = 2 * 2 * 4 * 16 * ATTENDED  # queries times keys, probabilities times values, over four heads of 16
DENSE_MLP = 2 * 3 * 64 * 512


def slowest(sizes: list[int], costs: tuple[float, ...], head: float) -> float:
    bounds = [0, *itertools.accumulate(sizes)]
    stages = [sum(costs[a:b]) for a, b in itertools.pairwise(bounds)]
    return max(*stages[:-1], stages[-1] + head)


def test_a_dense_layer_by_hand() -> None:
    assert layer_costs(ModelSpec.from_config(DENSE)) == (PROJECTIONS + SCORES + DENSE_MLP,) * 8


def test_dense_and_expert_layers_weigh_what_they_compute() -> None:
    """Two dense layers, then experts: a token passes through two of them, each 32 wide, and the router."""
    spec = ModelSpec.from_config(MIXED)
    experts = 2 * 2 * 3 * 64 * 32 + 2 * 8 * 64
    assert layer_costs(spec) == (PROJECTIONS + SCORES + DENSE_MLP,) * 2 + (PROJECTIONS + SCORES + experts,) * 6
    assert stage_sizes(spec, StageCount(2)) == [3, 5]  # as if all were equal it would be four each
    even = ModelSpec.from_config({**MIXED, "mlp_only_layers": []})
    assert stage_sizes(even, StageCount(2)) == [4, 4]


def test_sliding_and_linear_layers_have_costs_of_their_own() -> None:
    gpt_oss = ModelSpec.find("openai/gpt-oss-20b")
    sliding, full = (layer_costs(gpt_oss)[gpt_oss.sliding_layers[0] + other] for other in (0, 1))
    per_token = 2 * 2 * gpt_oss.num_attention_heads * gpt_oss.head_dim
    assert full - sliding == per_token * (ATTENDED - gpt_oss.sliding_window)
    minimax = ModelSpec.find("MiniMaxAI/MiniMax-Text-01")
    linear = {minimax.layer_flops(0, layer) for layer in minimax.linear_layers}  # no matter how much came before
    assert {layer_costs(minimax)[layer] for layer in minimax.linear_layers} == linear
    assert len(linear) == 1 and len(set(layer_costs(minimax))) == 2


def test_known_models_by_hand() -> None:
    """Qwen3-0.6B: the projection is worth 7.8 layers; Qwen3-30B-A3B: 4.8."""
    small, large = ModelSpec.find("Qwen/Qwen3-0.6B"), ModelSpec.find("Qwen/Qwen3-30B-A3B")
    assert small.head_flops() / layer_costs(small)[0] == pytest.approx(7.8, abs=0.1)
    assert large.head_flops() / layer_costs(large)[0] == pytest.approx(4.8, abs=0.1)
    assert stage_sizes(small, ModelAllocation.parse("megatron:p4")) == [9, 9, 9, 1]
    assert stage_sizes(large, ModelAllocation.parse("megatron:p4")) == [13, 13, 13, 9]


@pytest.mark.parametrize("text", ["megatron:p2", "megatron:p2v2", "megatron:p4", "megatron:p2v4", "megatron:p8"])
@pytest.mark.parametrize("config", [DENSE, MIXED])
def test_the_slowest_stage_is_as_fast_as_any_split_makes_it(text: str, config: dict[str, Any]) -> None:
    """Every composition of eight layers, virtual stages included."""
    spec, allocation = ModelSpec.from_config({**config, "vocab_size": 5000}), ModelAllocation.parse(text)
    count, costs, head = allocation.pp * allocation.vpp, layer_costs(spec), spec.head_flops()
    every = [
        [b - a for a, b in itertools.pairwise((0, *cuts, 8))] for cuts in itertools.combinations(range(1, 8), count - 1)
    ]
    found = stage_sizes(spec, allocation)
    assert sum(found) == 8 and len(found) == count and min(found) >= 1
    assert slowest(found, costs, head) == min(slowest(sizes, costs, head) for sizes in every)


def test_a_written_layout_is_taken() -> None:
    spec = ModelSpec.from_config(DENSE)
    assert stage_sizes(spec, ModelAllocation.parse("megatron:p2v2"), (1, 2, 4, 1)) == [1, 2, 4, 1]


@pytest.mark.parametrize(
    ("layout", "faults"),
    [
        ((4, 4), ["it has 2 stages, p2v2 has 4"]),
        ((2, 2, 2, 3), ["it has 9 layers, the model 8"]),
        ((4, 0, 5, -1), ["stage 1, 3 has no layer"]),
        ((9, 0), ["it has 2 stages, p2v2 has 4", "stage 1 has no layer", "it has 9 layers, the model 8"]),
        ((), ["it has 0 stages, p2v2 has 4", "it has 0 layers, the model 8"]),
    ],
)
def test_all_that_is_wrong_with_a_layout(layout: tuple[int, ...], faults: list[str]) -> None:
    spec, allocation = ModelSpec.from_config(DENSE), ModelAllocation.parse("megatron:p2v2")
    assert layout_faults(spec, allocation, layout) == faults
    with pytest.raises(PipelineLayoutError) as error:
        stage_sizes(spec, allocation, layout)
    message = str(error.value)
    assert message.startswith(f"pipeline_layout {list(layout)}: ") and all(fault in message for fault in faults)
    assert message.endswith("for example [2, 2, 2, 2]")


def test_no_example_where_none_is_legal() -> None:
    with pytest.raises(PipelineLayoutError, match=r"it has 8 stages, p16 has 16$"):
        stage_sizes(ModelSpec.from_config(DENSE), ModelAllocation.parse("megatron:p16"), (1,) * 8)


def test_the_document_shows_what_the_benchmark_prints(monkeypatch: pytest.MonkeyPatch) -> None:
    root = Path(__file__).parents[2]
    monkeypatch.syspath_prepend(str(root / "benchmarks"))
    import pipeline

    text = (root / "docs" / "megatron.md").read_text(encoding="utf-8")
    shown = text.partition("<!-- pipeline:begin -->\n")[2].partition("\n<!-- pipeline:end -->")[0]
    assert shown == pipeline.table()
