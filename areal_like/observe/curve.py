"""Draw a figure of a run over its steps, as an SVG for a README: `python -m areal_like.observe.curve RUN OUT.svg`."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from areal_like.observe.metrics import read_metrics

_WIDTH, _HEIGHT = 640, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 16, 36, 44


def points_of(steps: Sequence[dict[str, Any]], name: str) -> list[tuple[float, float]]:
    """(step, value) of each step that has the figure.

    Raises:
        ValueError: none has; it says which figures there are.
    """
    points = [(float(s["step"]), float(s[name])) for s in steps if isinstance(s.get(name), int | float)]
    if not points:
        have = sorted({key for s in steps for key, value in s.items() if value is not None} - {"step", "time"})
        raise ValueError(f"no step has the figure {name!r}; there are: {', '.join(have) or 'none'}")
    return points


def moving_average(values: Sequence[float], window: int) -> list[float]:
    """The mean of each value and up to `window - 1` before it."""
    return [math.fsum(values[max(0, i + 1 - window) : i + 1]) / min(window, i + 1) for i in range(len(values))]


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers from `low` to `high`, about `count`: multiples of 1, 2 or 5 times a power of ten."""
    if not high > low:
        return [low]
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= raw * 0.8)
    first = math.ceil(low / step - 1e-9)
    return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]


def draw_curve(points: Sequence[tuple[float, float]], *, title: str, y_label: str, window: int = 3) -> str:
    """An SVG: each value a dot, their moving average over `window` steps a line. Legible on white and on black."""
    xs, ys = [x for x, _ in points], [y for _, y in points]
    x_low, x_high = _range(xs, 0.0)
    y_low, y_high = _range([*ys, 0.0] if 0 <= min(ys) <= 1 else ys, 0.05)

    def place(x: float, y: float) -> tuple[float, float]:
        across = _LEFT + (x - x_low) / (x_high - x_low) * (_WIDTH - _LEFT - _RIGHT)
        down = _HEIGHT - _BOTTOM - (y - y_low) / (y_high - y_low) * (_HEIGHT - _TOP - _BOTTOM)
        return round(across, 2), round(down, 2)

    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" '
        f'font-size="12" role="img" aria-label="{escape(title, {chr(34): "&quot;"})}">',
        f'<text x="{_LEFT}" y="20" font-size="14" fill="#888">{escape(title)}</text>',
    ]
    for y in ticks(y_low, y_high):
        _, down = place(x_low, y)
        out.append(
            f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{down}" y2="{down}" stroke="#888" stroke-opacity=".3"/>'
        )
        out.append(f'<text x="{_LEFT - 8}" y="{down + 4}" text-anchor="end" fill="#888">{y:.6g}</text>')
    for x in ticks(x_low, x_high, 8):
        if x == int(x):
            across, _ = place(x, y_low)
            out.append(
                f'<text x="{across}" y="{_HEIGHT - _BOTTOM + 18}" text-anchor="middle" fill="#888">{int(x)}</text>'
            )
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    out.append(f'<text x="{middle}" y="{_HEIGHT - 8}" text-anchor="middle" fill="#888">step</text>')
    centre = (_TOP + _HEIGHT - _BOTTOM) / 2
    out.append(
        f'<text x="14" y="{centre}" text-anchor="middle" fill="#888" transform="rotate(-90 14 {centre})">'
        f"{escape(y_label)}</text>"
    )
    line = " ".join(f"{a},{b}" for a, b in map(place, xs, moving_average(ys, window)))
    out.append(f'<polyline points="{line}" fill="none" stroke="#2f81f7" stroke-width="2"/>')
    out += [f'<circle cx="{a}" cy="{b}" r="3" fill="#2f81f7" fill-opacity=".5"/>' for a, b in map(place, xs, ys)]
    return "\n".join([*out, "</svg>", ""])


def _range(values: Sequence[float], margin: float) -> tuple[float, float]:
    low, high = min(values), max(values)
    if low == high:
        return low - 0.5, high + 0.5
    return low - (margin * (high - low) if low != 0 else 0.0), high + margin * (high - low)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="areal_like.observe.curve", description="Draw a figure of a run as an SVG.")
    parser.add_argument("run", type=Path, help="a metrics.jsonl, or the folder of a run")
    parser.add_argument("out", type=Path, help="the SVG to write")
    parser.add_argument("--figure", default="reward/mean", help="the figure to draw (default: %(default)s)")
    parser.add_argument("--title", help="the heading (default: the figure)")
    parser.add_argument("--window", type=int, default=3, help="steps of the moving average (default: %(default)s)")
    options = parser.parse_args(arguments)
    if options.window < 1:
        parser.error(f"--window is {options.window}; it is at least 1")
    try:
        points = points_of(read_metrics(options.run), options.figure)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    title = options.title or f"{options.figure}, mean of {options.window} steps"
    options.out.write_text(
        draw_curve(points, title=title, y_label=options.figure, window=options.window), encoding="utf-8"
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
