"""A plan of an export: which bytes of which parameter make which bytes of which Hugging Face tensor.

A bridge takes fused matrices apart with tensor operations, several a tensor, in Python. Where a rank holds whole
tensors none of them computes anything: every byte that leaves is a byte of a parameter. So the bridge is asked once,
with numbers in place of the parameters' values that say which row, and which place in it, each element came from; what
comes out is written down as contiguous pieces, and later streams copy those (`weight_copy`). Nothing here knows the
formats of either bridge.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

import numpy as np
import torch
from torch import Tensor

from areal_like.alloc import Mesh
from areal_like.engines.base import PackedTensors, TensorPlace
from areal_like.engines.megatron.fp8 import is_fp8, readable

__all__ = [
    "Piece",
    "PlanError",
    "PlannedBucket",
    "Source",
    "WeightPlan",
    "aligned",
    "as_bytes",
    "make_plan",
    "why_unplanned",
]

Export = Callable[[Callable[[torch.nn.Parameter], Tensor]], Iterator[tuple[str, Tensor]]]
"""An export of this rank's tensors; its argument is what each parameter is exported as, see `bridges.base.Bridge`."""
MOST_PIECES = 1024
"""Of one tensor: more than any model has key-value heads, by which a fused matrix is interleaved."""
COMPARED_AT_ONCE = 2**26
"""Bytes; bounds the memory that a comparison needs."""


class PlanError(Exception):
    """The export cannot be written as copies of pieces; the message says why."""


@dataclass(frozen=True)
class Source:
    """A parameter, looked up in its module at each use: the module may be given another, and its memory may move."""

    module: torch.nn.Module
    name: str
    shape: torch.Size
    dtype: torch.dtype

    def parameter(self) -> Tensor:
        parameter = self.module._parameters[self.name]
        assert parameter is not None
        return parameter

    def checked(self) -> Tensor:
        """
        Raises:
            RuntimeError: the module holds something else than when the plan was made.
        """
        found = self.parameter().detach()
        if found.shape != self.shape or found.dtype != self.dtype or not found.is_contiguous():
            raise RuntimeError(
                f"{type(self.module).__name__}.{self.name} was {tuple(self.shape)} of {self.dtype} when the stream of"
                f" weights was planned and is {tuple(found.shape)} of {found.dtype} now"
            )
        return found


@dataclass(frozen=True)
class Piece:
    """Bytes that follow one another in a parameter and in what is exported.

    Attributes:
        source: number of the parameter in the plan.
        start: its first byte in the parameter.
        nbytes: how many.
        offset: where they go: bytes from the start of the tensor, or of the bucket.
    """

    source: int
    start: int
    nbytes: int
    offset: int


@dataclass(frozen=True)
class PlannedBucket:
    """One buffer.

    Attributes:
        nbytes: of the buffer, a multiple of `PackedTensors.ALIGNMENT`.
        pieces: with offsets in the buffer; together they fill every tensor of the layout.
    """

    layout: tuple[TensorPlace, ...]
    nbytes: int
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class WeightPlan:
    """
    Attributes:
        tensors: what is exported, in the order of the export, each with the pieces that fill it (offsets of pieces
            are in the tensor, that of its place is 0).
    """

    sources: tuple[Source, ...]
    tensors: tuple[tuple[TensorPlace, tuple[Piece, ...]], ...]

    def buckets(self, limit: int) -> list[PlannedBucket]:
        """Whole tensors in order, up to `limit` bytes a bucket; a larger tensor has a bucket of its own."""
        buckets: list[PlannedBucket] = []
        layout: list[TensorPlace] = []
        pieces: list[Piece] = []
        size = 0
        for place, its_pieces in self.tensors:
            if layout and size + place.nbytes > limit:
                buckets.append(PlannedBucket(tuple(layout), size, tuple(pieces)))
                layout, pieces, size = [], [], 0
            layout.append(replace(place, offset=size))
            pieces += [replace(piece, offset=size + piece.offset) for piece in its_pieces]
            size = aligned(size + place.nbytes)
        return [*buckets, PlannedBucket(tuple(layout), size, tuple(pieces))] if layout else buckets


