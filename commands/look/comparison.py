"""Results of runs and evaluations on disk, and their differences on shared problems."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from marsrl.commands.look.palette import COLORS
from marsrl.trainer.evaluate.draws import EVALUATION, Draw, read_draws
from marsrl.trainer.evaluate.intervals import bootstrap, ratio
from marsrl.trainer.report.cost import COLUMNS, MEANING, episode_costs
from marsrl.trainer.report.metrics import read_metrics
from marsrl.trainer.report.summary import Estimate, Evaluation, of_other_inputs, read_saved, wilson_interval
from marsrl.trainer.runs.directory import RunDirectory
from marsrl.trainer.runs.existing_run import OF_THE_START, flat

_NO_PARTS = ("timing_s/total", "timing_s/evaluate")
AXES = ("step", "tokens", "hours")


@dataclass(frozen=True, slots=True)
class Place:
    """Progress of a run: steps, trained tokens, and hours without evaluations."""

    step: int = 0
    tokens: float = 0.0
    hours: float = 0.0


@dataclass(frozen=True, slots=True)
class Compared:
    """Data of one run, or of one evaluation alone.

    rewards: mean reward over all agents, by progress.
    draws: every draw of a problem in the last evaluation.
    settings: values by dotted key; a setting that changed on resume reads "200, then 22".
    """

    evaluations: tuple[tuple[Place, Evaluation], ...]
    rewards: tuple[tuple[Place, float], ...]
    draws: tuple[Draw, ...]
    settings: Mapping[str, str]

    @property
    def last(self) -> Evaluation:
        return self.evaluations[-1][1]


@dataclass(frozen=True, slots=True)
class Difference:
    """Mean difference over num_problems common problems, with a 95% interval; with one problem, both ends equal the mean."""

    mean: float
    low: float
    high: float
    num_problems: int

    @property
    def is_clear(self) -> bool:
        """True if 0 is outside the interval."""
        return self.num_problems > 1 and (self.low > 0 or self.high < 0)

    def __str__(self) -> str:
        interval = f"{self.low:+.3f} to {self.high:+.3f}" if self.num_problems > 1 else "one problem, no interval"
        return f"{self.mean:+.3f} ({interval})"


def read_compared(path: Path) -> Compared:
    """Read a run's directory, or the folder of an evaluation (`marsrl evaluate --out`).

    Raises ValueError if the path is neither, has no evaluation, or contains a damaged file.
    """
    run = RunDirectory(path)
    if (path / EVALUATION).is_file():
        return Compared(((Place(), _evaluation(path)),), (), tuple(read_draws(path)), _settings(run))
    if not run.config.is_file():
        raise ValueError(f"{path} is neither a run (it has no config.yaml) nor an evaluation (no {EVALUATION})")
    positions, rewards = {0: Place()}, []
    logged = {row.step: row.values for row in read_metrics(run.metrics)} if run.metrics.exists() else {}
    for position in progress(logged.items()):
        positions[position.step] = position
        if (reward := logged[position.step].get("reward/all/mean")) is not None:
            rewards.append((position, reward))
    end = positions[max(positions)]
    names = (each.parent.name.removeprefix("step_") for each in run.evaluations.glob(f"step_*/{EVALUATION}"))
    steps = sorted(int(name) for name in names if name.isdecimal())
    if not steps:
        raise ValueError(f"{path}: nothing was evaluated there yet (run.evaluate, run.eval_every)")
    evaluations = tuple(
        (positions.get(step, replace(end, step=step)), _evaluation(run.evaluation(step))) for step in steps
    )
    return Compared(evaluations, tuple(rewards), tuple(read_draws(run.evaluation(steps[-1]))), _settings(run))


def progress(rows: Iterable[tuple[int, Mapping[str, float | None]]]) -> Iterator[Place]:
    """Yield the run's progress at each step. rows: (step, metrics) in order."""
    tokens = hours = 0.0
    for step, values in rows:
        tokens += values.get("rollout/tokens") or 0.0
        seconds = {name: value or 0.0 for name, value in values.items() if name.startswith("timing_s/")}
        hours += sum(value for name, value in seconds.items() if name not in _NO_PARTS) / 3600
        yield Place(step, tokens, hours)


def side_by_side(runs: Sequence[Compared], names: Sequence[str]) -> dict[str, Any]:
    """Return the content of `marsrl compare`, as JSON.

    rows: results of the last evaluations, with one cell per run. costs: costs of an episode in these evaluations.
    charts: {title, curves}, with one curve per run. A curve has a list of positions for each of AXES, and lists mean, low and
        high; low and high are None where there is no interval.
    settings: settings that differ, with each run's value.
    """
    last = [run.last.rows for run in runs]
    ordered = [*dict.fromkeys(name for rows in last for name in rows if name not in ("alone", "system"))]
    ordered += [name for name in ("alone", "system") if any(name in rows for rows in last)]
    shares = [name for name in ordered if name.rpartition("/")[2] in ("system", "alone")]
    charts = [
        {
            "title": f"{name}: share right",
            "curves": [_curve([(p, e.rows.get(name)) for p, e in run.evaluations]) for run in runs],
        }
        for name in reversed(shares)
    ]
    if any(run.rewards for run in runs):
        charts.append({"title": "reward, mean of all agents", "curves": [_curve(run.rewards) for run in runs]})
    return {
        "names": list(names),
        "colors": [COLORS[i % len(COLORS)] for i in range(len(names))],
        "rows": [{"name": name, "cells": [*_cells(name, runs, last)]} for name in ordered],
        "columns": COLUMNS,
        "meaning": MEANING,
        "costs": [{"name": name, **_costs(run.last)} for name, run in zip(names, runs, strict=True)],
        "settings": _settings_that_differ(runs),
        "axes": AXES,
        "charts": charts,
    }


