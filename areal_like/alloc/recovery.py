"""Reads a string whose structure is broken as far as it can be read, so that its other faults are found as well.

Runs only after the grammar has refused a string: it says which piece of structure is missing or superfluous, and hands
the pieces that are there to the same checks as a sound string.
"""

from __future__ import annotations

import re

from areal_like.alloc.diagnostics import Span, clip, closest
from areal_like.alloc.faults import Edit, Fault
from areal_like.alloc.syntax import WHITE, Dim, Draft, Part

__all__ = ["recover", "unexpected"]

JOINT = re.compile(r"\+(?!\s*[0-9])|\|(?=\s*(?!(?:attn|ffn)\s*:)\w+\s*(?:\[[^\]]*\]\s*)?:)")
"""A '+', or a '|' before another `backend:`."""
LABEL = re.compile(r"[^\W\d]\w*(?=\s*:)")
BARE_LAYOUT = re.compile(r"\(|(?:attn|ffn)\s*:|(?:[A-Za-z]\s*(?:[0-9]+|\*)\s*)+\Z")
DIM = re.compile(r"([A-Za-z]*)[ \t\r\n\f]*([^ \t\r\n\f:()\[\]|A-Za-z]*)")
"""As in the grammar, but a '+' that joins nothing belongs to the size: d+4."""
EXAMPLE = "megatron:d4t2"
FOLDED = "write (attn:...|ffn:...): attention first, then the experts"


def recover(text: str, stopped: int) -> tuple[Draft, list[Fault]]:
    """A draft and the faults of structure. `stopped` is where the grammar gave up."""
    faults: list[Fault] = []
    if joint := _expression(text):
        return Draft(text, None, None, [], None, complete=False, stopped=stopped), [joint]
    backend, name, start = _head(text, faults)
    attn, ffn, complete = _layout(text, start, faults)
    return Draft(text, backend, name, attn, ffn, complete, stopped), faults


def unexpected(text: str, position: int) -> Fault:
    """The fault of last resort: something stands where nothing, or something else, is expected."""
    if position >= len(text):
        return Fault("AL019", "the string ends too early", Span(len(text), len(text)), f"for example {EXAMPLE}")
    span = Span(position, position + 1)
    return Fault("AL019", f"unexpected {clip(text[position])}", span, f"for example {EXAMPLE}", (Edit(*span, ""),))


def _expression(text: str) -> Fault | None:
    """AL009: `+` and `|` over several backends, as in AReaL's old allocation_mode."""
    depth, cuts = 0, []
    for position, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if character in "+|" and (character == "+" or depth <= 0) and JOINT.match(text, position):
            cuts.append(position)
    if not cuts:
        return None
    hint = "give each role its own string: actor.backend for the trainer, rollout.backend for the server"
    ends = zip([0, *(cut + 1 for cut in cuts)], [*cuts, len(text)], strict=True)
    alone = tuple(Edit(0, len(text), text[start:end].strip(WHITE)) for start, end in ends)
    message = f"'{text[cuts[0]]}' joins several backends in one string"
    return Fault("AL009", message, Span(cuts[0], cuts[0] + 1), hint, alone)


def _piece(text: str, start: int, end: int) -> Part:
    """text[start:end] without white space around it."""
    piece = text[start:end]
    return Part(piece.strip(WHITE), start + len(piece) - len(piece.lstrip(WHITE)))


# --- the head: backend and name -------------------------------------------------------------------------------------


def _head(text: str, faults: list[Fault]) -> tuple[Part | None, Part | None, int]:
    """Backend, name, and where the layout begins."""
    whole = _piece(text, 0, len(text))
    if BARE_LAYOUT.match(whole.text):
        hint = f"name the backend first, as in {EXAMPLE}"
        faults.append(Fault("AL003", f"no backend before {clip(whole.text)}", Span(whole.start, whole.start), hint))
        return None, None, whole.start
    colon, bracket = text.find(":"), text.find("(")
    if colon < 0 or 0 <= bracket < colon:
        return _head_without_colon(text, faults)
    opening = text.find("[", 0, colon)
    backend = _piece(text, 0, colon if opening < 0 else opening)
    if opening < 0 and backend.text.endswith("]"):
        faults.append(_bracket("]", backend.span.end - 1, "has no '['"))
        backend = _piece(text, backend.start, backend.span.end - 1)
    if not backend.text:
        faults.append(
            Fault("AL003", "no backend is named", Span(backend.start, backend.start), f"name it first: {EXAMPLE}")
        )
    name = _name(text, opening, colon, faults) if opening >= 0 else None
    return backend if backend.text else None, name, colon + 1