def aligned(size: int) -> int:
    """Where the next tensor of a bucket may begin."""
    return -(-size // PackedTensors.ALIGNMENT) * PackedTensors.ALIGNMENT


def why_unplanned(mesh: Mesh, chunks: Sequence[torch.nn.Module], *, has_adapters: bool) -> str | None:
    """Why what leaves this rank is not made of bytes that it holds; None where it may be."""
    split = [f"{dim}{mesh.size(dim)}" for dim in ("tp", "pp", "ep", "etp") if mesh.size(dim) > 1]
    if split:
        return f"the weights are split over ranks ({' '.join(split)})"
    if has_adapters:
        return "adapters are merged into the weights"
    if any(is_fp8(parameter) for chunk in chunks for parameter in chunk.parameters()):
        return "FP8 weights are dequantised"
    return None


def make_plan(export: Export, chunks: Sequence[torch.nn.Module]) -> WeightPlan:
    """Run three exports side by side: of rows, of places in rows, and of the values, to compare the plan with.

    Raises:
        PlanError: a tensor is not made of whole pieces of parameters, or is not what its pieces are.
    """
    sources = _Sources(chunks)
    tensors: dict[str, tuple[TensorPlace, tuple[Piece, ...]]] = {}
    exports = (export(sources.rows), export(sources.columns), export(readable))
    try:
        for (name, rows), (_, columns), (same_name, values) in zip(*exports, strict=True):
            if name != same_name or name in tensors:
                raise PlanError(f"{name} is exported twice, or not always")
            pieces = sources.pieces(name, rows, columns)
            place = TensorPlace(name, tuple(rows.shape), sources.all[pieces[0].source].dtype, 0)
            _compare(place, pieces, sources.all, values)
            tensors[name] = place, pieces
    except (RuntimeError, TypeError, ValueError, NotImplementedError) as error:
        raise PlanError(f"the bridge cannot export whole numbers: {error}") from error
    return WeightPlan(tuple(sources.all), tuple(tensors.values()))


class _Sources:
    """Hands numbers to the bridge in place of values, and reads them in what it exports.

    A row is what lies along the last dimension; of a vector, one element.
    """

    def __init__(self, chunks: Sequence[torch.nn.Module]) -> None:
        self.all: list[Source] = []
        self._first_rows: list[int] = []
        self._widths: list[int] = []
        self._next_row = 0
        self._numbers: dict[int, int] = {}
        self._owners = {
            id(parameter): (module, name)
            for chunk in chunks
            for module in chunk.modules()
            for name, parameter in module._parameters.items()
            if parameter is not None
        }

    def rows(self, parameter: torch.nn.Parameter) -> Tensor:
        """Of each element the number of its row, among the rows of all parameters. Takes no memory along the rows."""
        first = self._first_rows[self._number(parameter)]
        counts = parameter.shape if parameter.ndim == 1 else (*parameter.shape[:-1], 1)
        numbers = torch.arange(first, first + prod(counts), dtype=torch.int32, device=parameter.device)
        return numbers.view(counts).expand(parameter.shape)

    def columns(self, parameter: torch.nn.Parameter) -> Tensor:
        """Of each element its place in the row."""
        width = self._widths[self._number(parameter)]
        return torch.arange(width, dtype=torch.int32, device=parameter.device).expand(parameter.shape)

    def _number(self, parameter: torch.nn.Parameter) -> int:
        if id(parameter) not in self._numbers:
            if not parameter.is_contiguous() or not parameter.ndim:
                raise PlanError(f"a parameter of shape {tuple(parameter.shape)} is not contiguous")
            self._numbers[id(parameter)] = len(self.all)
            module, name = self._owners[id(parameter)]
            self.all.append(Source(module, name, parameter.shape, parameter.dtype))
            self._widths.append(1 if parameter.ndim == 1 else parameter.shape[-1])
            self._first_rows.append(self._next_row)
            # One number between two parameters is nobody's: no piece reaches from one into the other.
            self._next_row += parameter.numel() // self._widths[-1] + 1
        return self._numbers[id(parameter)]

    def pieces(self, name: str, rows: Tensor, columns: Tensor) -> tuple[Piece, ...]:
        """The pieces of one exported tensor, from its numbers of rows and places in them."""
        if rows.dtype != torch.int32 or columns.dtype != torch.int32:
            raise PlanError(f"{name} is converted to another type")
        last = rows.shape[-1]
        rows, columns = _distinct(rows), _distinct(columns)
        first = int(rows.flatten()[0])
        width = self._widths[int(np.searchsorted(self._first_rows, first, side="right")) - 1]
        expected = torch.arange(width, dtype=torch.int32, device=columns.device)
        if width > 1:
            if last != width or columns.shape[-1] != width or not torch.equal(rows, rows[..., :1].expand_as(rows)):
                raise PlanError(f"{name} does not consist of whole rows")
            rows = rows[..., 0]
        if not torch.equal(columns, expected.expand_as(columns)):
            raise PlanError(f"{name} does not consist of whole rows")
        return self._joined(name, rows.flatten().cpu().numpy().astype(np.int64), width)

    def _joined(self, name: str, rows: np.ndarray, width: int) -> tuple[Piece, ...]:
        starts = np.concatenate([[0], np.flatnonzero(np.diff(rows) != 1) + 1])
        if len(starts) > MOST_PIECES:
            raise PlanError(f"{name} comes in {len(starts)} pieces")
        counts = np.diff(np.append(starts, len(rows)))
        pieces: list[Piece] = []
        for start, count in zip(starts.tolist(), counts.tolist(), strict=True):
            number = int(np.searchsorted(self._first_rows, rows[start], side="right")) - 1
            source, row = self.all[number], int(rows[start]) - self._first_rows[number]
            if self._widths[number] != width or row + count > source.shape.numel() // width:
                raise PlanError(f"{name} is not made of the parameters' rows as they are")
            if pieces and source.dtype != self.all[pieces[0].source].dtype:
                raise PlanError(f"{name} is made of several types")
            size = width * source.dtype.itemsize
            pieces.append(Piece(number, row * size, count * size, start * size))
        return tuple(pieces)


def _distinct(tensor: Tensor) -> Tensor:
    """Without the repetitions that take no memory."""
    return tensor[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in tensor.stride())]


def _compare(place: TensorPlace, pieces: Sequence[Piece], sources: Sequence[Source], values: Tensor) -> None:
    """
    Raises:
        PlanError: what the bridge exports is not, byte for byte, what the plan would copy.
    """
    if values.dtype != place.dtype or tuple(values.shape) != place.shape:
        raise PlanError(f"{place.name} is exported as {values.dtype} of {tuple(values.shape)}")
    whole, filled = as_bytes(values.contiguous()), 0
    for piece in pieces:
        source = as_bytes(sources[piece.source].checked())
        for first in range(0, piece.nbytes, COMPARED_AT_ONCE):
            size = min(COMPARED_AT_ONCE, piece.nbytes - first)
            ours = source[piece.start + first :][:size]
            if piece.offset + first != filled or not torch.equal(ours, whole[filled : filled + size]):
                raise PlanError(f"{place.name} is not a copy of what the plan found it to be")
            filled += size
    if filled != place.nbytes:
        raise PlanError(f"{place.name} has {place.nbytes} bytes of which the plan fills {filled}")


def as_bytes(tensor: Tensor) -> Tensor:
    """A contiguous tensor as uint8 `[bytes]`, without a copy."""
    return tensor.view(-1).view(torch.uint8)
