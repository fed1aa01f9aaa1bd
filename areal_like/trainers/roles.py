"""The models of reinforcement learning: algorithms over a worker group of TrainEngines."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from torch import Tensor

from areal_like.algorithms import GRPOLoss
from areal_like.alloc import get_backend
from areal_like.config import ActorConfig, TrainEngineConfig
from areal_like.data.batch import PackedBatch
from areal_like.engines.base import WeightBucket
from areal_like.preflight.offloading import Offload
from areal_like.runtime.determinism import deterministic_environment
from areal_like.runtime.dispatch import scatter
from areal_like.runtime.local import WorkerGroup
from areal_like.spec.packing import balanced_partition
from areal_like.trainers.placement import Seat

__all__ = ["Actor", "Reference"]


class Reference:
    """A model that says how likely tokens are. Its processes start with it; `wait_until_ready` waits for them.

    Before each use it brings the parts that the use needs onto the device; `rest` sends away what `offload` names.

    Args:
        name: the role, for messages and log files.
        config: its section; `path` is a local folder by now.
        total_steps: optimizer steps of the run; None for a model that is not trained.
        offload: what leaves the device between uses; nothing when None.
    """

    def __init__(
        self,
        name: str,
        config: TrainEngineConfig,
        seat: Seat,
        *,
        device: str,
        seed: int,
        log_dir: Path,
        total_steps: int | None = None,
        offload: Offload | None = None,
    ) -> None:
        self.offload = offload or Offload()
        self.mesh = seat.allocation.mesh()
        self.workers = WorkerGroup.start(
            name,
            get_backend(seat.allocation.backend).engine,
            {
                "allocation": seat.allocation,
                "config": _traces_into(log_dir.parent / "profile", name, config),
                "device": device,
                "seed": seed,
                "total_steps": total_steps,
            },
            seat.allocation.world_size,
            device,
            seat.threads,
            seat.gpu_offset,
            log_dir=log_dir,
            environment=deterministic_environment() if config.megatron.use_deterministic_algorithms else None,
            wait=False,
        )
        self._starting = self.workers.submit("initialize")

    def wait_until_ready(self, timeout: float) -> None:
        """Return when every rank holds its part of the model.

        Raises:
            WorkerError, DiagnosticError, TimeoutError: it does not come to that.
        """
        self._starting.result(timeout)

    def rest(self) -> None:
        """The model is not needed for a while: free what the configuration lets go."""
        self._send_away(self.offload)

    def log_probs(self, batch: PackedBatch, temperature: float) -> Tensor:
        """Log-probability of each token, `[tokens]`, as `TokenOutputs.log_probs`."""
        self._bring(Offload(parameters=True))
        dispatch = scatter(PackedBatch(batch.input_ids, batch.cu_seqlens), self.mesh)
        per_rank = [(shard,) for shard in dispatch.shards]
        outputs = self.workers.call_each("forward", per_rank, temperature=temperature)
        log_probs: Tensor = dispatch.collect([output.log_probs for output in outputs])
        return log_probs

    def _bring(self, needed: Offload) -> None:
        """Have these parts on the device. Nothing is sent where the configuration never offloads them."""
        if parts := self._both(needed):
            self.workers.call("onload", **parts)

    def _send_away(self, unneeded: Offload) -> None:
        if parts := self._both(unneeded):
            self.workers.call("offload", **parts)

    def _both(self, parts: Offload) -> dict[str, bool]:
        ours = {name: chosen and getattr(self.offload, name) for name, chosen in vars(parts).items()}
        return ours if any(ours.values()) else {}


class Actor(Reference):
    """The policy that is trained."""

    @staticmethod
    def minibatches(batch: PackedBatch, count: int) -> list[PackedBatch]:
        """Cut a batch into `count` parts of whole sequences with about equal numbers of tokens."""
        return [batch.select(part) for part in balanced_partition(batch.lengths, count)]

    def update(self, batch: PackedBatch, loss: GRPOLoss, config: ActorConfig) -> dict[str, float]:
        """`update_iterations` times `ppo_n_minibatches` optimizer steps over the batch; figures averaged over them."""
        self._bring(Offload(parameters=True, gradients=True, optimizer=True))
        steps = []
        minibatches = self.minibatches(batch, config.ppo_n_minibatches)
        for minibatch in minibatches * config.update_iterations:
            shards = scatter(minibatch, self.mesh).shards
            steps.append(self.workers.call_each("train_batch", [(shard, loss) for shard in shards])[0])
        self._send_away(Offload(gradients=True, optimizer=True))
        return {name: sum(step[name] for step in steps) / len(steps) for name in steps[0]}

    def weights(self, *, adapters_only: bool = False) -> Iterator[WeightBucket]:
        """All weights under their Hugging Face names, adapters merged into them, or the adapters; bucket by bucket."""
        self._bring(Offload(parameters=True))
        return self.workers.stream("adapter_weights" if adapters_only else "weights")

    def save(self, folder: Path) -> None:
        """Write a Hugging Face folder; it appears whole or not at all."""
        self._bring(Offload(parameters=True))
        self.workers.call("save", str(folder))

    def save_checkpoint(self, folder: Path, step: int) -> None:
        """Write a recovery checkpoint, or begin to with `async_save`: `finish_checkpoint` completes it."""
        self._bring(Offload(parameters=True, optimizer=True))
        self.workers.call("save_checkpoint", str(folder), step=step)

    def finish_checkpoint(self, *, wait: bool) -> bool:
        """Complete a checkpoint that is being written; whether none is left."""
        return all(self.workers.call("finish_checkpoint", wait=wait))

    def load_checkpoint(self, folder: Path) -> int:
        """Go on from a checkpoint; its step."""
        self._bring(Offload(parameters=True, optimizer=True))
        step: int = self.workers.call("load_checkpoint", str(folder))[0]
        return step

    def save_adapter(self, folder: Path) -> None:
        """Write a PEFT folder; it appears whole or not at all."""
        self._bring(Offload(parameters=True))
        self.workers.call("save_adapter", str(folder))


def _traces_into(folder: Path, name: str, config: TrainEngineConfig) -> TrainEngineConfig:
    """The section with the folder of its traces: one a role, in that of the run unless the file names another."""
    if config.profiler is None:
        return config
    chosen = Path(config.profiler.save_path or folder) / name
    return config.model_copy(update={"profiler": config.profiler.model_copy(update={"save_path": str(chosen)})})