def _head_without_colon(text: str, faults: list[Fault]) -> tuple[Part | None, Part | None, int]:
    """AL004. A backend and perhaps a name at the start; the layout is what follows them, if anything does."""
    match = re.match(r"\s*(\w+)?\s*(?:\[\s*([^\[\]():|]*?)\s*\])?\s*", text)
    assert match is not None  # every piece is optional
    backend = Part(match[1], match.start(1)) if match[1] else None
    name = Part(match[2], match.start(2)) if match[2] else None
    at = max(match.end(1), match.end(2) + 1 if match[2] is not None else 0, 0)
    if backend is None:
        faults.append(Fault("AL003", "no backend is named", Span(0, 0), f"name it first: {EXAMPLE}"))
    elif match.end() == len(text):
        hint = f"write backend, ':' and layout, as in {EXAMPLE}"
        faults.append(Fault("AL004", f"{clip(text.strip(WHITE))} has no ':' and no layout", Span(at, at), hint))
    else:
        before = clip(text[:at].strip(WHITE))
        hint = "a ':' stands between backend and layout"
        faults.append(
            Fault("AL004", f"':' is missing after {before}", Span(at, at), hint, (Edit(at, match.end(), ":"),))
        )
    return backend, name, match.end()


def _name(text: str, opening: int, colon: int, faults: list[Fault]) -> Part:
    closing = text.rfind("]", opening, colon)
    if closing < 0:
        span = Span(opening, opening + 1)
        name = _piece(text, opening + 1, colon)
        fixes = (Edit(name.span.end, name.span.end, "]"),)
        faults.append(Fault("AL006", "'[' is not closed", span, "close it before the ':'", fixes))
        return name
    after = _piece(text, closing + 1, colon)
    if after.text:
        hint = "a ':' follows the name"
        faults.append(
            Fault("AL019", f"unexpected {clip(after.text)} after the name", after.span, hint, (Edit(*after.span, ""),))
        )
    return _piece(text, opening + 1, closing)


# --- the layout -----------------------------------------------------------------------------------------------------


def _layout(text: str, start: int, faults: list[Fault]) -> tuple[list[Dim], list[Dim] | None, bool]:
    """Dimensions of the layout: (attn or flat, ffn or None, whether all of it is there)."""
    body = _misplaced_name(text, _piece(text, start, len(text)), faults)
    if not body.text.strip("()" + WHITE):
        if not faults or body.text:
            hint = f"write the sizes after the ':', as in {EXAMPLE}"
            faults.append(Fault("AL005", "there is no layout", Span(body.start, body.span.end), hint))
        return [], None, False
    inner = _inside_brackets(body, faults)
    parts = _split(inner)
    if len(parts) > 1 or LABEL.match(inner.text):
        return _folded(text, body, parts, faults)
    if body.text.startswith("(") and body.text.endswith(")"):
        fix = Edit(*body.span, inner.text)
        hint = "brackets hold attn and ffn; a flat layout stands without"
        faults.append(Fault("AL008", "the brackets hold no attn and ffn", body.span, hint, (fix,)))
    return _dims(text, inner, faults), None, True


def _misplaced_name(text: str, body: Part, faults: list[Fault]) -> Part:
    """A name at the end of the layout is reported and left out."""
    match = re.search(r"\[\s*(\w+)\s*\]\Z", body.text)
    if match is None:
        return body
    span = Span(body.start + match.start(), body.span.end)
    layout = body.text[: match.start()].rstrip(WHITE)
    colon = text.rfind(":", 0, body.start)
    fixes = (Edit(colon, body.span.end, f"[{match[1]}]:{layout}"),) if colon >= 0 else ()
    hint = f"the name follows the backend, as in megatron[{match[1]}]:d4t2"
    faults.append(Fault("AL019", f"the name [{match[1]}] stands after the layout", span, hint, fixes))
    return Part(layout, body.start)


