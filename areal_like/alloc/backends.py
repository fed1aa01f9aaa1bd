"""What a backend is to the language: a name, a role, the letters it takes, what it can do, and where its engine is.

The six descriptors below are declared in `pyproject.toml` under the entry-point group `areal_like.backends`, exactly as
a third party declares its own; `registry` finds them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from areal_like.alloc.diagnostics import AllocationError, Diagnostic, Span

__all__ = ["LETTERS", "BackendDescriptor", "Capabilities", "Role"]

Role = Literal["train", "inference"]

LETTERS: dict[str, str] = {
    "d": "data",
    "t": "tensor",
    "p": "pipeline",
    "c": "context",
    "e": "expert",
    "v": "virtual pipeline",
}
"""The letters of the language in canonical order, with the parallelism each stands for."""


@dataclass(frozen=True)
class Capabilities:
    """What a backend's engine can do in this version; the check refuses a job that asks for more.

    Attributes:
        lora: trains or serves LoRA adapters.
        fp8: computes in FP8.
        packing: takes sequences packed without padding.
        colocation: gives its device memory back on `offload`, so that another role can use the same devices.
        weight_transports: ways in which weights reach or leave it; "stream" is buckets of Hugging Face tensors.
        devices: "cuda", "cpu".
    """

    lora: bool = False
    fp8: bool = False
    packing: bool = False
    colocation: bool = False
    weight_transports: frozenset[str] = frozenset()
    devices: frozenset[str] = frozenset()


@dataclass(frozen=True)
class BackendDescriptor:
    """One backend.

    Attributes:
        name: as written in an allocation string; an identifier.
        role: "train" or "inference".
        letters: the letters it takes, a subset of `LETTERS`. With `e` it also takes the folded form.
        capabilities: what its engine can do.
        engine: import path `module:Class`; empty when this version declares the backend without an engine.
    """

    name: str
    role: Role
    letters: str
    capabilities: Capabilities = Capabilities()
    engine: str = ""

    def __post_init__(self) -> None:
        if not (self.name.isascii() and self.name.isidentifier()):
            raise ValueError(f"a backend's name is an ASCII identifier, not {self.name!r}")
        if unknown := set(self.letters) - set(LETTERS):
            raise ValueError(f"backend {self.name} lists unknown letters {sorted(unknown)}; there are {list(LETTERS)}")
        if self.role not in ("train", "inference"):
            raise ValueError(f"backend {self.name} has role {self.role!r}; there are 'train' and 'inference'")

    @property
    def has_experts(self) -> bool:
        """Takes `e` and the folded form."""
        return "e" in self.letters

    def require_role(self, role: Role, *, source: str | None = None, key: str | None = None) -> None:
        """Refuse (AL207) a backend of the other role, for example a server as the trainer."""
        if self.role != role:
            verb = {"train": "trains", "inference": "generates"}
            message = f"backend {self.name} {verb[self.role]}; a backend that {verb[role]} is needed here"
            start = -1 if source is None else source.find(self.name)
            span = Span(start, start + len(self.name)) if start >= 0 else None
            raise AllocationError([Diagnostic("AL207", "error", message, span, source, key=key)])

    def load_engine(self) -> type[Any]:
        """Import the engine class.

        Raises:
            AllocationError: AL205 when this version has no engine for the backend, AL206 when it cannot be imported.
        """
        if not self.engine:
            message = f"backend {self.name} is declared, but this version has no engine for it"
            hint = "its layouts can be parsed and checked; to run, choose a backend that has an engine"
            raise AllocationError([Diagnostic("AL205", "error", message, help=hint)])
        from importlib import import_module

        module, _, attribute = self.engine.partition(":")
        try:
            engine: type[Any] = getattr(import_module(module), attribute)
        except Exception as error:  # whatever the module of a third party raises
            message = f"the engine {self.engine} of backend {self.name} cannot be imported: {error!r}"
            raise AllocationError([Diagnostic("AL206", "error", message)]) from error
        return engine


MEGATRON = BackendDescriptor(
    name="megatron",
    role="train",
    letters="dtpcev",
    capabilities=Capabilities(
        lora=True,
        packing=True,
        colocation=True,
        weight_transports=frozenset({"stream"}),
        devices=frozenset({"cpu", "cuda"}),
    ),
    engine="areal_like.engines.megatron.engine:MegatronEngine",
)
HUGGINGFACE = BackendDescriptor(
    name="huggingface",
    role="inference",
    letters="d",
    capabilities=Capabilities(lora=True, weight_transports=frozenset({"stream"}), devices=frozenset({"cpu", "cuda"})),
    engine="areal_like.engines.huggingface.engine:HuggingFaceEngine",
)

# Declared, so that layouts for them parse; no engine yet, hence no capability.
FSDP = BackendDescriptor(name="fsdp", role="train", letters="dtc")
ARCHON = BackendDescriptor(name="archon", role="train", letters="dtpce")
SGLANG = BackendDescriptor(name="sglang", role="inference", letters="dtp")
VLLM = BackendDescriptor(name="vllm", role="inference", letters="dtp")
