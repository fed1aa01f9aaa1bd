"""The rules, one module a family; importing this package declares them all, in the order in which they run."""

from areal_like.preflight.rules import (  # noqa: I001
    engine,
    moe,
    model,
    pipeline,
    cluster,
    batches,
    rollouts,
    adapters,
    numerics,
    fp8,
    float16,
    recomputation,
    memory,
    residence,
    profiler,
    advice,
)

__all__ = [
    "adapters",
    "advice",
    "batches",
    "cluster",
    "engine",
    "float16",
    "fp8",
    "memory",
    "model",
    "moe",
    "numerics",
    "pipeline",
    "profiler",
    "recomputation",
    "residence",
    "rollouts",
]
