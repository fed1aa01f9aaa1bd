"""The rules, one module a family; importing this package declares them all, in the order in which they run."""

from areal_like.preflight.rules import engine, model, cluster, batches, rollouts, adapters, numerics, memory, advice  # noqa: I001

__all__ = ["adapters", "advice", "batches", "cluster", "engine", "memory", "model", "numerics", "rollouts"]
