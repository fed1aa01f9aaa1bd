"""What the check says about a checkpoint depends on the bridge."""

from __future__ import annotations

import pytest

from areal_like.alloc import ModelAllocation
from areal_like.preflight import check_layout
from areal_like.preflight.examples import BASE_MODEL, findings
from areal_like.preflight.registry import example
from areal_like.spec import ModelSpec

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
OTHER = "actor.megatron.bridge_type=megatron-bridge"


@pytest.mark.parametrize(("kind", "able"), [("llama3", True), ("linear", True), ("yarn", False), ("longrope", False)])
def test_rotary_scaling(kind, able):
    model = {"model_type": "llama", "rope_scaling": {**LLAMA3, "rope_type": kind}}
    (found,) = [d for d in findings(example(**model)) if d.severity == "error"]
    assert found.code == "AL302" and repr(kind) in found.message
    if able:
        assert found.key == "actor.megatron.bridge_type" and found.help == "use megatron-bridge"
        assert "bridge_type mbridge" in found.message
        assert findings(example(OTHER, **model)) == ()
    else:
        assert found.key == "actor.path" and "without rope scaling" in (found.help or "")
        assert [d.code for d in findings(example(OTHER, **model))] == ["AL302"]


def test_a_layout_alone_is_possible_if_some_bridge_makes_it_so():
    layout = ModelAllocation.parse("megatron:d2")
    for kind, codes in (("llama3", []), ("yarn", ["AL302"])):
        spec = ModelSpec.from_config({**BASE_MODEL, "rope_scaling": {"rope_type": kind, "factor": 4.0}})
        assert [d.code for d in check_layout(layout, spec)] == codes
