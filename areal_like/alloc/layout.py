"""The rules between the parts of one allocation: what the sizes mean together and what the backend can do with them.

The same rules run for a parsed string and for a direct construction, which is first written out as a draft.
"""

from __future__ import annotations

from math import isqrt
from typing import NamedTuple

from areal_like.alloc.backends import BackendDescriptor
from areal_like.alloc.diagnostics import Span
from areal_like.alloc.faults import Edit, Fault
from areal_like.alloc.registry import Problem, look_up
from areal_like.alloc.sizes import LARGEST, ReadSizes, Size, read_sizes
from areal_like.alloc.syntax import Draft

__all__ = ["Sizes", "check"]

ATTN_LETTERS, FFN_LETTERS = "dtpcv", "dtpe"


class Sizes(NamedTuple):
    """Parallel sizes by their letter; `d` None is `*`; `etp` is the expert tensor size."""

    d: int | None = 1
    t: int = 1
    p: int = 1
    c: int = 1
    e: int = 1
    v: int = 1
    etp: int = 1


def check(draft: Draft, faults: list[Fault]) -> Sizes:
    """The sizes of a draft; everything wrong with them is appended to `faults`."""
    if draft.name is not None:
        _check_name(draft, faults)
    backend = _check_backend(draft, faults)
    attn = read_sizes(draft.attn, faults)
    ffn = None if draft.ffn is None else read_sizes(draft.ffn, faults)
    if ffn is not None:
        _check_parts(attn, ffn, faults)
        if backend is not None and not backend.has_experts:
            faults.append(_no_folding(draft, backend))
    if backend is not None:
        _check_letters(backend, attn, faults)
        if ffn is None or backend.has_experts:
            _check_letters(backend, ffn, faults)
    if backend is None or "v" in backend.letters:
        _check_virtual(attn, faults)
    agree = ffn is None or _check_pipeline(attn, ffn, faults)
    sizes = _sizes(attn, ffn)
    if not (draft.complete and attn.sound and (ffn is None or ffn.sound)):
        return sizes
    if _check_world(draft, sizes, faults) and agree and (backend is None or backend.has_experts):
        _check_experts(sizes, attn, ffn, faults)
    return sizes


def _value(read: ReadSizes | None, letter: str) -> int:
    """A size, 1 when it is not written; `*` counts as 1, that is per replica."""
    size = read.sizes.get(letter) if read is not None else None
    return 1 if size is None or size.value is None else size.value


def _sizes(attn: ReadSizes, ffn: ReadSizes | None) -> Sizes:
    d = attn.sizes.get("d")
    return Sizes(
        1 if d is None else d.value,
        _value(attn, "t"),
        _value(attn, "p"),
        _value(attn, "c"),
        _value(attn if ffn is None else ffn, "e"),
        _value(attn, "v"),
        1 if ffn is None else _value(ffn, "t"),
    )


def _check_name(draft: Draft, faults: list[Fault]) -> None:
    name = draft.name
    if name is not None and not (name.text.isascii() and name.text.isidentifier()):
        hint = "a name has letters, digits and _, and does not begin with a digit: [actor]"
        plain = "".join(c if c.isascii() and c.isalnum() else "_" for c in name.text)
        fixes = (Edit(*name.span, plain if plain.isidentifier() else "_" + plain),) if plain else ()
        message = f"[{name.text[:30]}] is not a name"
        faults.append(Fault("AL007", message, name.span, hint, fixes))


def _check_backend(draft: Draft, faults: list[Fault]) -> BackendDescriptor | None:
    if draft.backend is None:
        return None
    span = draft.backend.span
    found = look_up(draft.backend.text)
    if isinstance(found, Problem):
        fixes = (Edit(*span, found.near),) if found.near else ()
        faults.append(Fault(found.code, found.message, span, found.help, fixes))
        return None
    return found


def _check_parts(attn: ReadSizes, ffn: ReadSizes, faults: list[Fault]) -> None:
    """AL101: the attention part has no e, the feed-forward part no c and no v."""
    for part, read, legal, other in (("attn", attn, ATTN_LETTERS, "ffn"), ("ffn", ffn, FFN_LETTERS, "attn")):
        for letter, size in read.sizes.items():
            if letter not in legal:
                hint = f"write {size.dim} in {other}; {part} takes {', '.join(legal)}"
                faults.append(Fault("AL101", f"{letter} does not belong to {part}", size.dim.span, hint))


def _check_letters(backend: BackendDescriptor, read: ReadSizes | None, faults: list[Fault]) -> None:
    """AL202. A size of 1 is no parallelism, so it asks nothing of the backend."""
    for letter, size in (read.sizes if read is not None else {}).items():
        if letter not in backend.letters and size.value != 1:
            message = f"backend {backend.name} has no {letter}"
            hint = f"{backend.name} takes {', '.join(backend.letters)}; leave {size.dim} out or choose another backend"
            faults.append(Fault("AL202", message, size.dim.span, hint, (Edit(*size.dim.span, ""),)))


def _no_folding(draft: Draft, backend: BackendDescriptor) -> Fault:
    start, end = _body(draft)
    message = f"backend {backend.name} has no experts, so it takes no folded form"
    flat = "".join(str(dim) for dim in draft.attn)
    return Fault("AL203", message, Span(start, end), f"write {backend.name}:{flat}", (Edit(start, end, flat),))


