"""Mesh against Megatron-Core's own rank generators, made as `initialize_model_parallel` makes them."""

from __future__ import annotations

import os
from itertools import chain, combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_like.alloc import AllocationError, Coordinates, Mesh, ModelAllocation

os.environ.setdefault("OMP_NUM_THREADS", "1")
from megatron.core.parallel_state import RankGenerator

ORDER = "tp-cp-ep-dp-pp"


@st.composite
def meshes(draw: st.DrawFn) -> Mesh:
    sizes = {dim: draw(st.integers(1, 4)) for dim in ("tp", "cp", "dp", "pp")}
    stage = sizes["tp"] * sizes["cp"] * sizes["dp"]
    etp = draw(st.sampled_from([n for n in range(1, stage + 1) if stage % n == 0]))
    ep = draw(st.sampled_from([n for n in range(1, stage + 1) if stage % (n * etp) == 0]))
    return Mesh(**sizes, etp=etp, ep=ep)


def generators(mesh: Mesh) -> tuple[RankGenerator, RankGenerator]:
    """decoder_rank_generator and expert_decoder_rank_generator of megatron-core 0.19.2."""
    attention = RankGenerator(tp=mesh.tp, ep=1, dp=mesh.dp, pp=mesh.pp, cp=mesh.cp, order=ORDER)
    edp = mesh.world_size // (mesh.etp * mesh.ep * mesh.pp)
    expert = RankGenerator(tp=mesh.etp, ep=mesh.ep, dp=edp, pp=mesh.pp, cp=1, order=ORDER)
    return attention, expert


def names(*dims: str) -> list[str]:
    every = chain.from_iterable(combinations(dims, n) for n in range(1, len(dims) + 1))
    return ["-".join(group) for group in every]


ATTENTION = names("dp", "cp", "tp", "pp")  # single ones and compounds: dp-cp, cp-tp, tp-pp, dp-cp-tp ...
EXPERT = [name for name in names("tp", "ep", "dp", "pp") if "ep" in name]  # ep, tp-ep, tp-ep-pp ...
OWN_NAMES = {
    "etp": "tp",
    "edp": "dp",
    "etp-ep": "tp-ep",
    "etp-ep-pp": "tp-ep-pp",
    "edp-pp": "dp-pp",
    "etp-edp": "tp-dp",
}


@settings(max_examples=60, deadline=None)
@given(meshes(), st.data())
def test_groups_equal_megatrons(mesh: Mesh, data: st.DataObject) -> None:
    attention, expert = generators(mesh)
    theirs = {name: attention.get_ranks(name) for name in ATTENTION}
    theirs |= {name: expert.get_ranks(name) for name in EXPERT}
    theirs |= {ours: expert.get_ranks(name) for ours, name in OWN_NAMES.items()}
    rank = data.draw(st.integers(0, mesh.world_size - 1))
    for name, groups in theirs.items():
        assert [list(group) for group in mesh.groups(name)] == groups, name
        assert mesh.size(name) == len(groups[0])
        [own] = [group for group in groups if rank in group]
        assert mesh.group(name, rank) == tuple(own)


@given(meshes())
def test_coordinates_are_places_in_megatrons_groups(mesh: Mesh) -> None:
    attention, expert = generators(mesh)
    for dims, generator, prefix in (
        (("tp", "cp", "dp", "pp"), attention, ""),
        (("tp", "ep", "dp", "pp"), expert, "e"),
    ):
        for dim in dims:
            ours = dim if dim in ("ep", "pp") else prefix + dim
            for group in generator.get_ranks(dim):
                assert [getattr(mesh.coordinates(rank), ours) for rank in group] == list(range(len(group)))


@given(meshes())
def test_rank_and_coordinates_are_inverse(mesh: Mesh) -> None:
    seen = set()
    for rank in range(mesh.world_size):
        at = mesh.coordinates(rank)
        assert mesh.rank(dp=at.dp, tp=at.tp, pp=at.pp, cp=at.cp) == rank
        seen.add(at)
    assert len(seen) == mesh.world_size


