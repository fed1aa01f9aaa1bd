"""Batches of rows in a reproducible order that can be taken up again in the middle of an epoch."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

from areal_like.data.rows import Row


class RowLoader:
    """Endless batches over `rows`: epoch after epoch, each in its own order.

    The order of an epoch depends on `seed` and the epoch's number alone, so `state()` is two numbers. A batch never
    crosses an epoch. With `drop_last`, a last batch that is not full is left out.

    Raises:
        ValueError: no rows, or (with `drop_last`) fewer rows than one batch: there would be no batch at all.
    """

    def __init__(
        self, rows: Sequence[Row], *, batch_size: int, shuffle: bool = True, drop_last: bool = True, seed: int = 0
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size is {batch_size}; it is at least 1")
        if not rows:
            raise ValueError("there are no rows")
        if drop_last and len(rows) < batch_size:
            raise ValueError(
                f"batch_size is {batch_size} but there are {len(rows)} rows: with drop_last every epoch would be "
                "empty; make the batch smaller or set drop_last to false"
            )
        self.rows, self.batch_size, self.shuffle, self.drop_last, self.seed = rows, batch_size, shuffle, drop_last, seed
        self.epoch, self.position = 0, 0
        self._order = self._draw_order()

    @property
    def batches_per_epoch(self) -> int:
        full, rest = divmod(len(self.rows), self.batch_size)
        return full + (1 if rest and not self.drop_last else 0)

    def next_batch(self) -> list[Row]:
        """The next batch; after the last of an epoch comes the first of the following one."""
        if self.position == self.batches_per_epoch:
            self.epoch, self.position = self.epoch + 1, 0
            self._order = self._draw_order()
        start = self.position * self.batch_size
        self.position += 1
        return [self.rows[i] for i in self._order[start : start + self.batch_size]]

    def one_epoch(self) -> Iterator[list[Row]]:
        """The batches that are left of this epoch."""
        epoch = self.epoch if self.position < self.batches_per_epoch else self.epoch + 1
        while self.epoch < epoch or self.position < self.batches_per_epoch:
            yield self.next_batch()

    def state(self) -> dict[str, int]:
        """Where the next batch stands. `rows`, `batch_size` and `seed` tell whether it is still the same sequence."""
        return {
            "epoch": self.epoch,
            "position": self.position,
            "rows": len(self.rows),
            "batch_size": self.batch_size,
            "seed": self.seed,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on where `state()` was taken.

        Raises:
            ValueError: it was taken of other rows, another batch size or another seed.
        """
        own = self.state()
        for name in ("rows", "batch_size", "seed"):
            if state[name] != own[name]:
                raise ValueError(
                    f"the saved position is of a loader with {name} {state[name]}; this one has {own[name]}"
                )
        if not (state["epoch"] >= 0 and 0 <= state["position"] <= self.batches_per_epoch):
            raise ValueError(f"epoch {state['epoch']}, position {state['position']} is not a place in this loader")
        self.epoch, self.position = state["epoch"], state["position"]
        self._order = self._draw_order()

    def _draw_order(self) -> list[int]:
        return epoch_order(len(self.rows), self.epoch, shuffle=self.shuffle, seed=self.seed)


def epoch_order(rows: int, epoch: int, *, shuffle: bool, seed: int) -> list[int]:
    """Numbers of the rows in the order of an epoch."""
    order = list(range(rows))
    if shuffle:
        random.Random(f"{seed}/{epoch}").shuffle(order)
    return order
