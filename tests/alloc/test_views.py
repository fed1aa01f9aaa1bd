"""Text, JSON and SVG of a mesh, against its coordinates."""

from __future__ import annotations

import json
import re
import time
import xml.etree.ElementTree as ET
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_like.alloc import AllocationError, Mesh, ModelAllocation
from areal_like.alloc.views import MeshView, ModelParts, Nodes, render

GRIDS = (("tp", "cp", "dp", "pp"), ("etp", "ep", "edp", "pp"))
MODEL = ModelParts("Some-MoE", 12, (((0, 3), (6, 3)), ((3, 3), (9, 3))), experts=8, dense_layers=(0, 1))
FOLDED = "megatron:(attn:d4p2t2|ffn:t2e4)"


def view(text: str, **parts: object) -> MeshView:
    return MeshView(text, ModelAllocation.parse(text).mesh(), **parts)  # type: ignore[arg-type]


def test_text_of_a_rank() -> None:
    shown = render(view(FOLDED, nodes=Nodes(2, 8), model=MODEL, rank=5)).splitlines()
    assert shown == [
        "megatron:(attn:d4p2t2|ffn:t2e4): 16 ranks on 2 nodes of 8 GPUs, Some-MoE",
        "",
        "rank 5 (node 0, GPU 5): tp 1 cp 0 dp 2 pp 0; experts: etp 1 ep 2 edp 0 pp 0",
        "  layers 0-2 and 6-8, embedding (of 12 layers)",
        "  experts 4-5 of 8, 1/2 of each; no experts in layers 0-1",
        "",
        "    tp  [4 5]  share every layer, in this node",
        "    dp  [1 3 5 7]  hold the same weights for other sequences, in this node",
        "    pp  [5 13]  hold the other layers, over 2 nodes",
        " tp-pp  [4 5 12 13]  over 2 nodes",
        "   etp  [4 5]  share each expert, in this node",
        "    ep  [1 3 5 7]  hold the other experts, in this node",
        "etp-ep  [0 1 2 3 4 5 6 7]  in this node",
    ]


def test_text_of_nodes_and_model() -> None:
    shown = render(view(FOLDED, nodes=Nodes(2, 8), model=MODEL))
    assert shown.startswith(render(view(FOLDED)).replace("16 ranks", "16 ranks on 2 nodes of 8 GPUs, Some-MoE"))
    rows = [line.split() for line in shown.splitlines()]
    assert ["node", "ranks", "tp", "dp", "pp", "etp", "ep"] in rows
    assert ["1", "8-15", "0-1", "0-3", "1", "0-1", "0-3"] in rows
    assert ["pp", "2", "8", "2"] in rows and ["tp", "2", "8", "1"] in rows
    assert "  pp 1: layers 3-5 and 9-11, output layer" in shown
    assert "  ep 3: experts 6-7, each rank 1/2 of each expert" in shown


def test_groups_that_lie_on_one_or_two_nodes() -> None:
    rows = [line.split() for line in render(view("megatron:d4t3", nodes=Nodes(3, 4))).splitlines()]
    assert ["tp", "3", "4", "1", "to", "2"] in rows  # [0 1 2] on one node, [3 4 5] on two


def test_a_rank_alone() -> None:
    assert render(view("megatron:d1", rank=0)).splitlines()[-1] == "alone in every group"


def test_json_is_complete() -> None:
    shown = view(FOLDED, nodes=Nodes(2, 8), model=MODEL)
    content = json.loads(render(shown, "json"))
    mesh = shown.mesh
    assert content["groups"] == {name: [list(g) for g in mesh.groups(name)] for name in shown.groups()}
    assert content["sizes"] == {"tp": 2, "cp": 1, "dp": 4, "pp": 2, "etp": 2, "ep": 4, "edp": 1}
    assert content["nodes"] == {"count": 2, "gpus": 8} and content["world_size"] == 16
    assert content["model"]["stages"] == [[[0, 2], [6, 8]], [[3, 5], [9, 11]]]
    assert "tp-pp" in content["groups"] and "cp" not in content["groups"]


