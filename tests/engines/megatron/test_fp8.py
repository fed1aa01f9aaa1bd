"""FP8 without a GPU: what reaches Megatron's configuration, lengths, groups of largest values, refusals."""

from __future__ import annotations

import types

import pytest
import torch
from megatron.core import fp8_utils
from megatron.core.transformer.transformer_config import TransformerConfig

from areal_like.alloc import DiagnosticError
from areal_like.config import FP8Config
from areal_like.engines.megatron import fp8
from areal_like.runtime.local import WorkerGroup
from areal_like.spec import padding_multiples
from areal_like.trainers.trial import run_trial


def test_every_option_reaches_the_transformer_config():
    options = FP8Config(
        mode="e4m3",
        recipe="delayed",
        param=True,
        margin=2,
        amax_history_len=7,
        amax_compute_algo="most_recent",
        wgrad=False,
        tp_only_amax_red=True,
    )
    config = TransformerConfig(num_layers=4, hidden_size=64, num_attention_heads=4, **fp8.settings(options))
    assert (config.fp8, config.fp8_recipe, config.fp8_param) == ("e4m3", "delayed", True)
    assert (config.fp8_margin, config.fp8_amax_history_len, config.fp8_amax_compute_algo) == (2, 7, "most_recent")
    assert config.fp8_wgrad is False and config.tp_only_amax_red is True
    outer = FP8Config(
        first_last_layers_bf16=True, num_layers_at_start_in_bf16=2, num_layers_at_end_in_bf16=3, recipe="tensorwise"
    )
    config = TransformerConfig(num_layers=4, hidden_size=64, num_attention_heads=4, **fp8.settings(outer))
    kept = [fp8_utils.is_first_last_bf16_layer(config, layer) for layer in range(4)]
    assert kept == [True, True, True, True] and config.fp8_recipe == "tensorwise"
    assert fp8.settings(None) == {}


@pytest.mark.parametrize(
    ("tp", "cp", "block", "expected"),
    [(1, 1, 1, (1, 1)), (4, 1, 16, (1, 64)), (2, 1, 128, (1, 256)), (1, 2, 32, (4, 64)), (3, 2, 16, (4, 96))],
)
def test_every_rank_has_whole_blocks_of_tokens(tp, cp, block, expected):
    """A rank of t and c has 1/(t c) of a micro-batch."""
    assert padding_multiples(tp, cp, block) == expected
    assert expected[1] // (tp * cp) % block == 0


def test_largest_values_are_shared_in_the_groups_of_the_model_that_runs(monkeypatch):
    monkeypatch.setattr(fp8_utils, "parallel_state", None, raising=False)
    monkeypatch.setattr(fp8._AMAX_GROUPS, "groups", None)
    groups = [
        types.SimpleNamespace(collection=types.SimpleNamespace(tp_cp=f"tp-cp {n}", tp_dp_cp=f"all {n}")) for n in "ab"
    ]
    first, second = torch.nn.Identity(), torch.nn.Identity()
    fp8.follow_groups([first], groups[0])
    fp8.follow_groups([second], groups[1])
    state = fp8_utils.parallel_state
    assert not state.model_parallel_is_initialized(), "no model has run"
    for module, name in [(first, "a"), (second, "b"), (first, "a")]:
        module(torch.zeros(1))
        assert state.model_parallel_is_initialized()
        # as megatron.core.fp8_utils.get_fp8_context calls it
        shared = [state.get_amax_reduction_group(with_context_parallel=True, tp_only_amax_red=x) for x in (True, False)]
        assert shared == [f"tp-cp {name}", f"all {name}"]


def test_without_a_gpu_the_engine_refuses(solo, models):
    options = {"fp8_config": FP8Config()}
    found = solo.refuses("megatron:d1", models("qwen3"), dtype="bfloat16", megatron=options)
    assert found == [
        ("RuntimeError", "fp8_config: FP8 needs a GPU and TransformerEngine; leave it out, or install them")
    ]


def test_another_type_is_refused():
    with pytest.raises(ValueError, match="what is not FP8 is bfloat16; dtype is float32"):
        fp8.require_hardware(FP8Config(), dtype=torch.float32, transformer_engine=True)


@pytest.mark.parametrize(
    ("options", "codes"),
    [
        ({"device": "cpu", "dtype": "bfloat16"}, ["AL522"]),
        ({"device": "cpu", "dtype": "float32"}, ["AL522", "AL530"]),
    ],
)
def test_a_trial_is_refused_before_a_process_starts(monkeypatch, options, codes):
    monkeypatch.setattr(WorkerGroup, "start", lambda *a, **k: pytest.fail("processes were started"))
    with pytest.raises(DiagnosticError) as raised:
        run_trial("megatron:d1", fp8="blockwise", **options)
    assert [d.code for d in raised.value.diagnostics] == codes


def test_ordinary_weights_are_left_alone():
    layer = torch.nn.Linear(4, 4)
    weight = layer.weight
    with fp8.whole_weights([layer]) as written:
        assert layer.weight is weight
    assert written == [] and fp8.readable(weight).data_ptr() == weight.data_ptr()
