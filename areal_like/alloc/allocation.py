"""`ModelAllocation`: where and how one model runs, as a frozen value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from areal_like.alloc.backends import BackendDescriptor
from areal_like.alloc.diagnostics import AllocationError, Diagnostic, Span
from areal_like.alloc.faults import Fault, diagnose
from areal_like.alloc.fields import FIELDS, write
from areal_like.alloc.layout import Sizes, check
from areal_like.alloc.mesh import Mesh
from areal_like.alloc.recovery import unexpected
from areal_like.alloc.registry import get_backend
from areal_like.alloc.syntax import Draft, draft_of

__all__ = ["ModelAllocation"]


class ModelAllocation(BaseModel):
    """One model's backend and parallel sizes.

    `ModelAllocation.parse("megatron:d4t2p2")` and `ModelAllocation(backend="megatron", data_parallel_size=4, ...)` obey
    the same rules and give equal values. `str()` is the canonical string, which parses back to an equal value.

    Raises:
        AllocationError: with every fault of the input.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    backend: str = Field(description="Name of the backend, as its descriptor declares it.")
    name: str | None = Field(None, description="Name of the model, an identifier; written in square brackets.")
    data_parallel_size: int | None = Field(1, description="d: replicas. None ('*'): as many as the GPUs allow.")
    tensor_parallel_size: int = Field(1, description="t: ranks that share each layer.")
    pipeline_parallel_size: int = Field(
        1, description="p: ranks that share the layers of a replica, one after another."
    )
    context_parallel_size: int = Field(1, description="c: ranks that share each sequence.")
    expert_parallel_size: int = Field(1, description="e: ranks that share the experts of a layer.")
    expert_tensor_parallel_size: int = Field(1, description="ffn t: ranks that share each expert.")
    virtual_pipeline_parallel_size: int = Field(1, description="v: stages a rank holds; 1 is none beyond its own.")

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read an allocation string.

        Raises:
            AllocationError: for anything but a valid string, with all independent faults.
        """
        _check_text(text)
        draft, sizes, faults = _read(text)
        if faults:
            raise AllocationError(diagnose(text, faults, _accepts))
        assert draft.backend is not None  # a draft without faults names its backend
        name = None if draft.name is None else draft.name.text
        # Already checked, by the same `check` as in `_validate`.
        values: dict[str, Any] = dict(zip(FIELDS, (draft.backend.text, name, *sizes), strict=True))
        return cls.model_construct(**values)

    @model_validator(mode="before")
    @classmethod
    def _validate(cls, data: Any) -> Any:
        """Direct construction: write the fields out as a draft and check that."""
        if isinstance(data, cls):
            return data
        if not isinstance(data, Mapping):
            return dict(cls.parse(data))
        draft, values, faults = write(data)
        if not faults:
            check(draft, faults)
        if faults:
            raise AllocationError(diagnose(draft.source, faults, _accepts))
        return values

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """A copy with other fields, validated like a new value."""
        return type(self)(**{**dict(self), **(update or {})})

    def __str__(self) -> str:
        """The canonical string."""
        return write(dict(self))[0].source

    def __repr__(self) -> str:
        return f"{type(self).__name__}.parse({str(self)!r})"

    @property
    def descriptor(self) -> BackendDescriptor:
        """The backend's descriptor."""
        return get_backend(self.backend)

    @property
    def dp(self) -> int:
        """d. AllocationError AL107 while it is '*'."""
        if self.data_parallel_size is None:
            raise self._error(
                "AL107", "d is '*' and not resolved yet", "write a size for d, or resolve it with a number of GPUs"
            )
        return self.data_parallel_size

    @property
    def tp(self) -> int:
        return self.tensor_parallel_size

    @property
    def pp(self) -> int:
        return self.pipeline_parallel_size

    @property
    def cp(self) -> int:
        return self.context_parallel_size

    @property
    def vpp(self) -> int:
        """Virtual pipeline stages a rank holds."""
        return self.virtual_pipeline_parallel_size

    @property
    def ep(self) -> int:
        return self.expert_parallel_size

    @property
    def etp(self) -> int:
        """Expert tensor-parallel size."""
        return self.expert_tensor_parallel_size

    @property
    def edp(self) -> int:
        """Expert data-parallel size, world / (p * etp * ep), whatever ep is."""
        return self.world_size // (self.pp * self.etp * self.ep)

    @property
    def world_size(self) -> int:
        """Number of ranks, d * t * p * c."""
        return self.dp * self.tp * self.pp * self.cp

    def resolve(self, gpus: int) -> Self:
        """The same allocation with '*' replaced: as many replicas as `gpus` hold. Without '*' it is returned as it is.

        Raises:
            AllocationError: AL108 when `gpus` is no multiple of one replica, AL109 when it is not a number of GPUs,
                AL104 or AL106 when the resolved layout is not legal.
        """
        if type(gpus) is not int or gpus < 1:
            raise self._error("AL109", f"{gpus!r} is not a number of GPUs", "give a whole number from 1")
        if self.data_parallel_size is not None:
            return self
        replica = self.tp * self.pp * self.cp
        replicas, left = divmod(gpus, replica)
        if left:
            multiples = [n for n in (replicas * replica, (replicas + 1) * replica) if n]
            message = f"{gpus} GPUs are no multiple of the {replica} of one replica (t{self.tp}·p{self.pp}·c{self.cp})"
            raise self._error("AL108", message, f"use {' or '.join(map(str, multiples))} GPUs, or other sizes")
        return self.model_copy(update={"data_parallel_size": replicas})

    def mesh(self) -> Mesh:
        """Ranks, coordinates and groups. AllocationError AL107 while d is '*'."""
        return Mesh(tp=self.tp, cp=self.cp, dp=self.dp, pp=self.pp, ep=self.ep, etp=self.etp)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON: the canonical string, every field, and the derived sizes (null while d is '*')."""
        known = self.data_parallel_size is not None
        derived = {
            "world_size": self.world_size if known else None,
            "expert_data_parallel_size": self.edp if known else None,
        }
        return {"allocation": str(self), **self.model_dump(), **derived}

    def _error(self, code: str, message: str, hint: str) -> AllocationError:
        source = str(self)
        position = source.find("d*")
        span = Span(position, position + 2) if position >= 0 else Span(0, len(source))
        return AllocationError([Diagnostic(code, "error", message, span=span, source=source, help=hint)])


def _check_text(text: object) -> None:
    if not isinstance(text, str):
        message = f"an allocation is a string, not {type(text).__name__}"
        hint = 'write it in quotes, for example "megatron:d4t2"'
        raise AllocationError([Diagnostic("AL001", "error", message, help=hint)])
    if not text.strip():
        message = "the allocation is empty"
        hint = "write backend, ':' and layout, for example megatron:d4t2"
        raise AllocationError([Diagnostic("AL002", "error", message, span=Span(0, len(text)), source=text, help=hint)])


def _read(text: str) -> tuple[Draft, Sizes, list[Fault]]:
    """The one way from a string to sizes."""
    draft, faults = draft_of(text)
    sizes = check(draft, faults)
    if draft.stopped is not None and not faults:
        faults.append(unexpected(text, draft.stopped))
    return draft, sizes, faults


def _accepts(text: str) -> bool:
    """Whether a string parses."""
    if not text.strip():
        return False
    return not _read(text)[2]
