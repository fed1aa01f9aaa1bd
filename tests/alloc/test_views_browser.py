"""The HTML view in a real browser: what lights up, and what is listed, are the Mesh's groups."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from chromium import Browser, find_chromium

from areal_like.alloc import ModelAllocation
from areal_like.alloc.views import MeshView, ModelParts, Nodes, render

CHROMIUM = find_chromium()
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here")
GRIDS = {"attention": ("tp", "cp", "dp", "pp"), "experts": ("etp", "ep", "edp", "pp")}
MODEL = ModelParts("Some-MoE", 12, (((0, 6),), ((6, 6),)), experts=8)


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    assert CHROMIUM is not None
    with Browser(CHROMIUM, tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest.fixture
def page(tab: Browser, tmp_path: Path) -> Iterator[Callable[..., MeshView]]:
    """`page("megatron:d2", "#rank=1")` opens the view of an allocation."""

    def show(text: str, fragment: str = "", **parts: object) -> MeshView:
        view = MeshView(text, ModelAllocation.parse(text).mesh(), **parts)  # type: ignore[arg-type]
        file = tmp_path / "mesh.html"
        file.write_text(render(view, "html"), encoding="utf-8")
        tab.open("about:blank")
        tab.open(file.as_uri() + fragment)
        return view

    yield show
    assert tab.problems == []


def listed(tab: Browser) -> dict[str, list[int]]:
    """The groups in the panel."""
    script = "[...document.querySelectorAll('#panel .group')].map(g => [g.dataset.group,"
    script += " [...g.querySelectorAll('[data-go]')].map(b => Number(b.dataset.go))])"
    return dict(tab.run(script))


def lit(tab: Browser, grid: str) -> dict[int, str]:
    """The cells of a grid that are lit, and by which dimension; the chosen one by "me"."""
    script = f"[...document.querySelectorAll('.{grid} .c')].map(c => [Number(c.dataset.r),"
    script += " [...c.classList].find(n => n === 'me' || n.startsWith('g-'))]).filter(x => x[1])"
    return {rank: name.removeprefix("g-") for rank, name in tab.run(script)}


@pytest.mark.parametrize(
    ("text", "ranks"),
    [
        ("megatron:d2t2p2", (0, 5, 7)),
        ("megatron:(attn:d2p2t4c2|ffn:t2e4)", (0, 13, 31)),
        ("megatron:d6t2e3", (4, 11)),
        ("fsdp:d1", (0,)),
    ],
)
def test_groups_are_the_meshs(tab: Browser, page: Callable[..., MeshView], text: str, ranks: tuple[int, ...]) -> None:
    view = page(text)
    for rank in ranks:
        tab.run(f"choose({rank})")
        assert listed(tab) == {name: list(view.mesh.group(name, rank)) for name in view.groups()}
        for grid in GRIDS if view.has_experts else ("attention",):
            expected = {r: dim for dim in GRIDS[grid] for r in view.mesh.group(dim, rank)} | {rank: "me"}
            assert lit(tab, grid) == expected


def test_click_keys_and_address(tab: Browser, page: Callable[..., MeshView]) -> None:
    page("megatron:(attn:d4p2t2|ffn:t2e4)", nodes=Nodes(2, 8), model=MODEL)
    chosen = "document.querySelector('#panel h2').firstChild.textContent"
    assert tab.run(chosen) == "Pick a rank" and lit(tab, "attention") == {}
    tab.click("#a5")
    assert tab.run(chosen) == "Rank 5" and tab.run("location.hash") == "#rank=5"
    assert tab.run("document.activeElement.id") == "a5"
    assert tab.run("document.querySelector('#holds').innerText").splitlines() == [
        "layers 0\u20135, embedding of 12 layers",
        "experts 4\u20135 of 8, 1/2 of each",
    ]
    assert "node 0, GPU 5" in tab.run("document.querySelector('#panel h2').textContent")
    for key, rank in (
        ("ArrowDown", 7),
        ("ArrowLeft", 6),
        ("ArrowLeft", 6),  # the row ends
        ("ArrowDown", 6),  # the stage ends
        ("PageDown", 14),
        ("End", 15),
        ("Home", 14),
        ("PageUp", 6),
    ):
        tab.press(key)
        assert (tab.run(chosen), tab.run("document.activeElement.id")) == (f"Rank {rank}", f"a{rank}"), key
    assert tab.run("document.querySelector('#said').textContent").startswith("Rank 6.")
    tab.click("#e11")
    tab.press("ArrowRight")
    assert tab.run(chosen) == "Rank 12" and tab.run("document.activeElement.id") == "e12"
    tab.click("#panel [data-group=ep] [data-go='8']")
    assert tab.run(chosen) == "Rank 8"
    tab.press("Escape")
    assert tab.run(chosen) == "Pick a rank" and lit(tab, "experts") == {} and tab.run("location.hash") == ""
    tab.run("location.hash = '#rank=3'")
    tab.run("new Promise(done => setTimeout(done, 50))")
    assert tab.run(chosen) == "Rank 3"


def test_the_number_field(tab: Browser, page: Callable[..., MeshView]) -> None:
    page("megatron:d2t2p2", "#rank=2")
    assert tab.run("document.querySelector('#number').value") == "2"
    tab.run("document.querySelector('#number').value = 7")
    tab.click("#choose button")
    assert lit(tab, "attention") == {6: "tp", 5: "dp", 3: "pp", 7: "me"}
    tab.run("choose(8)")
    assert "no rank 8" in tab.run("document.querySelector('#said').textContent")
    assert lit(tab, "attention")[7] == "me"
    tab.click("#clear")
    assert lit(tab, "attention") == {}


def test_names_and_focus(tab: Browser, page: Callable[..., MeshView]) -> None:
    """One stop of the tabulator a grid, every rank has a name, and every button too."""
    page("megatron:d64t8e8p2", "#rank=777")
    tab.send("Accessibility.enable")
    cells: list[str] = []
    deadline = time.monotonic() + 20
    while not cells and time.monotonic() < deadline:  # the tree is built in the background
        tree = tab.send("Accessibility.getFullAXTree")["nodes"]
        cells = [n["name"]["value"] for n in tree if n.get("role", {}).get("value") == "gridcell"]
    tab.send("Accessibility.disable")
    assert sorted(cells, key=int) == [str(r) for r in range(1024) for _ in range(2)]
    assert all(n["name"]["value"] for n in tree if n.get("role", {}).get("value") in ("button", "grid", "spinbutton"))
    stops = "[...document.querySelectorAll('.c')].filter(c => c.tabIndex === 0).map(c => c.id)"
    assert sorted(tab.run(stops)) == ["a777", "e777"]


def test_a_world_of_4096_ranks_is_usable(tab: Browser, page: Callable[..., MeshView]) -> None:
    view = page("megatron:(attn:d32p16t8|ffn:e64)", nodes=Nodes(512, 8))
    assert view.mesh.world_size == 4096
    assert tab.run("document.querySelectorAll('.attention .c').length") == 4096
    before = processor_seconds(tab)
    for rank in range(0, 4000, 200):
        tab.run(f"choose({rank}); document.body.offsetHeight")
    seconds = (processor_seconds(tab) - before) / 20
    assert seconds < 0.2
    groups = listed(tab)
    assert groups["tp"] == list(view.mesh.group("tp", 3800)) and groups["ep"] == list(view.mesh.group("ep", 3800))


def processor_seconds(tab: Browser) -> float:
    """Time that the page's main thread has computed for, whatever else the machine does."""
    tab.send("Performance.enable", timeDomain="threadTicks")
    metrics = {metric["name"]: metric["value"] for metric in tab.send("Performance.getMetrics")["metrics"]}
    return float(metrics["TaskDuration"])


def test_a_world_of_131072_ranks_is_shown_in_parts(tab: Browser, page: Callable[..., MeshView]) -> None:
    view = page("megatron:d1024t8p16e64", "#rank=131000")
    assert view.mesh.world_size == 131072
    assert 0 < tab.run("document.querySelectorAll('.attention .c').length") <= 4096
    group = view.mesh.group("tp", 131000)
    assert [r for r, dim in lit(tab, "attention").items() if dim in ("tp", "me")] == list(group)
    assert listed(tab)["dp"] == list(view.mesh.group("dp", 131000))[:64]
    tab.click("#panel [data-group=dp] [data-all]")
    assert listed(tab)["dp"] == list(view.mesh.group("dp", 131000))
    tab.click("#panel [data-group=dp] [data-go]")
    assert lit(tab, "attention")[view.mesh.group("dp", 131000)[0]] == "me"
    tab.click("nav [data-move='1']")
    assert tab.run("document.querySelector('.attention .c').dataset.r") == "256"
