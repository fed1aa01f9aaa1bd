"""Where gradients are added up by the product: the decision, and what it switches."""

from __future__ import annotations

from types import SimpleNamespace

import optimizer_views
import pytest
import torch

from areal_like.engines.megatron.gradients import fuse_gradients, fuses_gradients


@pytest.mark.parametrize(
    ("asked", "lora", "transformer_engine", "expected"),
    [
        (None, False, True, True),
        (None, False, False, False),
        (None, True, True, False),
        (True, False, True, True),
        (False, False, True, False),
        (False, False, False, False),
        (True, False, False, "needs TransformerEngine and a GPU"),
        (True, True, True, "nothing to fuse"),
    ],
)
def test_where_products_accumulate(helpers, asked, lora, transformer_engine, expected):
    megatron = {"gradient_accumulation_fusion": asked}
    config = helpers.engine_config("megatron:d1", "none", megatron=megatron, use_lora=lora)
    if isinstance(expected, str):
        with pytest.raises(ValueError, match=f"megatron.gradient_accumulation_fusion.*{expected}"):
            fuses_gradients(config, transformer_engine=transformer_engine)
    else:
        assert fuses_gradients(config, transformer_engine=transformer_engine) is expected


def test_layers_and_the_configuration_are_switched_on():
    """Layers that cannot, such as Megatron's own, are left alone; those of our own read the configuration."""
    config = SimpleNamespace(gradient_accumulation_fusion=False)
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    model[0].fuse_wgrad_accumulation = False  # as TransformerEngine's
    model[1].gradient_accumulation_fusion, model[1].config = False, config  # as Megatron's output layer
    assert fuse_gradients([model]) == 1
    assert model[0].fuse_wgrad_accumulation and config.gradient_accumulation_fusion
    assert not model[1].gradient_accumulation_fusion


def test_on_a_cpu_it_is_refused_or_off(solo, models):
    errors = solo.refuses("megatron:d1", models("qwen3"), megatron={"gradient_accumulation_fusion": True})
    assert errors[0][0] == "ValueError" and "gradient_accumulation_fusion" in errors[0][1]
    solo.build("megatron:d1", models("qwen3"))
    assert not solo.group.call("ask", optimizer_views.configured)[0]
