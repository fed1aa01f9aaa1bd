"""One layout against one model: the innermost question of the check, asked thousands of times by the planner."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from areal_like.alloc import Diagnostic, ModelAllocation
from areal_like.preflight.job import Role
from areal_like.preflight.registry import LAYOUT_RULES
from areal_like.preflight.report import of_layout
from areal_like.spec import ModelSpec

__all__ = ["check_layout", "is_legal"]


def check_layout(allocation: ModelAllocation, spec: ModelSpec, section: Any = None) -> list[Diagnostic]:
    """What keeps this version from training, or from generating with, this model under this layout; empty when
    nothing does.

    Args:
        section: the role's section of the configuration; without it, what some setting makes possible is possible.
    """
    role = replace(_role(allocation, spec), section=section)
    return [of_layout(rule, found, allocation) for rule in LAYOUT_RULES for found in rule.function(role)]


def is_legal(allocation: ModelAllocation, spec: ModelSpec) -> bool:
    """Whether `check_layout` finds nothing, found out faster."""
    role = _role(allocation, spec)
    return all(next(rule.function(role), None) is None for rule in LAYOUT_RULES)


def _role(allocation: ModelAllocation, spec: ModelSpec) -> Role:
    return Role("rollout" if allocation.descriptor.role == "inference" else "actor", allocation, "", spec)
