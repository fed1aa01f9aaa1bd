"""Reads a string whose structure is broken as far as it can be read, so that its other faults are found as well.

Runs only after the grammar has refused a string: it says which piece of structure is missing or superfluous, and hands
the pieces that are there to the same checks as a sound string.
"""

from __future__ import annotations

import re

from areal_like.alloc.diagnostics import Span, clip, closest
from areal_like.alloc.faults import Edit, Fault
from areal_like.alloc.syntax import DIM, WHITE, Dim, Draft, Part, split_dim

__all__ = ["recover"]

EXPRESSION = re.compile(r"\+(?!\s*[0-9])|\|(?=\s*(?!(?:attn|ffn)\s*:)\w+\s*(?:\[[^\]]*\]\s*)?:)")
"""A '+', or a '|' before another `backend:`."""
LABEL = re.compile(r"[^\W\d]\w*(?=\s*:)")
BARE_LAYOUT = re.compile(r"\(|(?:attn|ffn)\s*:|(?:[A-Za-z]\s*(?:[0-9]+|\*)\s*)+\Z")
EXAMPLE = "megatron:d4t2"


def recover(text: str, column: int) -> tuple[Draft, list[Fault]]:
    """A draft and the faults of structure, at least one. `column` is where the grammar gave up."""
    faults: list[Fault] = []
    if found := _expression(text):
        return Draft(text, None, None, [], None, complete=False), [found]
    backend, name, body = _head(text, faults)
    attn, ffn, complete = _body(text, body, faults)
    if not faults:
        faults.append(_unexpected(text, min(column, len(text))))
    return Draft(text, backend, name, attn, ffn, complete), faults


def _expression(text: str) -> Fault | None:
    """AL009: `+` and `|` over several backends, as in AReaL's old allocation_mode."""
    depth = 0
    for position, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if character in "+|" and (character == "+" or depth <= 0) and EXPRESSION.match(text, position):
            parts = re.split(r"[+|]", text) if "(" not in text else []
            message = f"'{character}' joins several backends in one string"
            hint = "give each role its own string: actor.backend for the trainer, rollout.backend for the server"
            start = 0
            edits = []
            for part in parts:  # every part alone
                edits.append(Edit(0, len(text), part.strip(WHITE)))
                start += len(part) + 1
            return Fault("AL009", message, Span(position, position + 1), hint, tuple(edits))
    return None


def _strip(text: str, start: int, end: int) -> Part:
    """text[start:end] without white space around it."""
    piece = text[start:end]
    left = len(piece) - len(piece.lstrip(WHITE))
    return Part(piece.strip(WHITE), start + left)


def _head(text: str, faults: list[Fault]) -> tuple[Part | None, Part | None, int]:
    """Backend, name, and where the layout begins."""
    first = _strip(text, 0, len(text))
    if BARE_LAYOUT.match(first.text):
        message = f"no backend before {clip(first.text)}"
        faults.append(Fault("AL003", message, Span(first.start, first.start), f"name it first: {EXAMPLE}"))
        return None, None, first.start
    colon = text.find(":")
    paren = text.find("(")
    end = colon if colon >= 0 else len(text)
    if 0 <= paren < end:  # megatron(attn:...
        hint = "a ':' stands between backend and layout"
        faults.append(
            Fault("AL004", "':' is missing before '('", Span(paren, paren + 1), hint, (Edit(paren, paren, ":"),))
        )
        colon, end = paren - 1, paren
    head = _strip(text, 0, end)
    opening, closing = head.text.find("["), head.text.rfind("]")
    before = head.text if opening < 0 else head.text[:opening]
    backend, behind = _backend(text, _strip(text, head.start, head.start + len(before)), colon, faults)
    name = _name(head, opening, closing, faults)
    return backend, name, colon + 1 if colon >= 0 else behind