def test_json_of_a_rank() -> None:
    shown = view(FOLDED, nodes=Nodes(2, 8), model=MODEL, rank=13)
    rank = json.loads(render(shown, "json"))["rank"]
    assert rank["coordinates"] == {"tp": 1, "cp": 0, "dp": 2, "pp": 1, "etp": 1, "ep": 2, "edp": 0}
    assert rank["groups"] == {name: list(shown.mesh.group(name, 13)) for name in shown.groups()}
    assert (rank["node"], rank["gpu"], rank["layers"], rank["experts"]) == (1, 5, [[3, 5], [9, 11]], [4, 5])
    assert not rank["embedding"] and rank["output_layer"]


def test_a_plain_view_says_nothing_of_nodes_or_models() -> None:
    content = json.loads(render(view("megatron:d2"), "json"))
    assert content["nodes"] is None and content["model"] is None


@st.composite
def small_views(draw: st.DrawFn) -> MeshView:
    sizes = {dim: draw(st.integers(1, 3)) for dim in ("tp", "cp", "dp", "pp")}
    stage = sizes["tp"] * sizes["cp"] * sizes["dp"]
    etp = draw(st.sampled_from([n for n in range(1, stage + 1) if stage % n == 0]))
    ep = draw(st.sampled_from([n for n in range(1, stage + 1) if stage % (n * etp) == 0]))
    mesh = Mesh(**sizes, etp=etp, ep=ep)
    rank = draw(st.none() | st.integers(0, mesh.world_size - 1))
    return MeshView("any", mesh, rank=rank)


def svg_grids(shown: MeshView) -> list[list[tuple[int, float, float, str]]]:
    """For every grid of the picture its (rank, x, y, classes), panels in order."""
    root = ET.fromstring(render(shown, "svg"))
    grids = []
    for group in root.findall(".//{*}g"):
        cells = [e for e in group if e.tag.endswith("rect") and "cell" in e.get("class", "")]
        numbers = [e for e in group if e.tag.endswith("text") and "num" in e.get("class", "")]
        assert len(cells) == len(numbers)
        if cells:
            places = ((float(c.get("x", "")), float(c.get("y", "")), c.get("class", "")) for c in cells)
            grids.append([(int(n.text or ""), *p) for n, p in zip(numbers, places, strict=True)])
    return grids


@settings(max_examples=40, deadline=None)
@given(small_views())
def test_svg_has_every_rank_where_its_coordinates_say(shown: MeshView) -> None:
    mesh, grids = shown.mesh, svg_grids(shown)
    kinds = 2 if shown.has_experts else 1
    assert len(grids) == kinds * mesh.pp
    for (pp, kind), cells in zip(product(range(mesh.pp), range(kinds)), grids, strict=True):
        stage = mesh.world_size // mesh.pp
        assert sorted(rank for rank, *_ in cells) == list(range(pp * stage, (pp + 1) * stage))
        columns: dict[tuple[int, ...], set[float]] = {}
        for rank, x, _, classes in cells:
            at = mesh.coordinates(rank)
            columns.setdefault((at.tp,) if kind == 0 else (at.ep, at.etp), set()).add(x)
            assert classes.split()[1:] == [] or classes.split()[1:] == [mark(shown, rank, GRIDS[kind])]
            if shown.rank is not None:
                assert (classes.split()[1:] == []) is (mark(shown, rank, GRIDS[kind]) == "")
        if stage // max(mesh.tp, mesh.ep * mesh.etp) <= 32:  # one band: a column is one index
            assert all(len(x) == 1 for x in columns.values())
            assert len({x for xs in columns.values() for x in xs}) == len(columns)


