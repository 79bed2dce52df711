"""Line charts as PNG pictures, drawn with Pillow at twice their nominal size."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_COLORS = ("#3b6fb6", "#c8553d", "#588b3a", "#8a5aa8", "#b58a1b", "#4a9a9a")
_INK, _GRID = "#333333", "#dddddd"
_SCALE = 2  # pixels of the file for one of the layout below
_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 640, 340, 70, 20, 52, 52


def write_line_chart(
    path: Path,
    title: str,
    x_label: str,
    y_label: str,
    ticks: Sequence[str],
    series: Mapping[str, Sequence[float | None]],
) -> None:
    """One line a series over evenly spaced, named places; y starts at 0; a None leaves a gap.

    Raises:
        ModuleNotFoundError: Pillow is not installed.
    """
    from PIL import Image

    canvas = _Canvas(Image.new("RGB", (_WIDTH * _SCALE, _HEIGHT * _SCALE), "white"))
    values = [v for line in series.values() for v in line if v is not None]
    step = _round_step(max(values, default=1.0) or 1.0)
    top = step * math.ceil((max(values, default=1.0) or 1.0) / step)
    slot = (_WIDTH - _LEFT - _RIGHT) / len(ticks)

    def place(index: int, value: float) -> tuple[float, float]:
        return _LEFT + slot * (index + 0.5), _HEIGHT - _BOTTOM - (_HEIGHT - _BOTTOM - _TOP) * value / top

    canvas.text((_LEFT, 14), title, "lm", 14)
    for k in range(round(top / step) + 1):
        y = place(0, k * step)[1]
        canvas.line([(_LEFT, y), (_WIDTH - _RIGHT, y)], _GRID, 1)
        canvas.text((_LEFT - 6, y), f"{k * step:g}", "rm")
    for index, tick in enumerate(ticks):
        canvas.text((place(index, 0)[0], _HEIGHT - _BOTTOM + 13), tick, "mm")
    canvas.text(((_WIDTH + _LEFT) / 2, _HEIGHT - 14), x_label, "mm")
    canvas.text((_LEFT - 6, _TOP - 12), y_label, "rm")
    for index, (name, line) in enumerate(series.items()):
        color, left = _COLORS[index % len(_COLORS)], _LEFT + 150 * index
        for run in _runs(line):
            points = [place(i, value) for i, value in run]
            canvas.line(points, color, 2)
            for point in points:
                canvas.dot(point, 3.5, color)
        canvas.line([(left, 34), (left + 12, 34)], color, 6)
        canvas.text((left + 18, 34), name, "lm")
    canvas.image.save(path, optimize=True)


class _Canvas:
    """An image that is drawn on in units of the layout."""

    def __init__(self, image: Any) -> None:
        from PIL import ImageDraw

        self.image = image
        self._draw = ImageDraw.Draw(image)

    def line(self, points: Sequence[tuple[float, float]], color: str, width: float) -> None:
        if len(points) > 1:
            scaled = [(x * _SCALE, y * _SCALE) for x, y in points]
            self._draw.line(scaled, fill=color, width=round(width * _SCALE), joint="curve")

    def dot(self, center: tuple[float, float], radius: float, color: str) -> None:
        (x, y), r = center, radius * _SCALE
        self._draw.ellipse([x * _SCALE - r, y * _SCALE - r, x * _SCALE + r, y * _SCALE + r], fill=color)

    def text(self, at: tuple[float, float], words: str, anchor: str, size: int = 12) -> None:
        """anchor: where `at` lies in the text, in Pillow's letters (lm: left end, half height)."""
        from PIL import ImageFont

        font = ImageFont.load_default(size * _SCALE)
        self._draw.text((at[0] * _SCALE, at[1] * _SCALE), words, fill=_INK, font=font, anchor=anchor)


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