def _body(draft: Draft) -> Span:
    """Where the layout stands: from behind the colon to the end, without white space."""
    dims = draft.attn + (draft.ffn or [])
    start = draft.source.rfind("(", 0, dims[0].start) if dims else 0
    return Span(max(start, 0), len(draft.source.rstrip()))


def _check_virtual(attn: ReadSizes, faults: list[Fault]) -> None:
    v = attn.sizes.get("v")
    if v is not None and v.value != 1 and "p" not in attn.unread and _value(attn, "p") == 1:
        hint = "v is the number of stages a rank holds of a pipeline: add p, or leave v out"
        faults.append(Fault("AL105", f"{v.dim} without p", v.dim.span, hint, (Edit(*v.dim.span, ""),)))


def _check_pipeline(attn: ReadSizes, ffn: ReadSizes, faults: list[Fault]) -> bool:
    """AL102: ffn p is inherited, or the same. Says whether they agree."""
    size = ffn.sizes.get("p")
    if size is None or "p" in attn.unread or size.value == _value(attn, "p"):
        return True
    p = _value(attn, "p")
    hint = "both parts share one pipeline: leave p out of ffn, or write the same size"
    fixes = (Edit(*size.dim.span, f"p{p}"), Edit(*size.dim.span, ""))
    faults.append(Fault("AL102", f"ffn {size.dim} but attn p{p}", size.dim.span, hint, fixes))
    return False


def _check_world(draft: Draft, sizes: Sizes, faults: list[Fault]) -> bool:
    """AL106. Says whether the world is of a possible size."""
    world = (sizes.d or 1) * sizes.t * sizes.p * sizes.c
    if world > LARGEST:
        product = "·".join(str(dim) for dim in draft.attn if dim.letters in "dtpc" and dim.size != "*")
        span = Span(draft.attn[0].start, draft.attn[-1].end)
        message = f"{product} = {world} ranks are too many"
        faults.append(Fault("AL106", message, span, f"a world has at most {LARGEST} (2^20) ranks"))
    return world <= LARGEST


def _check_experts(sizes: Sizes, attn: ReadSizes, ffn: ReadSizes | None, faults: list[Fault]) -> None:
    """AL103, AL104: the experts are spread over the same ranks, stage by stage."""
    ffn_d = ffn.sizes.get("d") if ffn is not None else None
    if sizes.d is None:
        if ffn_d is not None and ffn_d.value is not None:
            message = f"attn d* leaves the number of ranks open, ffn {ffn_d.dim} fixes it"
            fixes = (Edit(*ffn_d.dim.span, ""),)
            faults.append(Fault("AL103", message, ffn_d.dim.span, "leave d out of ffn: it is derived", fixes))
        return
    ranks = sizes.d * sizes.t * sizes.c  # of one stage
    experts = sizes.e * sizes.etp
    if ffn_d is not None and ffn_d.value is not None:
        if ffn_d.value * experts != ranks:
            faults.append(_worlds_differ(sizes, ffn_d))
    elif ranks % experts:
        faults.append(_experts_do_not_divide(ranks, sizes, attn, ffn))


def _worlds_differ(sizes: Sizes, ffn_d: Size) -> Fault:
    d, t, p, c, e, _, etp = sizes
    assert d is not None and ffn_d.value is not None
    attn_world, ffn_world = d * t * p * c, ffn_d.value * etp * p * e
    message = (
        f"attn d{d}·t{t}·p{p}·c{c} = {attn_world} ranks, but ffn d{ffn_d.value}·t{etp}·p{p}·e{e} = {ffn_world} ranks"
    )
    hint = "both parts lie on the same ranks; leave d out of ffn and it is derived"
    span = ffn_d.dim.span
    return Fault("AL103", message, span, hint, (Edit(*span, ""),))


def _experts_do_not_divide(ranks: int, sizes: Sizes, attn: ReadSizes, ffn: ReadSizes | None) -> Fault:
    read = attn if ffn is None else ffn
    e, t = read.sizes.get("e"), read.sizes.get("t") if ffn is not None else None
    asked = f"e{sizes.e}" if ffn is None else f"ffn t{sizes.etp}·e{sizes.e} = {sizes.e * sizes.etp}"
    layout = "·".join(f"{letter}{size}" for letter, size in (("d", sizes.d), ("t", sizes.t), ("c", sizes.c)))
    message = f"{asked} does not divide the {ranks} ranks of a stage ({layout})"
    size = e or t
    assert size is not None  # with neither, the experts are 1 and divide everything
    other = sizes.etp if size is e else sizes.e
    legal = _divisors(ranks // other) if ranks % other == 0 else []
    letter, written = size.dim.letters, size.value or 1
    near = sorted(legal, key=lambda n: (abs(n - written), n))[:2]
    if not near:
        return Fault("AL104", message, size.dim.span, f"the product of ffn t and e must divide {ranks}")
    hint = f"{letter} can be {', '.join(map(str, sorted(near)))}" + (" ..." if len(legal) > len(near) else "")
    return Fault("AL104", message, size.dim.span, hint, tuple(Edit(*size.dim.span, f"{letter}{n}") for n in near))


def _divisors(number: int) -> list[int]:
    small = [n for n in range(1, isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})
