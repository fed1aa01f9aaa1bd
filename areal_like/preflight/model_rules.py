"""Whether an engine of this version can cut this model (AL2, AL3); each rule looks at one thing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from areal_like.alloc import ModelAllocation
from areal_like.spec import SUPPORTED_ARCHITECTURES, ModelSpec

__all__ = ["RULES", "Problem"]


class Problem(NamedTuple):
    """A finding of a rule; the caller adds where it stands."""

    code: str
    message: str
    help: str


def letters(allocation: ModelAllocation, spec: ModelSpec) -> Iterator[Problem]:
    if allocation.cp > 1:
        message = f"context parallelism (c{allocation.cp}) is not in this version's engines"
        yield Problem("AL210", message, "leave c out")
    if allocation.vpp > 1:
        message = f"virtual pipeline stages (v{allocation.vpp}) are not in this version's engines"
        yield Problem("AL211", message, "leave v out")


def architecture(allocation: ModelAllocation, spec: ModelSpec) -> Iterator[Problem]:
    if spec.architecture not in SUPPORTED_ARCHITECTURES:
        known = ", ".join(SUPPORTED_ARCHITECTURES)
        yield Problem("AL301", f"architecture {spec.architecture!r} is not supported", f"supported: {known}")
        return
    for feature in spec.unsupported:
        yield Problem("AL302", f"the checkpoint uses {feature}, which is not supported", "choose another model")
    if spec.rope_scaling != "default":
        message = f"the checkpoint scales rotary positions ({spec.rope_scaling!r}); bridge_type mbridge ignores how"
        yield Problem("AL302", message, "choose a checkpoint without rope scaling")


def attention_heads(allocation: ModelAllocation, spec: ModelSpec) -> Iterator[Problem]:
    tp, heads, groups = allocation.tp, spec.num_attention_heads, spec.num_key_value_heads
    if heads % tp:
        yield Problem("AL303", f"{heads} attention heads do not divide by t{tp}", _choices("t", heads, groups))
    elif groups % tp:
        yield Problem("AL304", f"{groups} key-value heads do not divide by t{tp}", _choices("t", heads, groups))


def widths(allocation: ModelAllocation, spec: ModelSpec) -> Iterator[Problem]:
    if not spec.is_moe and spec.intermediate_size % allocation.tp:
        message = f"the MLP width {spec.intermediate_size} does not divide by t{allocation.tp}"
        yield Problem("AL305", message, _choices("t", spec.intermediate_size))
    if spec.is_moe and spec.moe_intermediate_size % allocation.etp:
        message = f"the expert width {spec.moe_intermediate_size} does not divide by the experts' t{allocation.etp}"
        yield Problem("AL306", message, _choices("t", spec.moe_intermediate_size))


def experts(allocation: ModelAllocation, spec: ModelSpec) -> Iterator[Problem]:
    if not spec.is_moe and (allocation.ep > 1 or allocation.etp > 1):
        letter = f"e{allocation.ep}" if allocation.ep > 1 else f"the experts' t{allocation.etp}"
        yield Problem("AL307", f"the model is dense: it has no experts for {letter}", "leave the experts' letters out")
    elif spec.is_moe and spec.num_experts % allocation.ep:
        message = f"{spec.num_experts} experts do not divide by e{allocation.ep}"
        yield Problem("AL308", message, _choices("e", spec.num_experts))


def stages(allocation: ModelAllocation, spec: ModelSpec) -> Iterator[Problem]:
    if allocation.pp * allocation.vpp > spec.num_layers:
        count = f"p{allocation.pp}" + (f"v{allocation.vpp}" if allocation.vpp > 1 else "")
        message = f"{spec.num_layers} layers cannot fill the {allocation.pp * allocation.vpp} stages of {count}"
        yield Problem("AL309", message, f"use p{spec.num_layers} or less")


RULES = (letters, architecture, attention_heads, widths, experts, stages)


def _choices(letter: str, *numbers: int) -> str:
    largest = min(numbers)
    sizes = [n for n in range(1, min(largest, 64) + 1) if all(number % n == 0 for number in numbers)]
    return f"{letter} can be " + ", ".join(map(str, sizes[:12]))
