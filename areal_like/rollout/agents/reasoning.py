"""`reasoning_gym`: any task of the package of that name, with its own scorer."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any

from pydantic import Field

from areal_like.alloc.diagnostics import Diagnostic
from areal_like.data.prompts import conversation
from areal_like.data.reasoning import PREFIX, generated_rows
from areal_like.data.rewards import reasoning_gym_reward
from areal_like.data.rows import Asker, DataError, Row
from areal_like.rollout.agents.base import Episode, GroupedRolloutGenerator

__all__ = ["ReasoningGym"]

SIZE = 10_000
"""Problems until they repeat, unless `parameters` has a `size`. The package's own 500 would soon be known by heart."""


class ReasoningGym(GroupedRolloutGenerator):
    """Problems that are generated as they are needed, each the same whenever it is asked for."""

    def __init__(
        self,
        task: Annotated[str, Field(min_length=1, description="name of the task, for example chain_sum")],
        parameters: Annotated[
            dict[str, Any] | None,
            Field(description="of the task, as the package names them; size is 10000 if left out"),
        ] = None,
        seed: int = 0,
    ) -> None:
        chosen = {"size": SIZE, **(parameters or {})}
        try:
            self.rows = generated_rows(PREFIX + task, chosen, "train", seed, Asker("agent_args"))
        except DataError as error:
            raise DataError(_renamed(found) for found in error.diagnostics) from error
        self.distinct = len(self.rows)

    def problem(self, index: int) -> Row:
        """See `RolloutGenerator.problem`."""
        return self.rows[index % len(self.rows)]

    async def run(self, episode: Episode) -> float:
        """Ask once; the reward is the score of the task, see `data.rewards.reasoning_gym_reward`."""
        answer = await episode.chat(conversation(episode.row))
        return await episode.score(reasoning_gym_reward, answer.text)


def _renamed(found: Diagnostic) -> Diagnostic:
    """A finding about a dataset section, in the words of an environment file."""
    key = {"agent_args.path": "agent_args.task", "agent_args.kwargs": "agent_args.parameters"}.get(found.key or "")
    return replace(found, key=key, alternatives=tuple(text.removeprefix(PREFIX) for text in found.alternatives))
