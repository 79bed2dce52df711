"""`marsrl evaluate`: a team on held-out problems, without a trainer."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path

from marsrl.trainer.build import make_evaluator, open_team
from marsrl.trainer.preflight import preflight
from marsrl.trainer.read_config import models_given, read_config
from marsrl.trainer.report.console import RunConsole
from marsrl.trainer.report.summary import Evaluation
from marsrl.trainer.runs.directory import write_json


def evaluate_alone(
    config_file: str | None, settings: Sequence[str], json_file: str | None, compare: Sequence[str] = ()
) -> None:
    """Print the evaluation as JSON, write it to json_file, and a table of accuracy, tokens, seconds and cost to stderr.

    The probe is made by the team itself. compare: further config files or presets, evaluated with the same settings one after the
    other; the JSON then has an entry for each.

    Raises:
        ValueError: the settings, the data or the model cannot be used.
    """
    console = RunConsole()
    files = [config_file, *compare]
    found = [_evaluated(file, settings, console) for file in files]
    names = [file or "evaluation" for file in files]
    console.teams([(name, *each) for name, each in zip(names, found, strict=True)])
    results = [evaluation.model_dump(mode="json") for evaluation, _ in found]
    result = dict(zip(names, results, strict=True)) if compare else results[0]
    print(json.dumps(result, indent=1))
    if json_file is not None:
        write_json(Path(json_file), result)


def _evaluated(config_file: str | None, settings: Sequence[str], console: RunConsole) -> tuple[Evaluation, float]:
    """The evaluation of these settings, and its seconds without the start of the engines."""
    config, origin = read_config(config_file, settings)
    with origin.places_in_errors():
        checked = preflight(config, world_size=1, trains=False)
        config = checked.config
        models = models_given(config)
    console.message(f"# settings: {origin}")
    for warning in checked.warnings:
        console.warning(warning)
    with open_team(checked, models) as team:
        evaluator = make_evaluator(checked, team)
        versions = dict.fromkeys(config.policies, 0)
        with console.progress("probe", unit="episodes") as bar:
            evaluator.make_probe(versions, bar.played)
        with console.progress("evaluation", unit="episodes") as bar:
            start = time.monotonic()
            return evaluator.evaluate(versions, bar.played), time.monotonic() - start
