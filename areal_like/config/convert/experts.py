"""Megatron-Core's options of a mixture of experts, which three systems pass on under their own spellings."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from typing import Any

from areal_like.config.convert.common import as_float
from areal_like.config.convert.draft import Draft, Row

_ROUTER_OPTIONS = (
    "moe_token_dispatcher_type",
    "moe_router_dtype",
    "moe_router_load_balancing_type",
    "moe_aux_loss_coeff",
    "moe_z_loss_coeff",
    "moe_permute_fusion",
    "moe_router_fusion",
    "moe_shared_expert_overlap",
)
DEFAULT_BIAS_RATE = 1e-3
"""Megatron-Core's `moe_router_bias_update_rate`, which acts once the expert bias is switched on."""


def moe_rows(spell: Callable[[str], str], defaults: Mapping[str, Any], fill: Container[str] = ()) -> tuple[Row, ...]:
    """Rows of Megatron-Core's MoE options that have the same name and meaning here.

    Args:
        spell: a key of the other system from Megatron-Core's name.
        defaults: those of the other system, by Megatron-Core's names.
        fill: names that are written also when only defaulted there.
    """
    rows = [
        Row(spell(name), f"actor.megatron.{name}", defaults.get(name), fill=name in fill) for name in _ROUTER_OPTIONS
    ]
    deepep = "moe_token_dispatcher_type: flex is DeepEP here"
    return (*rows, Row(spell("moe_enable_deepep"), default=False, note=deepep))


def put_expert_bias(draft: Draft, enable: str, rate: str) -> None:
    """Megatron-Core has a switch and a rate; here the rate alone says it."""
    switch, given = draft.source.take(enable), draft.source.take(rate)
    if switch is not None and switch.value is True:
        value = DEFAULT_BIAS_RATE if given is None else as_float(given.value)
        draft.put("actor.megatron.moe_router_bias_update_rate", value, given or switch)
    elif given is not None and given.value and not given.default:
        draft.left_out(given, f"it acts only with {enable}")


def write_expert_bias(draft: Draft, enable: str, rate: str) -> None:
    given = draft.source.take("actor.megatron.moe_router_bias_update_rate")
    if given is not None and given.value:
        draft.put(enable, True, given)
        draft.put(rate, given.value, given)
