"""When something is due that happens now and then."""

from __future__ import annotations

import time
from collections.abc import Callable

from areal_like.config import EvaluatorConfig, RecoverConfig, SaverConfig


class Timer:
    """Due after so many epochs, steps or seconds, whichever comes first."""

    def __init__(
        self, config: SaverConfig | EvaluatorConfig | RecoverConfig, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._config = config
        self._clock = clock
        self._last = clock()

    @property
    def active(self) -> bool:
        config = self._config
        return any(value is not None for value in (config.freq_epochs, config.freq_steps, config.freq_secs))

    def due(self, step: int, steps_per_epoch: int) -> bool:
        """Whether it is due after `step` steps (counted from 1); a yes starts the seconds anew."""
        config = self._config
        epoch, rest = divmod(step, steps_per_epoch)
        due = (
            (config.freq_epochs is not None and rest == 0 and epoch % config.freq_epochs == 0)
            or (config.freq_steps is not None and step % config.freq_steps == 0)
            or (config.freq_secs is not None and self._clock() - self._last >= config.freq_secs)
        )
        if due:
            self._last = self._clock()
        return due
