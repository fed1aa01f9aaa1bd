"""`Attempts`: one attempt of an agent, whatever happens in it."""

from __future__ import annotations

from collections.abc import Callable

from areal_like.data.rows import Row
from areal_like.rollout.agents.base import Agent, Episode
from areal_like.rollout.trajectories import Rollout, TokenRollout

__all__ = ["Attempts"]


class Attempts:
    """Satisfies `agents.base.Attempt`.

    Args:
        make_episode: an Episode for (agent, problem, its number, attempt).
        fatal: errors of an episode that are no fault of the environment, such as a dead engine; they are raised.
    """

    def __init__(
        self,
        make_episode: Callable[[Agent, Row, int, int], Episode],
        *,
        fatal: tuple[type[BaseException], ...] = (),
    ) -> None:
        self._make_episode, self._fatal = make_episode, fatal

    async def __call__(self, agent: Agent, row: Row, index: int, number: int) -> TokenRollout | Rollout:
        """Run the agent once. Any other error than the fatal ones makes a rollout without a reward, with the turns that
        there were."""
        episode = self._make_episode(agent, row, index, number)
        try:
            outcome = await agent.run(episode)
            return outcome if isinstance(outcome, TokenRollout | Rollout) else episode.rollout(float(outcome))
        except self._fatal:
            raise
        except Exception as error:
            failure = f"{type(error).__name__}: {error}"
            return TokenRollout(list(episode.turns), None, failure=failure, figures=dict(episode.figures))