def _backend(text: str, written: Part, colon: int, faults: list[Fault]) -> tuple[Part | None, int]:
    """The backend, and where the layout begins if no colon says so."""
    if not written.text:
        hint = f"name it first: {EXAMPLE}"
        faults.append(Fault("AL003", "no backend is named", Span(written.start, written.start), hint))
        return None, len(text)
    if colon >= 0:
        return Part(written.text.rstrip("]"), written.start), colon + 1
    word = re.match(r"\w*", written.text)
    length = word.end() if word and word.end() else len(written.text)
    end = written.start + length
    rest = text[end:].strip(WHITE)
    if not rest or rest.startswith("["):
        hint = f"write backend, ':' and layout, for example {EXAMPLE}"
        message = f"{clip(text.strip(WHITE))} has no ':' and no layout"
        faults.append(Fault("AL004", message, Span(len(text), len(text)), hint))
        return Part(written.text[:length], written.start), len(text)
    hint = "a ':' stands between backend and layout"
    faults.append(
        Fault(
            "AL004",
            f"':' is missing after {clip(written.text[:length])}",
            Span(end, end + 1),
            hint,
            (Edit(end, end, ":"),),
        )
    )
    return Part(written.text[:length], written.start), end


def _name(head: Part, opening: int, closing: int, faults: list[Fault]) -> Part | None:
    if opening < 0:
        if closing >= 0:
            faults.append(_bracket("]", head.start + closing, "has no '['"))
        return None
    start = head.start + opening
    if closing < opening:
        faults.append(
            Fault("AL006", "'[' is not closed", Span(start, start + 1), "close it: [actor]", _close(head, "]"))
        )
        return _strip(head.text, opening + 1, len(head.text))._replace(start=start + 1)
    if after := head.text[closing + 1 :].strip(WHITE):
        where = head.start + head.text.rindex(after)
        span = Span(where, where + len(after))
        faults.append(
            Fault("AL019", f"unexpected {clip(after)} after the name", span, "':' follows the name", (Edit(*span, ""),))
        )
    name = _strip(head.text, opening + 1, closing)
    return Part(name.text, head.start + name.start)


def _close(head: Part, bracket: str) -> tuple[Edit, ...]:
    end = head.start + len(head.text)
    return (Edit(end, end, bracket),)


def _bracket(character: str, position: int, what: str) -> Fault:
    fixes = (Edit(position, position + 1, ""),)
    return Fault("AL006", f"'{character}' {what}", Span(position, position + 1), "brackets stand in pairs", fixes)


def _body(text: str, start: int, faults: list[Fault]) -> tuple[list[Dim], list[Dim] | None, bool]:
    """Dimensions of the layout: (attn or flat, ffn or None, whether both are there)."""
    body = _strip(text, start, len(text))
    if not body.text:
        if not any(fault.code in ("AL003", "AL004") for fault in faults):
            hint = f"write the sizes after the ':', for example {EXAMPLE}"
            faults.append(Fault("AL005", "no layout after ':'", Span(len(text), len(text)), hint))
        return [], None, False
    folded = re.search(r"[(|)]|\b(?:attn|ffn)\s*:", body.text) is not None
    if not folded:
        return _dims(text, body, faults), None, True
    inner = _brackets(body, faults)
    parts = _split(inner)
    if len(parts) == 1 and not LABEL.match(parts[0].text):
        hint = "brackets hold attn and ffn; a flat layout has none"
        flat = parts[0].text
        faults.append(Fault("AL008", "the brackets hold no attn and ffn", body.span, hint, (Edit(*body.span, flat),)))
        return _dims(text, parts[0], faults), None, True
    return _folded(text, body, parts, faults)


def _brackets(body: Part, faults: list[Fault]) -> Part:
    """Check the round brackets; what stands between them."""
    opened: list[int] = []
    for position, character in enumerate(body.text, body.start):
        if character == "(":
            if opened or position > body.start:
                faults.append(_bracket("(", position, "does not belong here"))
            else:
                opened.append(position)
        elif character == ")":
            if opened:
                opened.pop()
            else:
                missing = (Edit(body.start, body.start, "("),) if position == body.start + len(body.text) - 1 else ()
                fault = _bracket(")", position, "has no '('")
                faults.append(Fault(fault.code, fault.message, fault.span, fault.help, missing + fault.fixes))
    end = body.start + len(body.text)
    for position in opened:
        span = Span(position, position + 1)
        faults.append(Fault("AL006", "'(' is not closed", span, "brackets stand in pairs", (Edit(end, end, ")"),)))
    if not re.search(r"[()]", body.text):
        fixes = (Edit(*body.span, f"({body.text})"),)
        faults.append(
            Fault("AL006", "the folded form stands in brackets", body.span, "write (attn:...|ffn:...)", fixes)
        )
    left = 1 if body.text.startswith("(") else 0
    right = len(body.text) - (1 if body.text.endswith(")") else 0)
    return Part(body.text[left:right], body.start + left)


