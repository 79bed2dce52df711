"""The report's pictures as inline SVG: estimates with error bars, curves, stacked bars, a timeline.

Every piece of text goes through Markup.format, which escapes it. Colours are those of palette.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from markupsafe import Markup

from marsrl.trainer.report.palette import activity_color, number_text, series_colors
from marsrl.trainer.report.summary import Estimate
from marsrl.trainer.report.trace import MARKS, Span

MAX_SPANS = 3000  # a browser draws this many rectangles at once without stutter

Points = Sequence[tuple[float, float | None]]
Bands = Mapping[str, Sequence[tuple[float, float, float]]]
"""By series: (x, low, high)."""

_WIDTH, _HEIGHT = 480, 220
_RIGHT, _TOP, _BOTTOM = 12, 10, 30


def visible(text: str) -> str:
    """Text in which nothing hides: control characters as pictures, direction overrides and broken surrogates named."""
    return text.translate(_VISIBLE)


_NAMED = (
    *range(0x7F, 0xA0),
    0x61C,
    0x200E,
    0x200F,
    *range(0x2028, 0x202F),
    *range(0x2066, 0x206A),
    0xFEFF,
    0xFFFE,
    0xFFFF,
)
_VISIBLE = {c: chr(0x2400 + c) for c in range(32) if chr(c) not in "\n\t"}
_VISIBLE |= {c: f"⟨U+{c:04X}⟩" for c in (*_NAMED, *range(0xD800, 0xE000))}


def headline(rows: Sequence[tuple[str, Estimate | None, Estimate | None]]) -> Markup:
    """Bars in [0, 1], before above after, with the 95% interval as a whisker."""
    row, bar, left, width = 62, 18, 96, 520
    shapes = []
    for tick in range(0, 101, 25):
        x = left + width * tick / 100
        shapes.append(_line(x, 4, x, row * len(rows), "grid"))
        shapes.append(_text(x, row * len(rows) + 16, f"{tick}%", "tick middle"))
    for index, (name, before, after) in enumerate(rows):
        top = index * row + 10
        shapes.append(_text(left - 10, top + 24, name, "label end"))
        for k, (when, value) in enumerate((("before", before), ("after", after))):
            if value is None or value.mean is None:
                continue
            y = top + k * (bar + 3)
            title = f"{name} {when}: {value.mean:.3f} ({value.low:.3f} to {value.high:.3f}), n = {value.n}"
            shapes.append(_rectangle(left, y, width * value.mean, bar, when, title))
            low, high, middle = left + width * value.low, left + width * value.high, y + bar / 2
            shapes.append(_line(low, middle, high, middle, "whisker"))
            shapes.extend(_line(x, middle - 4, x, middle + 4, "whisker") for x in (low, high))
            shapes.append(_text(high + 8, y + 13, f"{100 * value.mean:.1f}", "value"))
    return _svg(left + width + 60, row * len(rows) + 24, shapes, "before and after")


def curves(
    series: Mapping[str, Points],
    label: str,
    *,
    colors: Mapping[str, str] | None = None,
    bands: Bands | None = None,
    axis: str = "step",
) -> Markup:
    """One line a series; a missing value breaks the line. At least one finite value is needed.

    colors: by series; default: in order. bands: intervals around the lines. axis: what x is; steps are whole numbers.
    """
    bands, colors = bands or {}, colors or series_colors(series)
    steps = [step for points in series.values() for step, value in points if value is not None]
    values = [value for points in series.values() for _, value in points if value is not None]
    values += [bound for band in bands.values() for _, *bounds in band for bound in bounds]
    low, high = _padded(min(values), max(values))
    x_of = _scale(min(steps), max(steps), _left(low, high), _WIDTH - _RIGHT)
    y_of = _scale(low, high, _HEIGHT - _BOTTOM, _TOP)
    shapes = _axes(min(steps), max(steps), low, high, whole=axis == "step")
    for name, points in series.items():
        color = colors[name]
        if band := bands.get(name):
            outline = [(x, bottom) for x, bottom, _ in band] + [(x, top) for x, _, top in reversed(band)]
            path = " ".join(f"{x_of(x):.1f},{y_of(y):.1f}" for x, y in outline)
            shapes.append(Markup('<polygon class="band {}" points="{}"/>').format(color, path))
            whiskers = band if len(band) <= 80 else ()
            shapes.extend(
                _line(x_of(x), y_of(bottom), x_of(x), y_of(top), f"line {color}") for x, bottom, top in whiskers
            )
        for run in _runs(points):
            path = " ".join(f"{x_of(step):.1f},{y_of(value):.1f}" for step, value in run)
            shapes.append(Markup('<polyline class="line {}" points="{}"/>').format(color, path))
        shown = [(step, value) for step, value in points if value is not None]
        for step, value in shown if len(shown) <= 80 else ():
            title = f"{name}, {axis} {step:,.6g}: {value:.4g}"
            shapes.append(
                Markup('<circle class="dot {}" cx="{:.1f}" cy="{:.1f}" r="2.5"><title>{}</title></circle>').format(
                    color, x_of(step), y_of(value), visible(title)
                )
            )
    return _svg(_WIDTH, _HEIGHT, shapes, label)


def stacked(series: Mapping[str, Points], label: str) -> Markup:
    """A bar a step, cut into the series: seconds of activities; a missing value adds nothing."""
    by_step: dict[float, dict[str, float]] = {}
    for name, points in series.items():
        for step, value in points:
            by_step.setdefault(step, {})[name] = max(0.0, value or 0.0)
    first, last = min(by_step), max(by_step)
    high = max(sum(parts.values()) for parts in by_step.values()) or 1.0
    y_of = _scale(0.0, high, _HEIGHT - _BOTTOM, _TOP)
    left = _left(0.0, high)
    slot = (_WIDTH - left - _RIGHT) / (last - first + 1)
    shapes = _axes(first, last, 0.0, high, slot / 2)
    for step, parts in by_step.items():
        below = 0.0
        for name in series:
            value = parts.get(name, 0.0)
            if value > 0:
                top, bottom = y_of(below + value), y_of(below)
                x, title = left + (step - first + 0.1) * slot, f"step {step:g}, {name}: {value:.3g} s"
                shapes.append(_rectangle(x, top, 0.8 * slot, bottom - top, activity_color(name), title))
                below += value
    return _svg(_WIDTH, _HEIGHT, shapes, label)


def timeline(spans: Sequence[Span]) -> tuple[Markup, dict[str, str], int]:
    """Lanes over time, and a line over all of them where a step or a stage begins.

    Returns the picture, {span name: colour class}, and how many short spans were left out.
    """
    marks = [span for span in spans if span.lane.startswith(f"{MARKS}/")]
    spans = [span for span in spans if not span.lane.startswith(f"{MARKS}/")]
    lanes = list(dict.fromkeys(sorted((span.lane for span in spans), key=lambda lane: (len(lane), lane))))
    lanes.sort(key=lambda lane: lane.partition("/")[0])
    colors = {span.name: activity_color(span.name) for span in spans}
    shown = sorted(spans, key=lambda span: span.start_s - span.end_s)[:MAX_SPANS]
    row, left, width = 24, 110, 990
    start = min(span.start_s for span in [*spans, *marks])
    end = max(span.end_s for span in [*spans, *marks])
    x_of = _scale(start, end, left, left + width)
    shapes = []
    for tick in _ticks(start, end, 5):
        shapes.append(_line(x_of(tick), 0, x_of(tick), row * len(lanes), "grid"))
        shapes.append(_text(x_of(tick), row * len(lanes) + 16, f"{number_text(tick)} s", "tick middle"))
    for index, lane in enumerate(lanes):
        shapes.append(_text(left - 8, row * index + 16, lane, "label end"))
    for span in shown:
        arguments = ", ".join(f"{key} {value}" for key, value in span.arguments.items())
        title = f"{span.name} {arguments}: {span.start_s:.3f} to {span.end_s:.3f} s".replace(" :", ":")
        x, y = x_of(span.start_s), row * lanes.index(span.lane) + 3
        shapes.append(_rectangle(x, y, max(0.7, x_of(span.end_s) - x), row - 6, colors[span.name], title))
    for mark in marks[:MAX_SPANS]:
        x, kind = x_of(mark.start_s), mark.lane.partition("/")[2]
        line = '<line class="mark {}" x1="{:.2f}" y1="0" x2="{:.2f}" y2="{}"><title>{}</title></line>'
        shapes.append(Markup(line).format(kind, x, x, row * len(lanes), visible(f"{mark.name}: {mark.start_s:.3f} s")))
    return _svg(left + width + 30, row * len(lanes) + 24, shapes, "timeline"), colors, len(spans) - len(shown)


def _runs(points: Points) -> list[list[tuple[float, float]]]:
    """The stretches without a missing value."""
    runs: list[list[tuple[float, float]]] = [[]]
    for step, value in points:
        if value is None:
            runs.append([])
        else:
            runs[-1].append((step, value))
    return [run for run in runs if run]


def _axes(
    first: float, last: float, low: float, high: float, inset: float = 0.0, *, whole: bool = True
) -> list[Markup]:
    y_of = _scale(low, high, _HEIGHT - _BOTTOM, _TOP)
    left = _left(low, high)
    x_of = _scale(first, last, left + inset, _WIDTH - _RIGHT - inset)
    shapes = []
    for tick in _ticks(low, high, 3):
        shapes.append(_line(left, y_of(tick), _WIDTH - _RIGHT, y_of(tick), "grid"))
        shapes.append(_text(left - 6, y_of(tick) + 4, number_text(tick), "tick end"))
    for tick in _ticks(first, last, 4):
        if not whole or tick == int(tick):
            shapes.append(_text(x_of(tick), _HEIGHT - 12, number_text(tick), "tick middle"))
    return shapes


def _left(low: float, high: float) -> float:
    """Room for the labels of the y axis, which are 11 px high."""
    return 14 + 7 * max(5, *(len(number_text(tick)) for tick in _ticks(low, high, 3)))


def _ticks(low: float, high: float, count: int) -> list[float]:
    """Round numbers in [low, high], `count` to two and a half times as many steps of 1, 2 or 5 apart."""
    if high <= low:
        return [low]
    raw = (high - low) / count
    magnitude = 10.0 ** math.floor(math.log10(raw))
    step = max(magnitude * m for m in (1, 2, 5) if magnitude * m <= raw * (1 + 1e-9))
    first = math.ceil(low / step - 1e-9)
    return [k * step for k in range(first, math.floor(high / step + 1e-9) + 1)]


def _padded(low: float, high: float) -> tuple[float, float]:
    """Some room around the data; starts at 0 where the data is positive and comes near it."""
    if low >= 0 and low <= 0.5 * high:
        return 0.0, high * 1.05
    room = 0.08 * (high - low) or 0.1 * abs(high) or 1.0
    return low - room, high + room


class _scale:
    """A linear map of [low, high] to [to_low, to_high]; one value maps to the middle."""

    def __init__(self, low: float, high: float, to_low: float, to_high: float) -> None:
        self.low, self.high, self.to_low, self.to_high = low, high, to_low, to_high

    def __call__(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low) if self.high > self.low else 0.5
        return self.to_low + share * (self.to_high - self.to_low)


def _svg(width: float, height: float, shapes: Sequence[Markup], label: str) -> Markup:
    return Markup('<svg viewBox="0 0 {:.0f} {:.0f}" role="img" aria-label="{}">{}</svg>').format(
        width, height, visible(label), Markup("").join(shapes)
    )


def _line(x1: float, y1: float, x2: float, y2: float, kind: str) -> Markup:
    return Markup('<line class="{}" x1="{:.1f}" y1="{:.1f}" x2="{:.1f}" y2="{:.1f}"/>').format(kind, x1, y1, x2, y2)


def _text(x: float, y: float, text: str, kind: str) -> Markup:
    return Markup('<text class="{}" x="{:.1f}" y="{:.1f}">{}</text>').format(kind, x, y, visible(text))


def _rectangle(x: float, y: float, width: float, height: float, kind: str, title: str) -> Markup:
    return Markup(
        '<rect class="{}" x="{:.2f}" y="{:.2f}" width="{:.2f}" height="{:.2f}" rx="1.5"><title>{}</title></rect>'
    ).format(kind, x, y, width, height, visible(title))
