"""The rules, one module a family; importing this package declares them all, in the order in which they run."""

from areal_like.preflight.rules import (  # noqa: I001
    engine,
    model,
    pipeline,
    cluster,
    batches,
    rollouts,
    adapters,
    numerics,
    fp8,
    memory,
    residence,
    advice,
)

__all__ = [
    "adapters",
    "advice",
    "batches",
    "cluster",
    "engine",
    "fp8",
    "memory",
    "model",
    "numerics",
    "pipeline",
    "residence",
    "rollouts",
]