def _split(inner: Part) -> list[Part]:
    """The parts between '|'."""
    parts, start = [], 0
    for piece in inner.text.split("|"):
        parts.append(_strip(inner.text, start, start + len(piece)))
        start += len(piece) + 1
    return [Part(part.text, inner.start + part.start) for part in parts]


def _folded(text: str, body: Part, parts: list[Part], faults: list[Fault]) -> tuple[list[Dim], list[Dim] | None, bool]:
    hint = "write (attn:...|ffn:...): attention first, then the experts"
    labelled = [_label(part) for part in parts]
    labels = [label.text if label else "" for label, _ in labelled]
    if labels == ["ffn", "attn"]:
        swapped = (Edit(*parts[0].span, parts[1].text), Edit(*parts[1].span, parts[0].text))
        both = Edit(parts[0].start, parts[1].span.end, f"{swapped[0].text}|{swapped[1].text}")
        faults.append(Fault("AL008", "ffn stands before attn", parts[0].span, hint, (both,)))
        labelled.reverse()
    elif len(parts) == 1:
        there = labels[0] or "one part"
        faults.append(Fault("AL008", f"the folded form has {clip(there)} alone", body.span, hint))
    elif len(parts) > 2:
        faults.append(Fault("AL008", f"the folded form has {len(parts)} parts", body.span, hint))
    else:
        for (label, _), part, wanted in zip(labelled, parts, ("attn", "ffn"), strict=True):
            _check_label(label, part, wanted, hint, faults)
    dims = [_part_dims(text, sizes, label, faults) for label, sizes in labelled[:2]]
    complete = len(parts) == 2 and all(dims)
    return dims[0], dims[1] if len(dims) == 2 else [], complete


def _label(part: Part) -> tuple[Part | None, Part]:
    """The word before the ':' and what stands after it."""
    head, colon, tail = part.text.partition(":")
    if not colon:
        return None, part
    sizes = _strip(tail, 0, len(tail))
    return _strip(head, 0, len(head))._replace(start=part.start), Part(
        sizes.text, part.start + len(head) + 1 + sizes.start
    )


def _check_label(label: Part | None, part: Part, wanted: str, hint: str, faults: list[Fault]) -> None:
    if label is None:
        at = Span(part.start, part.start)
        edit = Edit(*at, f"{wanted}:")
        faults.append(Fault("AL008", f"{clip(part.text)} is not called '{wanted}:'", part.span, hint, (edit,)))
    elif label.text != wanted:
        meant = f"did you mean {wanted}? " if closest(label.text, [wanted]) else ""
        faults.append(
            Fault(
                "AL008",
                f"{clip(label.text)} stands for {wanted}",
                label.span,
                meant + hint,
                (Edit(*label.span, wanted),),
            )
        )


def _part_dims(text: str, sizes: Part, label: Part | None, faults: list[Fault]) -> list[Dim]:
    if not sizes.text:
        hint = "each part has at least one letter with a size"
        called = label.text if label else "a part"
        faults.append(Fault("AL005", f"no sizes in {clip(called)}", Span(sizes.start, sizes.start), hint))
    return _dims(text, sizes, faults)


def _dims(text: str, part: Part, faults: list[Fault]) -> list[Dim]:
    """All dimensions in a piece of text; structure characters between them are faults unless already reported."""
    dims = []
    position, end = part.start, part.start + len(part.text)
    while position < end:
        if text[position] in WHITE:
            position += 1
        elif (match := DIM.match(text, position, end)) and match.end() > position:
            dims.append(split_dim(match[0], position))
            position = match.end()
        else:
            if text[position] not in "()":  # reported by _brackets
                faults.append(_unexpected(text, position))
            position += 1
    return dims


def _unexpected(text: str, position: int) -> Fault:
    if position >= len(text):
        return Fault("AL019", "the string ends too early", Span(len(text), len(text)), f"for example {EXAMPLE}")
    span = Span(position, position + 1)
    return Fault("AL019", f"unexpected {clip(text[position])}", span, f"for example {EXAMPLE}", (Edit(*span, ""),))
