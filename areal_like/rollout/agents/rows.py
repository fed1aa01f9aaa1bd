"""Environments whose problems are the rows of a dataset."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from areal_like.config import TrainDatasetConfig
from areal_like.data.datasets import load_rows
from areal_like.data.loader import epoch_order
from areal_like.data.prompts import conversation
from areal_like.data.rewards import Reward
from areal_like.data.rows import Asker, Row
from areal_like.rollout.agents.base import Episode, EvaluationAgent, GroupedRolloutGenerator

__all__ = ["DatasetAgent", "RowsAgent", "rows_of"]


class RowsAgent(EvaluationAgent):
    """Poses the rows of a dataset, epoch after epoch.

    Args:
        rows: the dataset.
        shuffle: each epoch in an order of its own, which depends on the seed and the epoch's number alone.
        batch_size: with it, an epoch ends at the last full batch, as in `data.loader.RowLoader` with `drop_last`.

    Raises:
        ValueError: no rows, or fewer than a batch.
    """

    def __init__(self, rows: Sequence[Row], *, shuffle: bool, seed: int, batch_size: int | None = None) -> None:
        if not rows:
            raise ValueError("there are no rows")
        if batch_size is not None and not 1 <= batch_size <= len(rows):
            raise ValueError(f"batch_size is {batch_size}, and there are {len(rows)} rows: no batch would be full")
        self.rows = rows
        self.distinct = len(rows)
        self._epoch = len(rows) - (len(rows) % batch_size if batch_size is not None else 0)
        # Attempts of two epochs may alternate while one ends and the next begins.
        self._order = lru_cache(maxsize=3)(lambda epoch: epoch_order(len(rows), epoch, shuffle=shuffle, seed=seed))

    def problem(self, index: int) -> Row:
        """See `RolloutGenerator.problem`."""
        epoch, position = divmod(index, self._epoch)
        return self.rows[self._order(epoch)[position]]


class DatasetAgent(RowsAgent, GroupedRolloutGenerator):
    """One question, one answer, one reward: rows of a dataset, a reward function, and nothing else.

    `problem` gives the rows in the order in which `RowLoader` with the same numbers gives its batches, one after the
    other. (Without `drop_last` the loader's last batch of an epoch is short; here it is simply followed by the next
    epoch.)

    Args:
        rows: the dataset.
        reward: `reward(prompt, completion, row)`, a function of a module's top level.
        name: of the environment.
        batch_size: of `RowLoader`; it matters with `drop_last` alone.
    """

    def __init__(
        self,
        rows: Sequence[Row],
        reward: Reward,
        *,
        name: str = "dataset",
        batch_size: int = 1,
        shuffle: bool = True,
        drop_last: bool = True,
        seed: int = 0,
    ) -> None:
        super().__init__(rows, shuffle=shuffle, seed=seed, batch_size=batch_size if drop_last else None)
        self.name, self.reward = name, reward

    async def run(self, episode: Episode) -> float:
        """Ask once."""
        answer = await episode.chat(conversation(episode.row))
        return await episode.score(self.reward, answer.text)


def rows_of(path: str, *, name: str | None, split: str) -> Sequence[Row]:
    """Rows of a local file or folder, or of the Hub.

    Raises:
        DataError: naming the argument of the agent.
    """
    return load_rows(TrainDatasetConfig(path=path, name=name, split=split), seed=0, asker=Asker("agent_args"))
