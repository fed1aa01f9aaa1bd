"""Measuring the policy on environments, between two steps."""

from __future__ import annotations

from areal_like.rollout.agents.evaluation import EvaluationResponse
from areal_like.rollout.trajectories import TokenRollout
from areal_like.trainers.generation import Generation
from areal_like.trainers.startup import Job

__all__ = ["evaluate"]


def evaluate(job: Job, generation: Generation) -> dict[str, float]:
    """Attempt the problems of every evaluation with the installed weights, while generation is paused.

    Returns the figures of `EvaluationResponse.metrics` and `answer_tokens`, drawn in an attempt in the mean; under
    `NAME/` where there are several evaluations.
    """
    found: dict[str, float] = {}
    for agent, problems in job.evaluations:
        response = generation.evaluate(agent, problems)
        prefix = f"{agent.name}/" if len(job.evaluations) > 1 else ""
        figures = {**response.metrics(), **_lengths(response)}
        found |= {f"{prefix}{name}": value for name, value in figures.items()}
    return found


def _lengths(response: EvaluationResponse) -> dict[str, float]:
    drawn = [m.drawn for group in response.groups for m in group.members if isinstance(m, TokenRollout)]
    return {"answer_tokens": sum(drawn) / len(drawn)} if drawn else {}
