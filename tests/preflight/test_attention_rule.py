"""AL536: which attention a job cannot have, and what to do about it."""

from __future__ import annotations

import pytest

from areal_like.preflight.examples import findings
from areal_like.preflight.registry import example

FUSED, FLEX = "actor.megatron.attention_backend=fused", "actor.megatron.attention_backend=flex"
DETERMINISTIC = "actor.megatron.use_deterministic_algorithms=true"
DROPOUT = {"attention_dropout": 0.1}


def al536(*changes, **model):
    return [(d.message, d.help) for d in findings(example(*changes, **model)) if d.code == "AL536"]


@pytest.mark.parametrize(
    ("changes", "model", "message", "cure"),
    [
        ((FUSED, "device=cpu"), {}, "fused needs a GPU", "attention_backend: auto"),
        ((FLEX, "device=cpu"), {}, "flex needs a GPU", "attention_backend: auto"),
        ((FUSED, DETERMINISTIC), {}, "do not repeat", "attention_backend: auto"),
        ((FLEX, "actor.backend=megatron:d2c2"), {}, "no context parallelism (c2)", "leave c out"),
        ((FLEX,), DROPOUT, "flex has no dropout", "disable_dropout: true"),
        ((DETERMINISTIC, "device=cuda"), DROPOUT, "repeat has no dropout", "disable_dropout: true"),
    ],
)
def test_refused(changes, model, message, cure):
    ((found, help_),) = al536(*changes, **model)
    assert message in found and cure in help_


@pytest.mark.parametrize(
    ("changes", "model"),
    [
        (("device=cpu",), {}),
        ((FUSED,), DROPOUT),
        ((FUSED, "actor.backend=megatron:d2c2"), {}),
        ((FLEX, DETERMINISTIC), {}),
        ((FLEX, "actor.disable_dropout=true"), DROPOUT),
        (("device=cpu", DETERMINISTIC), DROPOUT),
    ],
)
def test_passes(changes, model):
    assert al536(*changes, **model) == []