def _cells(name: str, runs: Sequence[Compared], rows: Sequence[Mapping[str, Estimate]]) -> Iterator[dict[str, Any]]:
    """Yield a row of the last evaluations: each run's value, and its difference from the first run."""
    first = rows[0].get(name)
    for i, run in enumerate(runs):
        value, gap = rows[i].get(name), difference(runs[0], run, name) if i else None
        yield {
            "value": numbers_of(value),
            "is_of_other_inputs": of_other_inputs(first, value),
            "gap": None if gap is None else str(gap),
            "num_problems": 0 if gap is None else gap.num_problems,
            "is_clear": gap is not None and gap.is_clear,
            "is_better": gap is not None and gap.mean > 0,
        }


def numbers_of(value: Estimate | None) -> dict[str, float] | None:
    """Return {mean, low, high, n} of an estimate; None if nothing was measured."""
    return None if value is None or not value.n else value.model_dump(include={"mean", "low", "high", "n"})


def _costs(evaluation: Evaluation) -> dict[str, Any]:
    whole, parts = episode_costs(evaluation)
    return {"cells": whole.cells, "parts": [{"name": part.name, "cells": part.cells} for part in parts]}


def _curve(points: Sequence[tuple[Place, Estimate | float | None]]) -> dict[str, list[float | None]]:
    """Return the curve {x by axis, mean, low, high} through the points that have a value."""
    known = [
        (place, value) for place, value in points if value is not None and getattr(value, "mean", value) is not None
    ]
    curve: dict[str, list[float | None]] = {axis: [getattr(place, axis) for place, _ in known] for axis in AXES}
    curve["mean"] = [value.mean if isinstance(value, Estimate) else value for _, value in known]
    for end in ("low", "high"):
        curve[end] = [getattr(value, end, None) for _, value in known]
    return curve


def names_of(paths: Sequence[Path]) -> list[str]:
    """Return the shortest suffixes of the paths that distinguish them."""
    runs = [path.resolve().parts for path in paths]

    def name(run: tuple[str, ...]) -> str:
        lengths = (num for num in range(1, len(run)) if sum(other[-num:] == run[-num:] for other in runs) <= 1)
        return str(Path(*run[-next(lengths, len(run)) :]))

    return list(map(name, runs))


def _settings_that_differ(runs: Sequence[Compared]) -> dict[str, list[str]]:
    """Return the settings that differ between runs, with each run's value."""
    keys = dict.fromkeys(key for run in runs for key in run.settings if key not in OF_THE_START)
    told = {key: [run.settings.get(key, "not set") for run in runs] for key in keys}
    return {key: values for key, values in told.items() if len(set(values)) > 1}


def difference(first_run: Compared, second_run: Compared, row: str) -> Difference | None:
    """Estimate how much second_run gains over first_run, by a paired bootstrap over problems with judged answers in both.

    row: name of the row: system, alone, <set>/system or <set>/alone. Other rows do not cover every problem, and give None.
    Returns None if no problem was judged in both runs. Problems in different files are the same if question and answer are equal.
    """
    set_name, _, row_kind = row.rpartition("/")
    if row_kind not in ("system", "alone"):
        return None
    first, second = (_by_problem(each.draws, set_name, row_kind) for each in (first_run, second_run))
    shared = sorted(first.keys() & second.keys())
    if not shared:
        return None
    gaps = np.array([np.mean(second[name]) - np.mean(first[name]) for name in shared])
    mean = float(gaps.mean())
    low, high = bootstrap(len(shared), ratio(gaps, np.ones(len(shared))))
    if (
        mean and high - low < 1e-12
    ):  # All gaps are equal, but an unseen share of problems may have any gap from -1 to 1.
        unseen = wilson_interval(0, len(shared))[1]
        low, high = mean - unseen * (1 + mean), mean + unseen * (1 - mean)
    return Difference(mean, low, high, len(shared))


def _by_problem(draws: Sequence[Draw], set_name: str, row_kind: str) -> dict[str, list[float]]:
    correctness: dict[str, list[float]] = defaultdict(list)
    for draw in draws:
        answer = draw.system if row_kind == "system" else draw.alone
        if answer is not None and answer.correct is not None and set_name in ("", draw.of):
            correctness[draw.question].append(answer.correct)
    return correctness


def _settings(run: RunDirectory) -> dict[str, str]:
    """Return the settings by dotted key; {} without a saved config."""
    history: dict[str, list[str]] = {}
    for file in run.configs:
        try:
            settings = yaml.safe_load(file.read_bytes())
        except yaml.YAMLError as error:
            raise ValueError(f"{file} is not YAML: {error}") from error
        for key, value in flat(settings).items() if isinstance(settings, dict) else ():
            history.setdefault(key, []).append(str(value))
    return {key: ", then ".join(dict.fromkeys(values)) for key, values in history.items()}


def _evaluation(folder: Path) -> Evaluation:
    return read_saved(folder / EVALUATION, Evaluation, "an evaluation")
