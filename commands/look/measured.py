"""A run's measurements: charts, timeline, lifetimes of samples, speed compared with the plan, warnings."""

from __future__ import annotations

import heapq
import itertools
import json
import re
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from marsrl.commands.look.catalog import Catalog
from marsrl.commands.look.comparison import AXES, progress
from marsrl.commands.look.palette import COLORS, activity_color, series_colors
from marsrl.trainer.runs.directory import RunDirectory
from marsrl.trainer.visible import Key

_MOST_POINTS = 1000  # maximum points of a curve, about the width of a screen
_MOST_SPANS = 3000  # maximum rectangles that a browser draws smoothly
_MOST_PROBLEMS, _MOST_COLUMNS = 100, 24  # maximum size of the table of problems
_LAST_STEPS = 50  # number of last steps whose median is the measured speed

_WATCHED = (  # (prefix, suffix, limit, meaning) of unusual metrics
    ("", "grad_spikes", 0.0, "the gradient norm was above 5 times its running median, or not finite"),
    ("response_length/", "/clip_ratio", 0.5, "over half of an agent's samples reached the maximum length"),
    ("reward/", "/missing", 0.0, "samples without a reward"),
    ("metrics/non_finite", "", 0.0, "metrics that were not finite"),
    ("rollout/finish_error", "", 0.0, "samples that an engine gave up on"),
)


@dataclass(frozen=True, slots=True)
class ChartPlan:
    """A chart: title, unit, a pattern that matches its metrics, and their meaning. The pattern's groups label the curves.

    A metric with <name>/low and <name>/high is drawn with that interval.
    """

    title: str
    unit: str
    pattern: str
    about: str = ""
    is_activities: bool = False  # coloured as in the timeline

    def label(self, name: str) -> str | None:
        """Return the label of the metric on the chart; None if it is not plotted."""
        found = re.fullmatch(self.pattern, name)
        return found and ("/".join(filter(None, found.groups())) or name.rpartition("/")[2])


_OF_POLICY = "(?:([^/]+)/)?"  # a policy's name before its metrics, in runs with several policies
PLANS = (
    ChartPlan("Reward", "reward", "reward/(.+)/mean", "mean per agent"),
    ChartPlan("Groups without advantage", "share", "advantage/(.+)/fraction_zero", "share of samples with advantage 0"),
    ChartPlan("Verdicts", "share", "verdicts/(.+)/fraction_wrong", "share of 'wrong' among readable verdicts"),
    ChartPlan("Response length", "tokens", "response_length/(.+)/mean", "mean"),
    ChartPlan("Entropy", "nats", f"{_OF_POLICY}actor/entropy"),
    ChartPlan(
        "Gradient norm",
        "norm",
        f"{_OF_POLICY}actor/(?:(.+)/)?grad_norm",
        "before clipping; for an agent, the norm of its share",
    ),
    ChartPlan(
        "Gradient spikes", "spikes", f"{_OF_POLICY}actor/(?:(.+)/)?grad_spikes", "1: above 5 times the running median"
    ),
    ChartPlan("Masked well-mastered tokens", "share", f"{_OF_POLICY}mpt/fraction_masked"),
    ChartPlan(
        "Trainer and rollout probabilities",
        "difference",
        f"{_OF_POLICY}train_rollout/prob_diff_(.+)",
        "|p_train - p_rollout|",
    ),
    ChartPlan("Tokens", "tokens per second", "perf/tokens_per_s"),
    ChartPlan("Engines' time per step, by agent", "seconds", "cost/(.+)/seconds"),
    ChartPlan("Staleness", "policy versions", "rollout/staleness_(.+)"),
    ChartPlan("Evaluation", "share", "eval/(?!tokens$)([^/]+)", "share of held-out problems"),
    ChartPlan("Time per step", "seconds", "timing_s/(?!total$)(.+)", is_activities=True),
)


