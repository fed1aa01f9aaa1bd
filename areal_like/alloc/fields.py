"""Between the fields of `ModelAllocation` and the string they are written as: the canonical form.

Canonical: backend, `[name]`, then `d` always and the other letters where they are not 1, in the order d t p c e v. The
folded form is used only when the expert tensor size is not 1, the one thing that the flat form cannot say.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from areal_like.alloc.diagnostics import Span, clip, closest
from areal_like.alloc.faults import Fault
from areal_like.alloc.sizes import LARGEST
from areal_like.alloc.syntax import Dim, Draft, Part

__all__ = ["FIELDS", "write"]

FIELDS = (
    "backend",
    "name",
    "data_parallel_size",
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "context_parallel_size",
    "expert_parallel_size",
    "virtual_pipeline_parallel_size",
    "expert_tensor_parallel_size",
)
"""Backend, name, and the sizes in the order of `layout.Sizes`."""

_FLAT = dict(zip("dtpcev", FIELDS[2:8], strict=True))
_ATTN = {letter: _FLAT[letter] for letter in "dtpcv"}
_FFN = {"t": FIELDS[8], "e": _FLAT["e"]}


def write(data: Mapping[str, Any]) -> tuple[Draft, dict[str, Any], list[Fault]]:
    """The canonical string of these fields as a draft, the fields with defaults filled in, and what is wrong with them.

    Fields that no string can hold (an unknown name, a size that is not an integer) are written as they print, so that
    the faults of the sizes are found by the same checks as in a parsed string, and have a place.
    """
    values: dict[str, Any] = dict.fromkeys(FIELDS, 1) | {"name": None} | dict(data)
    backend, name = values.get("backend") if "backend" in data else None, values["name"]
    text = backend if isinstance(backend, str) else ""
    faults = [_unknown_field(str(field)) for field in data if field not in FIELDS]
    if not isinstance(backend, str):
        faults.append(
            Fault("AL003", f"backend is a string, not {_shown(backend)}", Span(0, 0), "for example 'megatron'")
        )
    written_name = None
    if name is not None and not isinstance(name, str):
        faults.append(Fault("AL007", f"name is a string, not {_shown(name)}", Span(len(text), len(text))))
    elif name is not None:
        written_name = Part(name, len(text) + 1)
        text += f"[{name}]"
    text += ":"
    if values[FIELDS[8]] == 1 and type(values[FIELDS[8]]) is int:
        text, attn = _dims(text, _FLAT, values)
        ffn = None
    else:
        text, attn = _dims(text + "(attn:", _ATTN, values)
        text, ffn = _dims(text + "|ffn:", _FFN, values)
        text += ")"
    written_backend = Part(backend, 0) if isinstance(backend, str) else None
    return Draft(text, written_backend, written_name, attn, ffn), values, faults


def _dims(text: str, letters: Mapping[str, str], values: Mapping[str, Any]) -> tuple[str, list[Dim]]:
    """Append the letters whose size is not 1 (and d)."""
    dims = []
    for letter, field in letters.items():
        value = values[field]
        if type(value) is int and value == 1 and letter != "d":
            continue
        start = len(text)
        text += letter + _shown(value)
        dims.append(Dim(letter, text[start + 1 :], start, start + 1, len(text)))
    return text, dims


def _shown(value: object) -> str:
    """A size as it is written; '*' for None, and for what is no integer its repr."""
    if value is None:
        return "*"
    if type(value) is not int:
        return clip(repr(value))[1:-1]
    return str(value) if abs(value) <= LARGEST**4 else f"{value:#x}"[:20] + "..."


def _unknown_field(field: str) -> Fault:
    near = closest(field, FIELDS)
    hint = f"did you mean {near}? " if near else ""
    return Fault("AL020", f"unknown field {clip(field)}", Span(0, 0), hint + "fields are " + ", ".join(FIELDS))
