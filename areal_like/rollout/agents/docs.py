"""Writes the table of shipped agents in docs/rollout.md: `python -m areal_like.rollout.agents.docs`."""

from __future__ import annotations

import sys
from typing import Any

from areal_like.rollout.agents.arguments import SEED, arguments_model
from areal_like.rollout.agents.base import EvaluationAgent
from areal_like.rollout.agents.registry import agent_types

__all__ = ["markdown"]

OTHERS = {SEED: "of what is drawn", "shuffle": "each epoch in an order of its own"}


def markdown() -> str:
    """A table of arguments for each agent type of this package."""
    own = {name: kind for name, kind in agent_types().items() if kind.__module__.startswith("areal_like.")}
    return "\n".join(_section(name, kind) for name, kind in own.items())


def _section(name: str, kind: type[EvaluationAgent]) -> str:
    lines = [f"**`{name}`**: {(kind.__doc__ or '').strip().splitlines()[0]}", ""]
    lines += ["| argument | default | meaning |", "|----------|---------|---------|"]
    for argument, info in arguments_model(kind).model_fields.items():
        default = "required" if info.is_required() else f"`{yaml_text(info.default)}`"
        default = "the run's" if argument == SEED else default
        meaning = info.description or OTHERS[argument]
        lines.append(f"| `{argument}` | {default} | {meaning}{_bounds(info.metadata)} |")
    return "\n".join(lines) + "\n"


def yaml_text(value: Any) -> str:
    """A default as a file would say it."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _bounds(metadata: list[Any]) -> str:
    low = next((bound.ge for bound in metadata if hasattr(bound, "ge")), None)
    high = next((bound.le for bound in metadata if hasattr(bound, "le")), None)
    return f" ({low:.0f} to {high:.0f})" if low is not None and high is not None else ""


if __name__ == "__main__":
    sys.stdout.write(markdown())