def charts(catalog: Catalog) -> list[dict[str, Any]]:
    """Return the charts of PLANS for which the run has metrics, then one chart for every other metric.

    is_zero: True if all series are 0 in every step. has_band: True if the series has an interval (<key>/low to <key>/high).
    """
    curves, agents, left = catalog.curves, catalog.team, dict.fromkeys(catalog.curves)
    descriptions: list[dict[str, Any]] = []
    for plan in PLANS:
        labels = {name: label for name in curves if (label := plan.label(name)) is not None}
        for name in labels:
            left.pop(name, None)
        used_labels = labels.values()
        colors = (
            {label: activity_color(label) for label in used_labels}
            if plan.is_activities
            else series_colors(used_labels, agents)
        )
        series = [
            {
                "key": Key(name),
                "label": label,
                "color": colors[label],
                "has_band": {f"{name}/low", f"{name}/high"} <= curves.keys(),
            }
            for name, label in labels.items()
        ]
        if series:
            is_zero = all(value == 0 for name in labels for _, value in curves[name])
            descriptions.append(
                {"title": plan.title, "unit": plan.unit, "about": plan.about, "series": series}
                | {"is_main": True, "is_zero": is_zero}
            )
    for name in left:
        series = [{"key": Key(name), "label": name, "color": COLORS[0], "has_band": False}]
        descriptions.append(
            {"title": name, "unit": "", "about": "", "series": series, "is_main": False, "is_zero": False}
        )
    return descriptions


