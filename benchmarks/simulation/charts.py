"""Line charts as self-contained SVG files."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

_COLORS = ("#3b6fb6", "#c8553d", "#588b3a", "#8a5aa8", "#b58a1b", "#4a9a9a")
_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 640, 340, 70, 20, 46, 52


def line_chart(
    title: str,
    x_label: str,
    y_label: str,
    ticks: Sequence[str],
    series: Mapping[str, Sequence[float | None]],
) -> str:
    """One line a series over evenly spaced, named places; y starts at 0; a None leaves a gap."""
    values = [v for line in series.values() for v in line if v is not None]
    step = _round_step(max(values, default=1.0) or 1.0)
    top = step * math.ceil((max(values, default=1.0) or 1.0) / step)
    slot = (_WIDTH - _LEFT - _RIGHT) / len(ticks)

    def x_of(index: int) -> float:
        return _LEFT + slot * (index + 0.5)

    def y_of(value: float) -> float:
        return _HEIGHT - _BOTTOM - (_HEIGHT - _BOTTOM - _TOP) * value / top

    shapes = [_text(_LEFT, 18, title, "start", 14)]
    for k in range(round(top / step) + 1):
        y = y_of(k * step)
        shapes.append(f'<line x1="{_LEFT}" y1="{y:.1f}" x2="{_WIDTH - _RIGHT}" y2="{y:.1f}" stroke="#ddd"/>')
        shapes.append(_text(_LEFT - 6, y + 4, f"{k * step:g}", "end"))
    shapes += [_text(x_of(i), _HEIGHT - _BOTTOM + 18, tick, "middle") for i, tick in enumerate(ticks)]
    shapes.append(_text((_WIDTH + _LEFT) / 2, _HEIGHT - 12, x_label, "middle"))
    shapes.append(f'<g transform="translate(16 {_HEIGHT / 2:.0f}) rotate(-90)">{_text(0, 0, y_label, "middle")}</g>')
    for index, (name, line) in enumerate(series.items()):
        color = _COLORS[index % len(_COLORS)]
        for run in _runs(line):
            points = " ".join(f"{x_of(i):.1f},{y_of(v):.1f}" for i, v in run)
            shapes.append(f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="2"/>')
            shapes += [
                f'<circle cx="{x_of(i):.1f}" cy="{y_of(v):.1f}" r="3.5" fill="{color}">'
                f"<title>{escape(name)}, {escape(ticks[i])}: {v:.4g}</title></circle>"
                for i, v in run
            ]
        shapes.append(f'<rect x="{_LEFT + 150 * index}" y="26" width="12" height="12" fill="{color}"/>')
        shapes.append(_text(_LEFT + 150 * index + 17, 36, name, "start"))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="system-ui, sans-serif" '
        f'role="img" aria-label="{escape(title)}"><rect width="100%" height="100%" fill="#fff"/>{"".join(shapes)}</svg>\n'
    )


def _runs(line: Sequence[float | None]) -> list[list[tuple[int, float]]]:
    runs: list[list[tuple[int, float]]] = [[]]
    for i, value in enumerate(line):
        if value is None:
            runs.append([])
        else:
            runs[-1].append((i, value))
    return [run for run in runs if run]


def _round_step(high: float) -> float:
    """A round number that divides [0, high] into about five parts."""
    raw = high / 5
    magnitude = 10.0 ** math.floor(math.log10(raw))
    return next(magnitude * m for m in (1, 2, 5, 10) if magnitude * m >= raw)


def _text(x: float, y: float, text: str, anchor: str, size: int = 12) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" fill="#333">{escape(text)}</text>'