def mark(shown: MeshView, rank: int, grid: tuple[str, ...]) -> str:
    """The dimension of the group that a rank shares with the chosen one: the only coordinate in which they differ."""
    mesh = shown.mesh
    if shown.rank is None:
        return f"s{mesh.coordinates(rank).tp * 8 // mesh.tp}" if "tp" in grid else ""
    at, chosen = mesh.coordinates(rank), mesh.coordinates(shown.rank)
    differ = [dim for dim in grid if getattr(at, dim) != getattr(chosen, dim)]
    return "me" if not differ else differ[0] if len(differ) == 1 else ""


def test_svg_shows_nodes_model_and_text() -> None:
    picture = render(view(FOLDED, nodes=Nodes(4, 4), model=MODEL, rank=5), "svg")
    words = " ".join(ET.fromstring(picture).itertext())
    assert "layers 3-5 and 9-11, output layer" in words and "experts 4-5 of 8" in words
    assert "node 3" in words and "hold the other layers: 5 13" in words
    assert 'class="node"' in picture and "prefers-color-scheme:dark" in picture


def test_lines_between_nodes() -> None:
    """Above rows 2, 4 ... of the attention grid (4 GPUs are 2 rows of 2), left of column 4 of the expert grid."""
    picture = ET.fromstring(render(view("megatron:d4t2e8", nodes=Nodes(2, 4)), "svg"))
    attention, experts = (
        e.get("d", "")
        for e in picture.findall(".//{*}path")
        if (e.get("d") or "").count("M") and "-4h" not in e.get("d", "")
    )
    assert len(re.findall("h", attention)) == 2 and "v" not in attention
    assert len(re.findall("v", experts)) == 1 and "h" not in experts


@pytest.mark.parametrize("style", ["svg", "html"])
@pytest.mark.parametrize("text", ["megatron:d512t8", "megatron:d4096t8p16e64", "megatron:d1024t8p128"])
def test_pictures_of_large_worlds_are_small_and_quick(text: str, style: str) -> None:
    start = time.process_time()
    picture = render(view(text, rank=1234, nodes=Nodes(1 << 20, 8)), style)
    assert time.process_time() - start < 2 and len(picture) < 2_000_000
    assert style == "svg" or len(picture) < 60_000
    if style == "svg":
        cells = len(re.findall('class="cell ', picture))
        assert 1234 < cells <= 2 * 4096 and 'class="cell me"' in picture


def test_a_row_too_long_for_a_picture() -> None:
    for style in ("svg", "html"):
        with pytest.raises(AllocationError, match="AL106"):
            render(view("megatron:d65536e32768"), style)
    assert render(view("megatron:d65536e32768"))


def test_html_needs_nothing_from_outside() -> None:
    page = render(view(FOLDED, nodes=Nodes(2, 8), model=MODEL), "html")
    assert not re.search(r"https?:|//[a-z]|@import|\burl\(|\bsrc=", page)
    assert re.findall(r'href="([^"]*)"', page) == ["data:,"]
    assert "default-src 'none'" in page


def test_html_escapes_names() -> None:
    model = ModelParts("</script><b>@SCRIPT@", 2, (((0, 2),),))
    page = render(MeshView("megatron:d1", Mesh(), model=model), "html")
    assert "</script><b>" not in page
    data = re.search(r'<script id="mesh" type="application/json">(.*?)</script>', page)
    assert data and json.loads(data[1])["model"]["name"] == "</script><b>@SCRIPT@"
    assert ET.fromstring(render(MeshView("megatron:d1", Mesh(), model=model), "svg")) is not None


def test_what_does_not_fit() -> None:
    with pytest.raises(AllocationError, match=r"AL401.*16 ranks do not fit on 3 nodes of 4 GPUs") as caught:
        view(FOLDED, nodes=Nodes(3, 4))
    assert "--nodes 4x4" in str(caught.value)
    with pytest.raises(AllocationError, match="AL110"):
        view(FOLDED, rank=16)
