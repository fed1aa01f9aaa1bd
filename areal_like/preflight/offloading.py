"""What of a model leaves its device between its uses."""

from __future__ import annotations

from dataclasses import dataclass

from areal_like.config import RLConfig, TrainEngineConfig

__all__ = ["Offload", "offload_of"]


@dataclass(frozen=True)
class Offload:
    """The parts that go; see `engines.base.TrainEngine.offload`."""

    parameters: bool = False
    gradients: bool = False
    optimizer: bool = False

    @property
    def any(self) -> bool:
        return self.parameters or self.gradients or self.optimizer


def offload_of(config: RLConfig, section: TrainEngineConfig) -> Offload:
    """The parts of one model of a run: by its own switches, or all of them by `enable_offload`.

    A model without an optimizer has parameters alone.
    """
    own = section.megatron
    trained, everything = section.optimizer is not None, config.enable_offload
    return Offload(
        parameters=everything or own.param_offload,
        gradients=trained and (everything or own.grad_offload),
        optimizer=trained and (everything or own.optimizer_offload),
    )