def curves(catalog: Catalog, name: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Return curves of at most 1,000 points each. every: number of steps that a point averages; missing values are
    left out."""
    return [_thinned(catalog.curves.get(each, [])) for each in name]


def axes(catalog: Catalog) -> dict[str, list[float]]:
    """Return the x axes of charts, each at the same 1,000 steps or fewer: step, trained tokens, hours (evaluations excluded)."""
    rows: dict[int, dict[str, float | None]] = {}
    for name, curve in catalog.curves.items():
        for step, value in curve:
            rows.setdefault(step, {})[name] = value
    places = list(progress(sorted(rows.items())))
    chosen = places[:: -(-len(places) // _MOST_POINTS) or 1]
    return {axis: [getattr(place, axis) for place in [*chosen, *places[-1:]]] for axis in AXES}


def problems(catalog: Catalog, agent: str = "") -> dict[str, Any]:
    """Return the 100 problems that an agent ("": any) played in the most steps, over at most 24 equal ranges of steps.

    columns: (first step, last step) of each range. rows: problems, with a cell (samples, mean reward, share right) or None per
    column.
    """
    if (span := catalog.sampled) is None:
        return {"columns": [], "rows": []}
    width = -(-(span[1] - span[0] + 1) // _MOST_COLUMNS)
    starts = range(span[0], span[1] + 1, width)
    rows: dict[str, list[Any]] = {}
    for name, column, *cell in catalog.problems(agent, _MOST_PROBLEMS, span[0], width):
        rows.setdefault(name, [None] * len(starts))[column] = cell
    return {
        "columns": [(start, min(start + width - 1, span[1])) for start in starts],
        "rows": [{"problem": name, "key": Key(name), "cells": cells} for name, cells in rows.items()],
    }


def _thinned(points: Sequence[tuple[int, float | None]]) -> dict[str, Any]:
    every = -(-len(points) // _MOST_POINTS) or 1
    steps, values = [], []
    for begin in range(0, len(points), every):
        some = points[begin : begin + every]
        known = [value for _, value in some if value is not None]
        steps.append(some[len(some) // 2][0])
        values.append(sum(known) / len(known) if known else None)
    return {"steps": steps, "values": values, "every": every}


def spans(catalog: Catalog, low: float | None = None, high: float | None = None) -> dict[str, Any]:
    """Return the longest spans that overlap [low, high] seconds of the trace (None: its beginning or end), with colours.

    spans: (lane, name, start_s, end_s, arguments). end: end of the trace. num_left_out: number of shorter spans omitted.
    """
    trace = catalog.trace
    begin, end = min((s.start_s for s in trace), default=0.0), max((s.end_s for s in trace), default=0.0)
    low, high = begin if low is None else low, end if high is None else high
    inside = [s for s in trace if s.start_s <= high and s.end_s >= low]
    shown = heapq.nlargest(_MOST_SPANS, inside, key=lambda s: s.end_s - s.start_s)
    return {
        "low": low,
        "high": high,
        "end": end,
        "spans": [(s.lane, s.name, s.start_s, s.end_s, dict(s.arguments)) for s in shown],
        "num_left_out": len(inside) - len(shown),
        "colors": {s.name: activity_color(s.name) for s in shown},
    }


def life(catalog: Catalog, rollout: str) -> dict[str, Any]:
    """Return lifetimes of each agent's samples of a rollout instance, in seconds of the trace.

    A sample's lifetime begins when its oldest version was published and ends with the step that trained it. Tokens have versions,
    not times, so this is the earliest possible beginning. A time is None if it is not in the trace.
    """
    rows = catalog.tree(rollout)
    trace = sorted(catalog.trace, key=lambda s: s.end_s, reverse=True)
    publishes = [s for s in trace if s.name == "publish" and "version" in s.arguments]
    published = {s.arguments["version"]: s.end_s for s in publishes}  # newest first, so that the earliest publish wins
    begins = {s.name: s.start_s for s in trace if s.name.startswith("step ")}
    last = trace[0].end_s if trace else None
    lives = Counter((row.agent, row.step, row.oldest) for row in rows)
    colors = series_colors(dict.fromkeys(row.agent for row in rows), catalog.team)
    return {
        "rollout": rollout,
        "lives": [
            {
                "agent": agent,
                "step": step,
                "version": oldest,
                "samples": num,
                "start": begins.get(f"step {step}") if oldest not in published else published[oldest],
                "end": begins.get(f"step {step + 1}", last),
                "color": colors[agent],
            }
            for (agent, step, oldest), num in lives.items()
        ],
    }


def speed(catalog: Catalog) -> dict[str, Any]:
    """Return the seconds of a step's parts: measured (median of the last 50 steps) and predicted (plan.json of the run).

    ages: (agent, age in versions at training, number of samples).
    """

    def median(name: str) -> float | None:
        values = [value for _, value in catalog.curves.get(name, ())[-_LAST_STEPS:] if value is not None]
        return statistics.median(values) if values else None

    return {
        "measured": {part: median(f"timing_s/{part}") for part in ("rollout", "step", "publish", "total")},
        "tokens_per_s": median("perf/tokens_per_s"),
        "planned": _planned(catalog.run),
        "ages": catalog.ages,
    }


def _planned(run: RunDirectory) -> dict[str, Any]:
    """Return the predicted seconds by part, or None and the reason why there is no prediction."""
    path = run.path / "plan.json"
    try:
        plan = json.loads(path.read_bytes())
        return {"parts": plan["seconds"], "gpus": f"{plan['num_gpus']} x {plan['gpu']}", "why_not": "nothing fits"}
    except FileNotFoundError:
        return {
            "why_not": "the run has no plan.json: marsrl plan --config RUN/config.yaml --gpus N --json RUN/plan.json"
        }
    except (ValueError, KeyError, TypeError) as error:
        return {"why_not": f"{path} is not what marsrl plan --json writes ({error!r})"}


def warnings(catalog: Catalog) -> list[dict[str, Any]]:
    """Return the run's warnings, unusual metrics, and unreadable files; newest first."""
    entries = [{"step": step, "kind": kind, "text": text} for step, kind, text in catalog.warnings]
    for name, curve in catalog.curves.items():
        for prefix, suffix, limit, meaning in _WATCHED:
            if name.startswith(prefix) and name.endswith(suffix):
                points = [(step, value) for step, value in curve if value is not None and value > limit]
                entries += _stretches(name, points, meaning)
    return sorted(entries, key=lambda each: -1 if each["step"] is None else each["step"], reverse=True)


def _stretches(name: str, points: Sequence[tuple[int, float]], meaning: str) -> list[dict[str, Any]]:
    """Return one warning for each stretch of consecutive steps."""
    entries = []
    for _, numbered in itertools.groupby(enumerate(points), key=lambda each: each[1][0] - each[0]):
        stretch = [point for _, point in numbered]
        text = f"{meaning} ({name} up to {max(value for _, value in stretch):.4g})"
        entries.append({"step": stretch[-1][0], "first_step": stretch[0][0], "kind": name, "text": text})
    return entries
