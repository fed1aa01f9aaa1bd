"""What a loss reads of an engine's answer, stated here because algorithms know no engine."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class TokenOutputsLike(Protocol):
    """`engines.base.TokenOutputs` as a loss sees it: log-probabilities and, if asked for, entropy, `[tokens]` each."""

    @property
    def log_probs(self) -> Tensor: ...

    @property
    def entropy(self) -> Tensor | None: ...
