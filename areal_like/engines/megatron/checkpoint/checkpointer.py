"""`Checkpointer`: saves and loads what one engine needs to go on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing

from areal_like.config import TrainEngineConfig
from areal_like.engines.megatron.checkpoint.counters import load_counters, read_counters
from areal_like.engines.megatron.checkpoint.model_state import load_model, parameter_shards, sharded_model, stored_in
from areal_like.engines.megatron.checkpoint.optimizer_state import gathered, load_tensors, requested
from areal_like.engines.megatron.checkpoint.random_state import go_on, sharded_random, start_anew
from areal_like.engines.megatron.checkpoint.writer import Writing
from areal_like.engines.megatron.process_groups import ModelGroups
from areal_like.engines.megatron.random_states import RandomStates
from areal_like.spec import ModelSpec
from areal_like.spec.checkpoint import CheckpointFault, Manifest, checkpoint_identity, differences, read_manifest

__all__ = ["Checkpointer"]


class Checkpointer:
    """The recovery checkpoints of one model and its optimizer. Every method is collective over the model's ranks.

    Args:
        chunks: the model chunks of this rank, without the wrapper of data parallelism.
        config: the model's section; `config.path` is a local folder by now.
        layout: allocation string.
        seed: of the run.
    """

    def __init__(
        self,
        chunks: list[torch.nn.Module],
        optimizer: Any,
        schedule: Any,
        groups: ModelGroups,
        random: RandomStates,
        config: TrainEngineConfig,
        *,
        layout: str,
        seed: int,
    ) -> None:
        self._chunks, self._optimizer, self._schedule, self._groups = chunks, optimizer, schedule, groups
        self._random, self._layout, self._seed = random, layout, seed
        self._identity = checkpoint_identity(ModelSpec.from_path(config.path), config)
        self._beside = config.megatron.async_save
        self._schedule_of_checkpoint = config.megatron.use_checkpoint_opt_param_scheduler
        self._pending: tuple[Writing, int, dict[str, Any]] | None = None

    def save(self, folder: Path, step: int) -> None:
        """Write a checkpoint into `folder`; in the background, when that was asked for: `finish` completes it.

        Raises:
            OSError: this one, or one that was still being written, could not be written; nothing of it is left.
        """
        self.finish()
        counters = read_counters(self._optimizer, self._schedule)
        model = sharded_model(self._chunks, self._groups)
        state = {
            "optimizer": gathered(self._optimizer, parameter_shards(model)),
            "random": sharded_random(self._groups, self._random),
            **model,
        }
        self._pending = (Writing(folder, state, beside=self._beside), step, counters)
        if not self._beside:
            self.finish()

    def finish(self, *, wait: bool = True) -> bool:
        """Complete the checkpoint that is being written, if there is one.

        Args:
            wait: for the files; otherwise do nothing while a rank still writes.

        Returns:
            Whether none is being written any more.

        Raises:
            OSError: it could not be written; nothing of it is left.
        """
        if self._pending is None:
            return True
        writing, step, counters = self._pending
        if not wait and not _all_ranks(writing.written):
            return False
        self._pending = None

        def describe(folder: Path) -> None:
            Manifest.describe(folder, step=step, layout=self._layout, model=self._identity, counters=counters).write(
                folder
            )

        writing.finish(describe)
        return True

    def load(self, folder: Path) -> int:
        """Take up the state of a checkpoint, whatever layout wrote it; the step it was saved with.

        Raises:
            CheckpointFault: it is torn, or of another model. Nothing is changed then.
        """
        self.finish()
        manifest = self._manifest(folder)
        model = stored_in(folder, sharded_model(self._chunks, self._groups))
        state: dict[str, Any] = {"optimizer": requested(self._optimizer, parameter_shards(model)), **model}
        same_layout = manifest.layout == self._layout
        if same_layout:
            state["random"] = sharded_random(self._groups)
        loaded = dist_checkpointing.load(state, str(folder))
        load_model(self._chunks, loaded)
        load_tensors(self._optimizer, loaded["optimizer"])
        load_counters(
            self._optimizer,
            self._schedule,
            manifest.counters,
            schedule_of_checkpoint=self._schedule_of_checkpoint,
        )
        if not (same_layout and go_on(self._random, loaded["random"])):
            start_anew(self._random, self._groups, self._seed, manifest.step)
        return manifest.step

    def _manifest(self, folder: Path) -> Manifest:
        """Read and compare on rank 0 alone: a thousand ranks must not ask for the sizes of a thousand files each."""
        box: list[Any] = [None]
        if dist.get_rank() == 0:
            try:
                manifest = read_manifest(folder)
                if found := differences(manifest.model, self._identity):
                    raise CheckpointFault(f"{folder} is of another model: {'; '.join(found)}")
                box = [manifest]
            except CheckpointFault as fault:
                box = [str(fault)]
        dist.broadcast_object_list(box, src=0)
        if isinstance(box[0], str):
            raise CheckpointFault(box[0])
        return box[0]


def _all_ranks(value: bool) -> bool:
    everywhere = torch.tensor(int(value))
    dist.all_reduce(everywhere, op=dist.ReduceOp.MIN)
    return bool(everywhere)
