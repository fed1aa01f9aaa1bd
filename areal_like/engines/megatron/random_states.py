"""Random numbers of one engine, kept apart from those of other engines in the same process.

Megatron-Core keeps the states that dropout draws from in one tracker for the whole process. A second engine, of another
layout and seed, would restart the first one's and take turns with it.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any

import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker, model_parallel_cuda_manual_seed

from areal_like.engines.megatron.process_groups import ModelGroups

__all__ = ["RandomStates"]


class RandomStates:
    """Inside `with`, the engine's own states; outside, what was there before. May be nested."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.own: dict[str, Any] | None = None
        """As `capture` gives them; None before the first use. A checkpoint holds them, and replaces them."""
        self._outer: dict[str, Any] = {}
        self._depth = 0

    def seed(self, seed: int, groups: ModelGroups) -> None:
        """Start anew: tensor- and expert-parallel ranks draw differently where they hold different parts, and stages
        draw differently (Megatron-LM's offset of 100 a stage)."""
        here = groups.mesh.coordinates(groups.rank)
        seed += 100 * here.pp
        torch.manual_seed(seed)
        model_parallel_cuda_manual_seed(seed, tp_rank=here.tp, ep_rank=here.ep, etp_rank=here.etp)

    def capture(self) -> dict[str, Any]:
        """The states that are in force: torch's for the CPU and the GPU, and Megatron's by name."""
        found: dict[str, Any] = {"cpu": torch.get_rng_state(), "tracker": get_cuda_rng_tracker().get_states()}
        if self.device.type == "cuda":
            found["cuda"] = torch.cuda.get_rng_state(self.device)
        return found

    def _apply(self, states: dict[str, Any]) -> None:
        torch.set_rng_state(states["cpu"])
        get_cuda_rng_tracker().set_states(dict(states["tracker"]))
        if self.device.type == "cuda":
            torch.cuda.set_rng_state(states["cuda"], self.device)

    def __enter__(self) -> RandomStates:
        if self._depth == 0:
            self._outer = self.capture()
            if self.own is not None:
                self._apply(self.own)
        self._depth += 1
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._depth -= 1
        if self._depth == 0:
            self.own = self.capture()
            self._apply(self._outer)
