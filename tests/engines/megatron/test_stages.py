"""`pipeline_layout` and the balanced split on the built model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from areal_like.spec import ModelSpec, stage_sizes
from areal_like.spec.memory import schedule
from areal_like.spec.stages import StageCount


def test_a_written_layout_is_built(pair: Any, models: Any, helpers: Any) -> None:
    """Stages of another size than balancing would give; what the model computes and exports is the same."""
    folder = models("qwen3")
    spec = ModelSpec.from_path(folder)
    assert stage_sizes(spec, StageCount(2)) == [2, 1]
    pair.build("megatron:p2", folder, megatron={"pipeline_layout": (1, 2)})
    assert pair.group.call("layer_numbers") == [[[1]], [[2, 3]]]
    batch = helpers.random_batch([20, 7, 33])
    assert torch.allclose(pair.logits(batch), helpers.hugging_face_logits(folder, batch), atol=1e-4)
    exported, original = pair.weights(), load_file(folder / "model.safetensors")
    assert exported.keys() == original.keys()
    assert all(torch.equal(exported[name], original[name]) for name in original)
    pair.build("megatron:p2", folder)
    assert pair.group.call("layer_numbers") == [[[1, 2]], [[3]]]


def test_what_does_not_fit_stops_every_rank(pair: Any, models: Any) -> None:
    """The check says it before (AL215, AL316); an engine built without it does not fall back to something else."""
    folder = models("qwen3")
    wrong = "megatron.virtual_pipeline_parallel_size is 2, backend megatron:p2 has v1"
    for error in pair.refuses("megatron:p2", folder, megatron={"virtual_pipeline_parallel_size": 2}):
        assert error == ("ValueError", wrong)
    for error in pair.refuses("megatron:p2", folder, megatron={"pipeline_layout": (1, 1)}):
        assert error == (
            "PipelineLayoutError",
            "pipeline_layout [1, 1]: it has 2 layers, the model 3; for example [2, 1]",
        )


@pytest.mark.parametrize("lengths", [[40, 30], [60] * 5])
def test_passes_come_in_the_order_that_memory_is_predicted_from(
    pair: Any, models: Any, helpers: Any, lengths: list[int]
) -> None:
    """Megatron's interleaved schedule: two micro-batches are all in flight at once, six are not."""
    pair.build("megatron:p2v2", models("qwen3-deep"), mb_spec={"max_tokens_per_mb": 64})
    batch = helpers.random_batch(lengths)
    micro_batches = 2 * -(-len(lengths) // 2)
    for stage, seen in enumerate(pair.group.call_each("passes", [(batch,)] * 2)):
        assert seen == schedule.passes(2, 2, stage, micro_batches)
