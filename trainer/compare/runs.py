"""What runs and evaluations on disk have reached, and how they differ on the problems that they share."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import yaml

from marsrl.trainer.evaluate.draws import EVALUATION, Draw, Said, read_draws
from marsrl.trainer.evaluate.intervals import bootstrap, ratio
from marsrl.trainer.report.metrics import read_metrics
from marsrl.trainer.report.summary import Estimate, Evaluation, load_summary
from marsrl.trainer.runs.directory import RunDirectory
from marsrl.trainer.runs.existing_run import OF_THE_START, flat

_NO_PARTS = ("timing_s/total", "timing_s/evaluate")
AXES = ("step", "tokens", "hours")


@dataclass(frozen=True, slots=True)
class Place:
    """How far a run was: steps, tokens that it had trained on, hours of its steps without those of evaluations."""

    step: int = 0
    tokens: float = 0.0
    hours: float = 0.0


@dataclass(frozen=True, slots=True)
class Compared:
    """One run, or one evaluation alone.

    rewards: the mean of all agents' by place; draws: of the last evaluation; settings: by dotted key, "200, then 22" of one that
    was another when the run went on.
    """

    name: str
    evaluations: tuple[tuple[Place, Evaluation], ...]
    rewards: tuple[tuple[Place, float], ...]
    draws: tuple[Draw, ...]
    settings: Mapping[str, str]

    @property
    def last(self) -> Evaluation:
        return self.evaluations[-1][1]


@dataclass(frozen=True, slots=True)
class Difference:
    """Mean of the differences over num_problems that both have, with its 95% interval; low and high are the mean itself where
    there is one problem, which has none."""

    mean: float
    low: float
    high: float
    num_problems: int

    @property
    def is_clear(self) -> bool:
        """Is 0 outside the interval?"""
        return self.num_problems > 1 and (self.low > 0 or self.high < 0)

    def __str__(self) -> str:
        interval = f"{self.low:+.3f} to {self.high:+.3f}" if self.num_problems > 1 else "one problem, no interval"
        return f"{self.mean:+.3f} ({interval})"


def rows_of(evaluation: Evaluation) -> dict[str, Estimate]:
    """What is shown of it: by name, the first agent alone and the system at the end."""
    rows = evaluation.rows
    system = rows.pop("system")
    return {**rows, **({"alone": evaluation.alone} if evaluation.alone is not None else {}), "system": system}


def read_compared(path: Path) -> Compared:
    """A run's directory, or the folder of an evaluation (`marsrl evaluate --out`).

    Raises:
        ValueError: it is neither, nothing was evaluated in it, or a file of it is damaged.
    """
    run = RunDirectory(path)
    if (path / EVALUATION).is_file():
        found_alone = ((Place(), _evaluation(path)),)
        return Compared(path.name or str(path), found_alone, (), tuple(read_draws(path)), _settings(run))
    if not run.config.is_file():
        raise ValueError(f"{path} is neither a run (it has no config.yaml) nor an evaluation (no {EVALUATION})")
    places, rewards = {0: Place()}, []
    tokens = hours = 0.0
    for row in read_metrics(run.metrics) if run.metrics.exists() else []:
        tokens += row.values.get("rollout/tokens") or 0.0
        seconds = {name: value or 0.0 for name, value in row.values.items() if name.startswith("timing_s/")}
        hours += sum(value for name, value in seconds.items() if name not in _NO_PARTS) / 3600
        places[row.step] = Place(row.step, tokens, hours)
        if (reward := row.values.get("reward/all/mean")) is not None:
            rewards.append((places[row.step], reward))
    steps = sorted(
        int(each.parent.name.removeprefix("step_"))
        for each in run.evaluations.glob(f"step_*/{EVALUATION}")
        if each.parent.name.removeprefix("step_").isdecimal()
    )
    found = [(places.get(step, Place(step, tokens, hours)), _evaluation(run.evaluation(step))) for step in steps]
    if not found and run.summary.exists():  # of a run from before evaluations were kept
        summary = load_summary(run.summary)
        ends = ((0, summary.before), (summary.steps, summary.after))
        found = [(places.get(step, Place(step, tokens, hours)), each) for step, each in ends if each is not None]
    if not found:
        raise ValueError(f"{path}: nothing was evaluated there yet (run.evaluate, run.eval_every)")
    draws = read_draws(run.evaluation(steps[-1])) if steps else []
    return Compared(path.resolve().name, tuple(found), tuple(rewards), tuple(draws), _settings(run))


def settings_that_differ(runs: Sequence[Compared]) -> dict[str, list[str]]:
    """What each run has of every setting that is not the same in all of them."""
    keys = dict.fromkeys(key for run in runs for key in run.settings if key not in OF_THE_START)
    told = {key: [run.settings.get(key, "not set") for run in runs] for key in keys}
    return {key: values for key, values in told.items() if len(set(values)) > 1}


def difference(one: Compared, other: Compared, row: str) -> Difference | None:
    """What `other` has more than `one`, in a row that both play every problem for (system, alone, <set>/system, <set>/alone): a
    paired bootstrap over the problems that both have judged answers to. None where they share none.

    A problem is the same where question and answer are, whatever file it came from.
    """
    of, _, who = row.rpartition("/")
    if who not in ("system", "alone"):
        return None
    first, second = (_by_problem(each.draws, of, who) for each in (one, other))
    shared = sorted(first.keys() & second.keys())
    if not shared:
        return None
    gaps = np.array([np.mean(second[name]) - np.mean(first[name]) for name in shared])
    low, high = bootstrap(len(shared), ratio(gaps, np.ones(len(shared))))
    return Difference(float(gaps.mean()), low, high, len(shared))


def _by_problem(draws: Sequence[Draw], of: str, who: str) -> dict[str, list[float]]:
    found: dict[str, list[float]] = defaultdict(list)
    for draw in draws:
        said: Said | None = draw.system if who == "system" else draw.alone
        if said is not None and said.correct is not None and of in ("", draw.of):
            found[draw.question].append(said.correct)
    return found


def _settings(run: RunDirectory) -> dict[str, str]:
    """{} where no config was kept."""
    told: dict[str, list[str]] = {}
    for file in run.configs:
        try:
            found = yaml.safe_load(file.read_bytes())
        except yaml.YAMLError as error:
            raise ValueError(f"{file} is no YAML: {error}") from error
        for key, value in flat(found).items() if isinstance(found, dict) else ():
            told.setdefault(key, []).append(str(value))
    return {key: ", then ".join(dict.fromkeys(values)) for key, values in told.items()}


def _evaluation(folder: Path) -> Evaluation:
    path = folder / EVALUATION
    try:
        return Evaluation.model_validate(json.loads(path.read_bytes()))
    except ValueError as error:  # pydantic's ValidationError is one
        raise ValueError(f"{path} is not an evaluation of this version of marsrl: {error}") from error
