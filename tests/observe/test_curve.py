"""The SVG of a curve: well-formed, and its points where the values say."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_like.observe import MetricsWriter
from areal_like.observe.curve import draw_curve, main, moving_average, points_of, ticks

SVG = "{http://www.w3.org/2000/svg}"


def circles(svg: str) -> list[tuple[float, float]]:
    return [(float(c.get("cx")), float(c.get("cy"))) for c in ElementTree.fromstring(svg).iter(f"{SVG}circle")]


def test_points_lie_where_they_should():
    svg = draw_curve([(1, 0.0), (2, 0.5), (3, 1.0)], title="a < b & c", y_label="reward", window=1)
    (x1, y1), (x2, y2), (x3, y3) = circles(svg)
    assert x2 - x1 == pytest.approx(x3 - x2) and y1 - y2 == pytest.approx(y2 - y3) and y1 > y2 > y3
    root = ElementTree.fromstring(svg)
    texts = [t.text for t in root.iter(f"{SVG}text")]
    assert texts[0] == "a < b & c" and {"0", "0.2", "1", "2", "3", "step", "reward"} <= set(texts)
    line = next(root.iter(f"{SVG}polyline")).get("points")
    assert [tuple(map(float, p.split(","))) for p in line.split()] == circles(
        svg
    )  # window 1: the line goes through them


def test_moving_average_by_hand():
    assert moving_average([1, 2, 3, 8], 3) == pytest.approx([1, 1.5, 2, 13 / 3])


def test_ticks_by_hand():
    assert ticks(0, 1) == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1.0])
    assert ticks(1, 13, 8) == pytest.approx([2, 4, 6, 8, 10, 12])
    assert ticks(5, 5) == [5]


@given(st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=30))
def test_any_values_give_a_picture_with_all_points_inside(values):
    svg = draw_curve(list(enumerate(values)), title="t", y_label="y")
    found = circles(svg)
    assert len(found) == len(values)
    assert all(0 <= x <= 640 and 0 <= y <= 300 for x, y in found)


def test_the_command(tmp_path, capsys):
    with MetricsWriter(tmp_path) as writer:
        for step in (1, 2, 3):
            writer.write(step, {"reward/mean": step / 10, "actor/loss": 0.1})
    assert main([str(tmp_path), str(tmp_path / "x.svg")]) == 0
    assert len(circles((tmp_path / "x.svg").read_text())) == 3
    for arguments, message in [
        (
            [str(tmp_path), "o.svg", "--figure", "reward/max"],
            "no step has the figure 'reward/max'; there are: actor/loss",
        ),
        ([str(tmp_path / "none.jsonl"), "o.svg"], "No such file"),
        ([str(tmp_path), "o.svg", "--window", "0"], "at least 1"),
    ]:
        with pytest.raises(SystemExit):
            main(arguments)
        assert message in capsys.readouterr().err


def test_steps_without_the_figure_are_skipped():
    steps = [{"step": 1, "a": None}, {"step": 2, "a": 0.0}, {"step": 3}]
    assert points_of(steps, "a") == [(2.0, 0.0)]
    with pytest.raises(ValueError, match="there are: a"):
        points_of(steps, "b")
