"""All rules over one job; all findings at once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from areal_like.alloc import Diagnostic, ModelAllocation, get_backend
from areal_like.config import RLConfig
from areal_like.preflight.model_rules import RULES
from areal_like.spec import ModelSpec, ModelSpecError

__all__ = ["check", "check_layout"]

_TRAIN_ROLES = ("actor", "ref", "critic")


def check_layout(allocation: ModelAllocation, spec: ModelSpec) -> list[Diagnostic]:
    """Whether this version can train this model under this layout; empty when it can."""
    source = str(allocation)
    problems = [problem for rule in RULES for problem in rule(allocation, spec)]
    return [Diagnostic(p.code, "error", p.message, source=source, help=p.help) for p in problems]


def check(config: RLConfig) -> tuple[Diagnostic, ...]:
    """Everything that is known to stop the job, before any process starts.

    A model that is neither a local folder nor one of the bundled specs is reported as unchecked (info): its numbers
    become known when it is fetched, and `check_layout` is run again then.
    """
    found: list[Diagnostic] = []
    for role in _TRAIN_ROLES:
        section = getattr(config, role)
        if section is None or not section.backend:
            continue
        allocation = ModelAllocation.parse(section.backend)
        place = _Place(config, f"{role}.backend")
        found += place.put(_engine(allocation))
        spec, problem = _spec(section.path)
        if problem is not None:
            found += _Place(config, f"{role}.path").put([problem])
        if spec is not None and allocation.data_parallel_size is not None:
            found += place.put(check_layout(allocation, spec))
        found += place.put(_settings(allocation, spec, section.megatron.moe_token_dispatcher_type))
    rollout = ModelAllocation.parse(config.rollout.backend)
    found += _Place(config, "rollout.backend").put(_engine(rollout))
    found += _gpus(config, rollout)
    found += _queue(config)
    return tuple(found)


class _Place:
    """Adds to a finding where in the YAML it belongs."""

    def __init__(self, config: RLConfig, key: str) -> None:
        self.key = key
        self.location = config.location(key)

    def put(self, found: list[Diagnostic]) -> list[Diagnostic]:
        where = self.location
        if where is None:
            return [replace(d, key=self.key) for d in found]
        return [replace(d, key=self.key, file=where.file, line=where.line, column=where.column) for d in found]


def _engine(allocation: ModelAllocation) -> list[Diagnostic]:
    """Whether the backend's descriptor names an engine at all (importing it may need a GPU machine's packages)."""
    backend = get_backend(allocation.backend)
    if backend.engine:
        return []
    message = f"backend {backend.name!r} is declared but has no engine in this version"
    other = "megatron" if backend.role == "train" else "huggingface"
    return [Diagnostic("AL205", "error", message, source=str(allocation), help=f"use {other}")]


def _spec(path: str) -> tuple[ModelSpec | None, Diagnostic | None]:
    bundled = ModelSpec.bundled(path)
    if bundled is not None:
        return bundled, None
    looks_local = path.startswith((".", "/", "~")) or Path(path).exists()
    if not looks_local:
        message = f"the numbers of {path!r} are not known here: its layout is checked when the model is fetched"
        return None, Diagnostic("AL310", "info", message)
    try:
        return ModelSpec.from_path(Path(path).expanduser()), None
    except ModelSpecError as error:
        return None, Diagnostic("AL311", "error", str(error), help="give a Hugging Face folder with a config.json")


def _settings(allocation: ModelAllocation, spec: ModelSpec | None, dispatcher: str) -> list[Diagnostic]:
    if allocation.backend != "megatron" or spec is None or not spec.is_moe or dispatcher == "alltoall":
        return []
    message = f"moe_token_dispatcher_type {dispatcher!r} cannot route packed sequences of unequal length"
    return [Diagnostic("AL212", "error", message, help="use alltoall")]


def _queue(config: RLConfig) -> list[Diagnostic]:
    """Admitted groups must reach a whole batch, or the trainer waits for ever."""
    batch = config.rollout.consumer_batch_size or config.train_dataset.batch_size
    size = config.rollout.queue_size
    if size is None or size >= batch:
        return []
    message = f"queue_size {size} holds less than the batch of {batch} prompts that an update takes"
    finding = Diagnostic("AL501", "error", message, help=f"use at least {batch}, or null for no limit")
    return _Place(config, "rollout.queue_size").put([finding])


def _gpus(config: RLConfig, rollout: ModelAllocation) -> list[Diagnostic]:
    """On one machine every rank of a GPU job has a GPU of its own."""
    if config.device != "cuda":
        return []
    present = config.cluster.n_nodes * config.cluster.n_gpus_per_node
    worlds = {"rollout": rollout}
    for role in _TRAIN_ROLES:
        section = getattr(config, role)
        if section is not None and section.backend:
            worlds[role] = ModelAllocation.parse(section.backend)
    found = []
    for role, allocation in worlds.items():
        if allocation.data_parallel_size is not None and allocation.world_size > present:
            message = f"{allocation} needs {allocation.world_size} GPUs; the cluster has {present}"
            help_text = "lower the layout, or raise cluster.n_nodes or cluster.n_gpus_per_node"
            finding = Diagnostic("AL401", "error", message, source=str(allocation), help=help_text)
            found += _Place(config, f"{role}.backend").put([finding])
    return found
