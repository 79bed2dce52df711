"""report.html: one file that shows what a run did, readable without a network and without a script.

The page holds no JavaScript at all, ours or anybody's: folding is <details>, the theme switch is CSS, charts are SVG,
and its Content-Security-Policy forbids scripts and every load. What models wrote is shown as text (autoescape).
A part that the run has not left behind yet is named as missing, a damaged samples file by its line; the rest is shown.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from marsrl.trainer.report import charts
from marsrl.trainer.report.metrics import MetricsRow, read_metrics
from marsrl.trainer.report.palette import activity_color, agents_of, engine_name, series_colors
from marsrl.trainer.report.samples_log import sample_files
from marsrl.trainer.report.summary import compared, load_summary, of_other_inputs
from marsrl.trainer.report.trace import read_trace
from marsrl.trainer.report.trees import Trajectory, WholeSamples, shorten, trajectories_around
from marsrl.trainer.runs.directory import RunDirectory, write_atomically

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ChartPlan:
    """A chart: its title, its unit, and the metrics on it, as prefix + anything + suffix.

    of_policies: where a run has several policies, their names stand before the prefix. middle: a regular expression of what is
    between prefix and suffix. A metric with <name>/low and <name>/high beside it has its interval around it.
    """

    title: str
    unit: str
    prefix: str
    suffix: str = ""
    is_stacked: bool = False
    of_policies: bool = False
    is_optional: bool = False  # left out where nothing was recorded
    middle: str = ".*"

    def label(self, name: str) -> str | None:
        """What the metric is called on the chart; None where it is not on it."""
        policy, _, rest = (
            name.partition("/") if self.of_policies and not name.startswith(self.prefix) else ("", "", name)
        )
        if name == "timing_s/total" or not (rest.startswith(self.prefix) and rest.endswith(self.suffix)):
            return None
        middle = rest[len(self.prefix) : len(rest) - len(self.suffix)].strip("/")
        if not re.fullmatch(self.middle, middle):
            return None
        return "/".join(part for part in (policy, middle) if part) or name.rpartition("/")[2]


@dataclass(frozen=True, slots=True)
class Chart:
    plan: ChartPlan
    svg: Markup | None  # None: not one finite value was recorded
    legend: tuple[tuple[str, str], ...]  # (series, colour class)
    is_zero: bool = False  # in every step


PLANS = (
    ChartPlan("Reward", "mean per agent", "reward/", "/mean"),
    ChartPlan("Groups without advantage", "share of samples with advantage 0", "advantage/", "/fraction_zero"),
    ChartPlan("Verdicts", "share of 'wrong' among readable verdicts", "verdicts/", "/fraction_wrong"),
    ChartPlan("Response length", "mean, tokens", "response_length/", "/mean"),
    ChartPlan("Entropy", "nats", "actor/entropy", of_policies=True),
    ChartPlan("Gradient norm", "before clipping; of an agent: of its share", "actor/", "grad_norm", of_policies=True),
    ChartPlan("Gradient spikes", "1: above 5 running medians", "actor/", "grad_spikes", of_policies=True),
    ChartPlan("Masked well-mastered tokens", "share", "mpt/fraction_masked", of_policies=True),
    ChartPlan(
        "Trainer and rollout probabilities", "|p_train - p_rollout|", "train_rollout/prob_diff_", of_policies=True
    ),
    ChartPlan("Tokens", "per second", "perf/tokens_per_s"),
    ChartPlan("Engines' time per step, by agent", "seconds", "cost/", "/seconds", is_optional=True),
    ChartPlan("Staleness", "policy versions", "rollout/staleness_", is_optional=True),
    ChartPlan("Evaluation", "share of held-out problems", "eval/", is_optional=True, middle="(?!tokens$|spent$)[^/]+"),
    ChartPlan("Cost per step", "in the currency of policies.*.price", "cost/", "/spent", is_optional=True),
    ChartPlan("Time per step", "seconds", "timing_s/", is_stacked=True),
)


def write_report(directory: str | Path) -> Path:
    """Write report.html of a run, finished or not, and return its path.

    Raises:
        ValueError: the directory is not there, or a file of it other than samples is damaged; says which.
    """
    run = RunDirectory(Path(directory))
    if not run.path.is_dir():
        raise ValueError(f"report: {run.path} is not there; give the directory of a run (it holds config.yaml)")
    summary = load_summary(run.summary) if run.summary.exists() else None
    rows = read_metrics(run.metrics) if run.metrics.exists() else []
    spans = read_trace(run.trace) if run.trace.exists() else []
    files = sample_files(run)
    agents = agents_of(run.config)
    rows_of_agents = compared(summary.before, summary.after) if summary else compared(None, None)
    picture, colors, num_left_out = charts.timeline(spans) if spans else (None, {}, 0)
    trajectories: list[tuple[str, list[Trajectory]]] = []
    read = WholeSamples()
    if files:
        trajectories.append((f"First step ({min(files)})", trajectories_around(files, last=False, read=read)))
    if len(files) > 1:
        trajectories.append((f"Last step ({max(files)})", trajectories_around(files, last=True, read=read)))
    for damage in read.damages.values():
        logger.warning("report: %s: what comes before that line is shown", damage)
    page = (
        page_environment(Path(__file__).parent)
        .get_template("report.html.j2")
        .render(
            name=run.path.resolve().name,
            summary=summary,
            agents=rows_of_agents,
            headline=charts.headline(rows_of_agents) if summary and (summary.before or summary.after) else None,
            last_step=rows[-1].step if rows else None,
            charts=[each for plan in PLANS if (each := _chart(plan, rows, agents)).svg or not plan.is_optional],
            num_non_finite=sum(value is None for row in rows for value in row.values.values()),
            timeline=picture,
            span_colors=colors,
            num_left_out=num_left_out,
            trajectories=trajectories,
            damages=list(read.damages.values()),
            config=run.config.read_text("utf-8") if run.config.exists() else None,
        )
    )
    write_atomically(run.report, page.encode("utf-8"))
    return run.report


def page_environment(folder: Path) -> Environment:
    """Templates of a folder, and the top of every page that lies here."""
    environment = Environment(
        # os.fspath: templates lie beside the code, wherever the package was installed
        loader=FileSystemLoader([os.fspath(folder), os.fspath(Path(__file__).parent)]),
        autoescape=True,  # always, not by file name: Jinja's own choice leaves *.j2 unescaped
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: charts.visible(value) if type(value) is str else value,
    )
    environment.filters["shorten"] = shorten
    environment.filters["engine_name"] = engine_name
    environment.tests["of_other_inputs"] = lambda pair: of_other_inputs(*pair)
    return environment


def _chart(plan: ChartPlan, rows: Sequence[MetricsRow], agents: Sequence[str]) -> Chart:
    names = dict.fromkeys(name for row in rows for name in row.values)
    on_it = {name: label for name in names if (label := plan.label(name)) is not None}
    series = {
        label: [(row.step, row.values[name]) for row in rows if name in row.values] for name, label in on_it.items()
    }
    series = {name: points for name, points in series.items() if any(value is not None for _, value in points)}
    if not series:
        return Chart(plan, None, ())
    bands = {label: band for name, label in on_it.items() if (band := _band(name, rows))}
    is_zero = all(value == 0 for points in series.values() for _, value in points)
    if plan.is_stacked:
        colors = {name: activity_color(name) for name in series}
        drawn = charts.stacked(series, plan.title)
    else:
        colors = series_colors(series, agents)
        drawn = charts.curves(series, plan.title, colors=colors, bands=bands)
    is_told = len(series) > 1 or any(name in agents for name in series)
    return Chart(plan, drawn, tuple(colors.items()) if is_told else (), is_zero)


def _band(name: str, rows: Sequence[MetricsRow]) -> list[tuple[int, float, float]]:
    """(step, low, high) where an interval was recorded."""
    found = [(row.step, row.values.get(f"{name}/low"), row.values.get(f"{name}/high")) for row in rows]
    return [(step, low, high) for step, low, high in found if low is not None and high is not None]