def _inside_brackets(body: Part, faults: list[Fault]) -> Part:
    """What stands between the round brackets; every bracket that is not in a pair around it is a fault."""
    text, end = body.text, body.span.end
    left = 1 if text.startswith("(") else 0
    closing = text.rfind(")")
    for position, character in enumerate(text):
        if character == "(" and position > 0:
            faults.append(_bracket("(", body.start + position, "does not belong here"))
        elif character == ")" and position != closing:
            faults.append(_bracket(")", body.start + position, "does not belong here"))
    labelled = "|" in text or LABEL.match(text[left:].lstrip("(" + WHITE))
    if left and closing < 0:
        fixes = (Edit(end, end, ")"), Edit(body.start, body.start + 1, ""))
        span = Span(body.start, body.start + 1)
        faults.append(Fault("AL006", "'(' is not closed", span, "brackets stand in pairs", fixes))
    elif closing >= 0 and not left:
        opened = (Edit(body.start, body.start, "("),) if labelled else ()
        lone = _bracket(")", body.start + closing, "has no '('")
        faults.append(Fault(lone.code, lone.message, lone.span, lone.help, opened + lone.fixes))
    elif labelled and not left:
        both = Edit(*body.span, f"({text})")
        faults.append(Fault("AL006", "the folded form stands in brackets", body.span, FOLDED, (both,)))
    start = len(text) - len(text.lstrip("(" + WHITE))
    if text.endswith(")"):
        text = text.rstrip(")" + WHITE)
    return Part(text[start:], body.start + start)


def _bracket(character: str, position: int, what: str) -> Fault:
    fixes = (Edit(position, position + 1, ""),)
    span = Span(position, position + 1)
    return Fault("AL006", f"'{character}' {what}", span, "brackets stand in pairs", fixes)


def _split(inner: Part) -> list[Part]:
    """The parts between '|'."""
    parts, start = [], 0
    for piece in inner.text.split("|"):
        part = _piece(inner.text, start, start + len(piece))
        parts.append(Part(part.text, inner.start + part.start))
        start += len(piece) + 1
    return parts


def _folded(text: str, body: Part, parts: list[Part], faults: list[Fault]) -> tuple[list[Dim], list[Dim] | None, bool]:
    labelled = [_label(part) for part in parts]
    labels = [label.text if label else "" for label, _ in labelled]
    if labels == ["ffn", "attn"]:
        swap = Edit(parts[0].start, parts[1].span.end, f"{parts[1].text}|{parts[0].text}")
        faults.append(Fault("AL008", "ffn stands before attn", parts[0].span, FOLDED, (swap,)))
        labelled.reverse()
    elif len(parts) != 2:
        message = f"the folded form has {len(parts)} part{'s' * (len(parts) > 1)}, not attn and ffn"
        faults.append(Fault("AL008", message, body.span, FOLDED))
    else:
        for (label, _), part, wanted in zip(labelled, parts, ("attn", "ffn"), strict=True):
            _check_label(label, part, wanted, faults)
    dims = [_part_dims(text, sizes, label, faults) for label, sizes in labelled[:2]]
    return dims[0], dims[1] if len(dims) == 2 else [], len(parts) == 2 and all(dims)


def _label(part: Part) -> tuple[Part | None, Part]:
    """The word before the ':' and what stands after it."""
    head, colon, _ = part.text.partition(":")
    if not colon:
        return None, part
    sizes = _piece(part.text, len(head) + 1, len(part.text))
    return Part(head.rstrip(WHITE), part.start), Part(sizes.text, part.start + sizes.start)


def _check_label(label: Part | None, part: Part, wanted: str, faults: list[Fault]) -> None:
    if label is None:
        fix = Edit(part.start, part.start, f"{wanted}:")
        faults.append(Fault("AL008", f"'{wanted}:' is missing before {clip(part.text)}", part.span, FOLDED, (fix,)))
    elif label.text != wanted:
        meant = f"did you mean {wanted}? " if closest(label.text, [wanted]) else ""
        fix = Edit(*label.span, wanted)
        message = f"{clip(label.text)} stands where {wanted} belongs"
        faults.append(Fault("AL008", message, label.span, meant + FOLDED, (fix,)))


def _part_dims(text: str, sizes: Part, label: Part | None, faults: list[Fault]) -> list[Dim]:
    if not sizes.text:
        hint = "each part has at least one letter with a size"
        called = f" in {clip(label.text)}" if label else ""
        faults.append(Fault("AL005", f"no sizes{called}", Span(sizes.start, sizes.start), hint))
    return _dims(text, sizes, faults)


def _dims(text: str, part: Part, faults: list[Fault]) -> list[Dim]:
    """All dimensions in a piece of text; what stands between them is a fault (brackets are reported elsewhere)."""
    dims = []
    position, end = part.start, part.span.end
    while position < end:
        match = DIM.match(text, position, end)
        if text[position] in WHITE:
            position += 1
        elif match is not None and match.end() > position:
            dims.append(Dim(match[1], match[2], position, match.start(2), match.end() if match[2] else match.end(1)))
            position = match.end()
        else:
            if text[position] not in "()":
                faults.append(unexpected(text, position))
            position += 1
    return dims