def test_by_hand() -> None:
    mesh = ModelAllocation.parse("megatron:d2t2p2").mesh()
    assert list(mesh.groups("tp")) == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert list(mesh.groups("pp")) == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert mesh.coordinates(5) == Coordinates(dp=0, tp=1, pp=1, cp=0, ep=0, etp=0, edp=1)
    folded = ModelAllocation.parse("megatron:(attn:d1p2t4|ffn:t2e2)").mesh()
    assert folded.edp == 1
    assert folded.group("ep", 5) == (5, 7) and folded.group("tp-ep", 5) == folded.group("etp-ep", 5) == (4, 5, 6, 7)


def test_a_large_world_is_answered_without_building_it() -> None:
    import time

    mesh = ModelAllocation.parse("megatron:d65536t8p2e64").mesh()
    start = time.perf_counter()
    for rank in range(0, mesh.world_size, mesh.world_size // 500):
        mesh.coordinates(rank)
        assert rank in mesh.group("tp-ep", rank) and rank in mesh.group("tp-pp", rank)
    assert next(mesh.groups("tp")) == tuple(range(8))
    assert time.perf_counter() - start < 2


@pytest.mark.parametrize("name", ["dq", "", "tp-", "tp-tp", "cp-ep", "etp-tp", "TP", "edp-dp"])
def test_unknown_groups(name: str) -> None:
    with pytest.raises(AllocationError, match="AL110"):
        Mesh(tp=2).group(name, 0)


def test_what_is_not_in_the_mesh() -> None:
    mesh = Mesh(tp=2, dp=2)
    for wrong in (
        lambda: mesh.coordinates(4),
        lambda: mesh.group("tp", -1),
        lambda: mesh.rank(tp=2),
        lambda: Mesh(tp=0),
    ):
        with pytest.raises(AllocationError, match="AL110"):
            wrong()
    with pytest.raises(AllocationError, match="AL104"):
        Mesh(tp=2, ep=3)
    with pytest.raises(AllocationError, match="did you mean tp"):
        mesh.size("tpp")


def test_picture() -> None:
    assert ModelAllocation.parse("megatron:d2t2p2").mesh().render().splitlines() == [
        "pp 0",
        "        tp 0  tp 1",
        "  dp 0     0     1",
        "  dp 1     2     3",
        "pp 1",
        "        tp 0  tp 1",
        "  dp 0     4     5",
        "  dp 1     6     7",
    ]


@given(meshes())
def test_picture_holds_every_rank_where_its_coordinates_say(mesh: Mesh) -> None:
    experts = mesh.ep * mesh.etp > 1
    for pp, block in enumerate(_blocks(mesh.render(limit=10**6))):
        for row, line in enumerate(block):
            left, _, right = line.partition("|")
            ranks = [int(x) for x in left.split()[2 if mesh.cp == 1 else 4 :]]
            for tp, rank in enumerate(ranks):
                assert mesh.rank(pp=pp, tp=tp, cp=row % mesh.cp, dp=row // mesh.cp) == rank
            for column, rank in enumerate(int(x) for x in right.split()[2:]):
                at = mesh.coordinates(rank)
                assert (at.pp, at.edp, at.ep, at.etp) == (pp, row, column // mesh.etp, column % mesh.etp)
        assert ("|" in block[0]) is experts


def _blocks(text: str) -> list[list[str]]:
    """The lines of each stage, without its two headings."""
    blocks: list[list[str]] = []
    for line in text.splitlines():
        if not line.startswith(" "):
            blocks.append([])
        else:
            blocks[-1].append(line)
    return [block[1:] for block in blocks]


def test_picture_of_a_large_mesh_is_short() -> None:
    text = str(Mesh(tp=8, dp=1000, pp=10))
    assert len(text.splitlines()) < 20 and "... and 992 more rows" in text and "... and 9 more stages" in text
