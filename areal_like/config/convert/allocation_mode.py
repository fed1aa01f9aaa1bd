"""AReaL's old `allocation_mode`: one expression for all roles, `+` for GPUs apart and `|` for the same GPUs.

`sglang:d4+megatron:d4` is a rollout engine and a trainer side by side; `sglang:d4|megatron[actor]:d4` puts them on the
same GPUs, `|` binding tighter than `+`. Components carry names in brackets where there are more than two.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from areal_like.alloc import AllocationError, ModelAllocation
from areal_like.config.convert.draft import Draft, Given, Source
from areal_like.config.findings import COMMAND_LINE, Place

ROLES = {"train": ("actor", "critic", "ref"), "inference": ("rollout",)}
"""Sections with a `backend` by the role of the backend; the first is that of a component without a name."""

LONGEST = 2000
"""Characters of an expression."""

_CUT = re.compile(r"\+|\|(?!\s*ffn\s*:)")
_DOT = re.compile(r"^\s*(\w+)\s*\.\s*(?=[a-z]\d)")
_OPEN_FOLD = re.compile(r"^(\s*\w+\s*(?:\[\w+\]\s*)?:\s*)\(?\s*(attn\s*:[^()]*?)\s*\)?\s*$")


@dataclass(frozen=True)
class Component:
    """One model of the expression; `anchor` is the first one on the same GPUs."""

    allocation: ModelAllocation
    key: str
    given: Given
    anchor: Component | None


def source_of(text: str, place: Place | None = None) -> Source:
    """The expression as the one key `allocation_mode`."""
    where = place or Place(COMMAND_LINE, 1, 1, text, max(1, len(text)))
    return Source("AReaL", {"allocation_mode": Given("allocation_mode", text, where)}, {}, where)


def read(source: Source) -> Draft:
    """The expression as `backend` fields."""
    draft = Draft(source)
    given = source.take("allocation_mode")
    if given is None or not isinstance(given.value, str) or not given.value.strip():
        draft.error("the expression is empty", given, "for example sglang:d4+megatron:d4")
        return draft
    if len(given.value) > LONGEST:
        draft.error(f"the expression has more than {LONGEST} characters", None)
        return draft
    components = _components(given, draft)
    for component in components:
        draft.put(f"{component.key}.backend", str(component.allocation), component.given)
        if component.anchor is not None:
            target = {"type": "colocation", "target": component.anchor.key}
            draft.put(f"{component.key}.scheduling_strategy", target, component.given)
    if "ref.backend" in draft.values:
        draft.changed(given, "a reference is started only with actor.kl_ctl above 0")
    return draft


def advice(text: object) -> str | None:
    """The `backend` fields that replace an expression, in one line; None when it has faults."""
    if not isinstance(text, str):
        return None
    draft = read(source_of(text))
    if any(found.severity == "error" for found in draft.diagnostics):
        return None
    return ", ".join(f"{key}: {value}" for key, value in draft.values.items() if key.endswith(".backend"))


def _components(given: Given, draft: Draft) -> list[Component]:
    text = str(given.value)
    cuts = [match for match in _CUT.finditer(text) if not _inside(text, match.start())]
    ends = [0, *(match.end() for match in cuts)]
    starts = [*(match.start() for match in cuts), len(text)]
    parts = [(text[a:b], a) for a, b in zip(ends, starts, strict=True)]
    joints = ["+", *(match.group() for match in cuts)]
    found: list[Component] = []
    anchor: Component | None = None
    names: set[str] = set()
    for (part, at), joint in zip(parts, joints, strict=True):
        where = Given("allocation_mode", part.strip(), _part_place(given.place, text, part, at))
        allocation = _parse(part, where, draft)
        if allocation is None:
            anchor = anchor if joint == "|" else None
            continue
        key = _role(allocation, where, draft, found, names)
        if key is None:
            continue
        component = Component(
            allocation.model_copy(update={"name": None}), key, where, anchor if joint == "|" else None
        )
        if component.anchor is not None and not _same_size(component, component.anchor):
            message = (
                f"{component.anchor.allocation} and {component.allocation} share their GPUs, but have "
                f"{component.anchor.allocation.world_size} and {component.allocation.world_size} ranks"
            )
            draft.error(message, where, "give components joined by '|' the same number of ranks")
        if joint == "+" or anchor is None:
            anchor = component
        found.append(component)
    return found


def _same_size(one: Component, other: Component) -> bool:
    sizes = (one.allocation.data_parallel_size, other.allocation.data_parallel_size)
    return None in sizes or one.allocation.world_size == other.allocation.world_size


def _inside(text: str, position: int) -> bool:
    before = text[:position]
    return before.count("(") > before.count(")")


def _part_place(place: Place, text: str, part: str, at: int) -> Place:
    """The part's own columns, where the expression stands in its line as it is."""
    start = place.source.find(text)
    lead = len(part) - len(part.lstrip())
    if start < 0:
        return place
    return Place(place.file, place.line, start + at + lead + 1, place.source, max(1, len(part.strip())))


def _parse(part: str, given: Given, draft: Draft) -> ModelAllocation | None:
    """A component, in the ways in which AReaL wrote it: brackets of the folded form left out, a dot for the colon."""
    text = _DOT.sub(r"\1:", part).strip()
    text = _OPEN_FOLD.sub(r"\1(\2)", text)
    if re.fullmatch(r"(?:[a-z]\s*\d+\s*)+", text):
        hint = f"write megatron:{text} or fsdp:{text}"
        draft.error(f"{text} names no backend", given, hint)
        return None
    try:
        return ModelAllocation.parse(text)
    except AllocationError as error:
        for found in error.diagnostics:
            draft.error(f"{found.message} (in {text})", given, found.help)
        return None


def _role(
    allocation: ModelAllocation, given: Given, draft: Draft, found: list[Component], names: set[str]
) -> str | None:
    """The section of a component: by its name, else by what its backend does."""
    roles = ROLES[allocation.descriptor.role]
    name = allocation.name
    if name is not None and name in names:
        draft.error(f"the name {name} is given twice", given, "give each component a name of its own")
        return None
    if name is not None:
        names.add(name)
    if name in roles:
        key = str(name)
    elif any(name in others for others in ROLES.values()):
        verb = "trains" if allocation.descriptor.role == "train" else "generates"
        draft.error(f"{name} cannot be {allocation.backend}, which {verb}", given)
        return None
    else:
        taken = {component.key for component in found}
        key = roles[0]
        if key in taken:
            if name is None:
                message = f"a second component without a name would be {key}: {given.value}"
                draft.error(message, given, f"name it, as in {allocation.backend}[{roles[-1]}]:...")
            else:
                draft.left_out(
                    given, f"there is no section {name}; sections with a backend: actor, critic, ref, rollout"
                )
            return None
    if key in {component.key for component in found}:
        draft.error(f"{key} is given twice", given)
        return None
    return key
