"""Which devices and how many threads each worker group of a run gets."""

from __future__ import annotations

import os
from dataclasses import dataclass

from areal_like.alloc import Diagnostic, DiagnosticError, ModelAllocation
from areal_like.config import RLConfig
from areal_like.preflight.flow import overlaps

__all__ = ["Placement", "Seat", "place"]


@dataclass(frozen=True)
class Seat:
    """One worker group's share of the machine.

    Attributes:
        allocation: without "*".
        threads: computing threads of each rank.
        gpu_offset: number of its first GPU.
    """

    allocation: ModelAllocation
    threads: int
    gpu_offset: int = 0


@dataclass(frozen=True)
class Placement:
    """The whole run on this machine; `reference` is None when the run has none."""

    device: str
    actor: Seat
    rollout: Seat
    reference: Seat | None
    reward_workers: int


def place(config: RLConfig, *, cores: int | None = None, gpus: int | None = None) -> Placement:
    """Share the machine out.

    GPUs: actor and rollout stand side by side where the machine has room for both, else they share the GPUs from 0 on.
    The reference shares the actor's. CPU: while generation and training take turns (B/B with lag 0) each
    has all cores, else half of them; a group divides its cores by its ranks. "*" fills the GPUs, or the cores.

    Args:
        cores: CPU cores that the run may use; by default those that this process may.
        gpus: GPUs of the machine; by default what torch sees.

    Raises:
        DiagnosticError: no GPU for device cuda, or fewer than a layout needs.
    """
    cores = _usable_cores() if cores is None else cores
    gpus = _visible_gpus(config) if gpus is None else gpus
    device = "cuda" if config.device == "cuda" or (config.device == "auto" and gpus > 0) else "cpu"
    if device == "cuda" and gpus == 0:
        raise _error(config, "AL402", "device", "device is cuda and torch sees no GPU", "set device: cpu, or auto")
    devices = gpus if device == "cuda" else cores
    rollout = ModelAllocation.parse(config.rollout.backend)
    actor = ModelAllocation.parse(config.actor.backend)
    taken = 0 if rollout.data_parallel_size is None or rollout.world_size >= devices else rollout.world_size
    actor = actor.resolve(devices - (taken if device == "cuda" else 0))
    rollout = rollout.resolve(
        devices - actor.world_size if device == "cuda" and devices > actor.world_size else devices
    )
    uses_reference = config.actor.kl_ctl > 0 and config.ref is not None
    reference = ModelAllocation.parse(config.ref.backend).resolve(devices) if uses_reference and config.ref else None
    if device == "cuda":
        for key, allocation in (("actor", actor), ("rollout", rollout), ("ref", reference)):
            if allocation is not None and allocation.world_size > gpus:
                message = f"{allocation} needs {allocation.world_size} GPUs; torch sees {gpus}"
                raise _error(config, "AL401", f"{key}.backend", message, "lower the layout")
    share = max(1, cores // 2) if overlaps(config, rollout.dp) else cores
    offset = actor.world_size if device == "cuda" and actor.world_size + rollout.world_size <= gpus else 0
    return Placement(
        device,
        actor=Seat(actor, _threads(share, actor)),
        rollout=Seat(rollout, _threads(share, rollout), offset),
        reference=None if reference is None else Seat(reference, _threads(share, reference)),
        reward_workers=min(8, max(1, cores // 4)),
    )


def _usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _threads(cores: int, allocation: ModelAllocation) -> int:
    return max(1, cores // allocation.world_size)


def _visible_gpus(config: RLConfig) -> int:
    if config.device == "cpu":
        return 0
    import torch

    return min(torch.cuda.device_count(), config.cluster.n_gpus_per_node)


def _error(config: RLConfig, code: str, key: str, message: str, help: str) -> DiagnosticError:
    at = config.location(key)
    finding = Diagnostic(code, "error", message, key=key, file=at.file, line=at.line, column=at.column, help=help)
    return DiagnosticError([finding])
