"""What a rule looks at: roles with their layouts and models, the cluster, and the configuration."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from areal_like.alloc import AllocationError, BackendDescriptor, ModelAllocation, get_backend
from areal_like.config import RLConfig
from areal_like.config.repair import UNKNOWN
from areal_like.spec import ModelSpec, ModelSpecError

__all__ = ["ROLES", "Cluster", "Job", "Role", "make_job"]

GIB = 2**30
ROLES = ("rollout", "actor", "critic", "ref")


@dataclass(frozen=True)
class Cluster:
    """Machines of one kind; sizes in bytes.

    Attributes:
        host_memory_bytes: of a node; None when it is not known.
        memory_is_known: somebody said how much memory a GPU has; if not, `gpu_memory_bytes` is an assumption.
    """

    nodes: int = 1
    gpus_per_node: int = 8
    gpu_memory_bytes: int = 80 * GIB
    host_memory_bytes: int | None = None
    memory_is_known: bool = False

    @property
    def gpus(self) -> int:
        return self.nodes * self.gpus_per_node


@dataclass(frozen=True)
class Role:
    """One model of the job.

    Attributes:
        name: "rollout", "actor", "critic" or "ref".
        allocation: its layout; where d is "*", that of the GPUs present, or one replica when that is not known.
        source: the allocation as the user wrote it.
        spec: the model's numbers; None when they are not known here.
        path: where the model is.
        problem: why the numbers cannot be read; None when they were, or when the model is not here.
        unresolved: why "*" cannot be filled.
        section: its section of the configuration; None for a layout that is checked alone.
    """

    name: str
    allocation: ModelAllocation
    source: str
    spec: ModelSpec | None = None
    path: str = ""
    problem: str | None = None
    unresolved: AllocationError | None = None
    section: Any = None

    @property
    def key(self) -> str:
        return f"{self.name}.backend"

    @property
    def trains(self) -> bool:
        """Held by a training engine, whether or not it is trained."""
        return self.name != "rollout"

    @property
    def backend(self) -> BackendDescriptor:
        return get_backend(self.allocation.backend)


@dataclass(frozen=True)
class Job:
    """All that is known before a run.

    Attributes:
        roles: those whose allocation could be read.
        config: None for a layout that is checked alone.
        on_gpus: every rank has a GPU: the configuration says so, or says how many there are.
    """

    roles: tuple[Role, ...]
    config: RLConfig | None = None
    cluster: Cluster = Cluster()
    on_gpus: bool = False

    def role(self, name: str) -> Role | None:
        return next((role for role in self.roles if role.name == name), None)

    @cached_property
    def training(self) -> tuple[Role, ...]:
        return tuple(role for role in self.roles if role.trains)

    def running(self) -> Iterator[Role]:
        """Roles that have processes: a reference has none while its divergence weighs nothing."""
        for role in self.roles:
            if role.name != "ref" or (self.config is not None and self.config.actor.kl_ctl > 0):
                yield role

    def with_allocation(self, name: str, allocation: ModelAllocation) -> Job:
        """The same job with another layout of one role."""
        roles = tuple(replace(r, allocation=allocation, unresolved=None) if r.name == name else r for r in self.roles)
        return replace(self, roles=roles)


def make_job(
    config: RLConfig, *, spec: ModelSpec | None = None, cluster: Cluster | None = None, on_gpus: bool | None = None
) -> Job:
    """The job of a configuration.

    Args:
        spec: numbers to take for every model instead of those at its path.
        cluster: instead of what the section `cluster` says.
        on_gpus: whether ranks have GPUs; by default as `device` and the section `cluster` say.
    """
    if on_gpus is None:
        stated = "n_gpus_per_node" in config.cluster.model_fields_set
        on_gpus = config.device == "cuda" or (config.device == "auto" and stated)
    if cluster is None:
        cluster = Cluster(config.cluster.n_nodes, config.cluster.n_gpus_per_node)
    specs = _Specs(spec)
    roles = [role for name in ROLES if (role := _role(config, name, specs)) is not None]
    return Job(_filled(roles, cluster.gpus if on_gpus else None), config, cluster, on_gpus)


class _Specs:
    """Reads each model once."""

    def __init__(self, given: ModelSpec | None) -> None:
        self.given = given
        self.known: dict[str, tuple[ModelSpec | None, str | None]] = {}

    def read(self, path: str) -> tuple[ModelSpec | None, str | None]:
        if self.given is not None:
            return self.given, None
        if path not in self.known:
            self.known[path] = _read(path)
        return self.known[path]


def _read(path: str) -> tuple[ModelSpec | None, str | None]:
    """The numbers of a model, else why a local one has none."""
    bundled = ModelSpec.bundled(path)
    if bundled is not None:
        return bundled, None
    try:
        if not path.startswith((".", "/", "~")) and not Path(path).exists():
            return None, None
        return ModelSpec.from_path(Path(path).expanduser()), None
    except ModelSpecError as error:
        return None, str(error)
    except (OSError, ValueError, RuntimeError) as error:  # no such user, a name too long, a null byte
        return None, f"{path!r} is not a usable path: {error}"


def _role(config: RLConfig, name: str, specs: _Specs) -> Role | None:
    """None for a role that the job does not have or whose allocation is itself faulty, which loading reports."""
    section = getattr(config, name)
    if section is None or not section.backend or section.backend == UNKNOWN:
        return None
    path = config.actor.path if name == "rollout" else section.path
    try:
        allocation = ModelAllocation.parse(section.backend)
    except AllocationError:
        return None
    if (allocation.descriptor.role == "train") == (name == "rollout"):
        return None
    spec, problem = (None, None) if path == UNKNOWN else specs.read(path)
    return Role(name, allocation, section.backend, spec, path, problem, None, section)


def _filled(roles: list[Role], gpus: int | None) -> tuple[Role, ...]:
    """Replace "*": the actor takes what a rollout engine of known size leaves of the GPUs, as `place` does it."""
    fixed = {r.name: r.allocation.world_size for r in roles if r.allocation.data_parallel_size is not None}
    filled = []
    for role in roles:
        if role.allocation.data_parallel_size is not None:
            filled.append(role)
            continue
        other = fixed.get({"actor": "rollout", "rollout": "actor"}.get(role.name, ""), 0)
        share = None if gpus is None else gpus - other if other < gpus else gpus
        filled.append(_fill(role, share))
    return tuple(filled)


def _fill(role: Role, gpus: int | None) -> Role:
    allocation = role.allocation
    try:
        if gpus is not None:
            return replace(role, allocation=allocation.resolve(gpus))
        problem = None
    except AllocationError as error:
        problem = error
    replica = allocation.tp * allocation.pp * allocation.cp
    for replicas in range(1, allocation.ep * allocation.etp + 1):  # as many as the experts need
        try:
            return replace(role, allocation=allocation.resolve(replica * replicas), unresolved=problem)
        except AllocationError:
            continue
    return replace(role, allocation=allocation.model_copy(update={"data_parallel_size": 1}), unresolved=problem)
