"""Every legal layout of up to 64 ranks, and drawn ones of up to 4,096, in every group that Megatron-Core makes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import cache

from hypothesis import given, settings
from hypothesis import strategies as st

from areal_like.alloc import Mesh

os.environ.setdefault("OMP_NUM_THREADS", "1")
from megatron.core.parallel_state import RankGenerator

ORDER = "tp-cp-ep-dp-pp"
# The tokens for which `initialize_model_parallel` of megatron-core 0.19.2 creates groups: our name, theirs.
ATTENTION = {name: name for name in ("tp", "cp", "dp", "pp", "dp-cp", "tp-pp", "tp-cp", "tp-dp", "tp-dp-cp")}
EXPERT = {"ep": "ep", "etp": "tp", "edp": "dp", "etp-ep": "tp-ep", "etp-ep-pp": "tp-ep-pp"}
Groups = list[tuple[int, ...]]


@cache
def attention_groups(tp: int, cp: int, dp: int, pp: int) -> dict[str, Groups]:
    """decoder_rank_generator of `initialize_model_parallel`."""
    generator = RankGenerator(tp=tp, ep=1, dp=dp, pp=pp, cp=cp, order=ORDER)
    return {ours: list(map(tuple, generator.get_ranks(theirs))) for ours, theirs in ATTENTION.items()}


@cache
def expert_groups(etp: int, ep: int, edp: int, pp: int) -> dict[str, Groups]:
    """expert_decoder_rank_generator of `initialize_model_parallel`."""
    generator = RankGenerator(tp=etp, ep=ep, dp=edp, pp=pp, cp=1, order=ORDER)
    return {ours: list(map(tuple, generator.get_ranks(theirs))) for ours, theirs in EXPERT.items()}


@cache
def factors(number: int, count: int) -> list[tuple[int, ...]]:
    """All ways to write a number as a product of `count` ordered factors."""
    if count == 1:
        return [(number,)]
    divisors = (n for n in range(1, number + 1) if number % n == 0)
    return [(first, *rest) for first in divisors for rest in factors(number // first, count - 1)]


def layouts(world: int) -> Iterator[Mesh]:
    """Every mesh of so many ranks."""
    for tp, cp, dp, pp in factors(world, 4):
        for etp, ep, _ in factors(world // pp, 3):
            yield Mesh(tp=tp, cp=cp, dp=dp, pp=pp, etp=etp, ep=ep)


def test_every_layout_of_up_to_64_ranks() -> None:
    count = 0
    for world in range(1, 65):
        for mesh in layouts(world):
            theirs = attention_groups(mesh.tp, mesh.cp, mesh.dp, mesh.pp)
            theirs = theirs | expert_groups(mesh.etp, mesh.ep, world // (mesh.pp * mesh.etp * mesh.ep), mesh.pp)
            for name, groups in theirs.items():
                assert list(mesh.groups(name)) == groups, (mesh, name)
            count += 1
    # Of each stage both grids split the ranks into three ordered factors, independently.
    assert count == sum(len(factors(w // p, 3)) ** 2 for w in range(1, 65) for p in divisors(w))


def divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


@st.composite
def large_meshes(draw: st.DrawFn) -> Mesh:
    """Up to 4,096 ranks; sizes need not be powers of two."""
    sizes, room = {}, 4096
    for dim in draw(st.permutations(["tp", "cp", "dp", "pp"])):
        sizes[dim] = draw(st.integers(1, min(room, 64)))
        room //= sizes[dim]
    stage = sizes["tp"] * sizes["cp"] * sizes["dp"]
    etp = draw(st.sampled_from(divisors(stage)))
    return Mesh(**sizes, etp=etp, ep=draw(st.sampled_from(divisors(stage // etp))))


@settings(max_examples=25, deadline=None)
@given(large_meshes(), st.data())
def test_drawn_layouts_of_up_to_4096_ranks(mesh: Mesh, data: st.DataObject) -> None:
    theirs = attention_groups.__wrapped__(mesh.tp, mesh.cp, mesh.dp, mesh.pp)
    theirs |= expert_groups.__wrapped__(mesh.etp, mesh.ep, mesh.edp, mesh.pp)
    rank = data.draw(st.integers(0, mesh.world_size - 1))
    for name, groups in theirs.items():
        assert list(mesh.groups(name)) == groups, name
        assert [mesh.group(name, rank)] == [group for group in groups if rank in group], name
