"""`marsrl evaluate`: a team on held-out problems, without a trainer."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from marsrl.trainer.build import make_evaluator, open_team
from marsrl.trainer.checks.preflight import preflight
from marsrl.trainer.config.read import models_given, read_config
from marsrl.trainer.evaluate.draws import EVALUATION, Kept
from marsrl.trainer.models.export import exported
from marsrl.trainer.report.console import RunConsole
from marsrl.trainer.runs.directory import RunDirectory, write_json
from marsrl.trainer.runs.existing_run import keep_settings
from marsrl.trainer.runs.lock import RunLock


def settings_of_run(run: Path) -> tuple[str, list[str]]:
    """(config file, words) to evaluate the run's team with the weights of its latest checkpoint.

    run: a run directory, or one of its checkpoints: checkpoints/best, checkpoints/step_N.

    Raises ValueError: no run, or a run without a complete checkpoint.
    """
    source, run = run, run.absolute().parents[1] if run.absolute().parent.name == "checkpoints" else run
    config = RunDirectory(run).config
    if not config.is_file() or not source.exists():
        raise ValueError(
            f"{source} is neither a setting (key.sub=value) nor a run directory: it has no config.yaml, and is no checkpoint in "
            "one (checkpoints/best, checkpoints/step_N)"
        )
    models = exported(source.absolute())
    words = [f"policies.{name}.model={path.resolve()}" for name, path in models.items()]
    for name, policy in read_config(str(config), (), trains=False)[0].policies.items():
        if policy.adapter is not None:  # it is in the exported model
            words += [f"policies.{name}.base=null", f"policies.{name}.adapter=null"]
    return str(config), words


def evaluate_alone(config_file: str | None, settings: Sequence[str], out: Path | None = None) -> None:
    """Print the evaluation as JSON; then to stderr a table of accuracy, tokens, seconds and cost.

    The fixed inputs are collected from the team itself. out: a folder for the evaluation and every finished draw; an earlier
    evaluation in it is resumed.
    """
    console = RunConsole()
    config, origin = read_config(config_file, settings, trains=False)
    with origin.places_in_errors():
        checked = preflight(config, world_size=1, trains=False)
        config = checked.config
        models = models_given(config)
    console.message(f"# settings: {origin}")
    for warning in checked.warnings:
        console.warning(warning)
    with ExitStack() as stack:
        if out is not None:
            stack.callback(RunLock.of_out(out, console.warning).release)
            keep_settings(RunDirectory(out), config, str(origin))
        kept = stack.enter_context(Kept(out))
        evaluator = make_evaluator(checked, stack.enter_context(open_team(checked, models)))
        versions = dict.fromkeys(config.policies, 0)
        num_kept, num_draws = evaluator.num_kept(versions, kept)
        if num_kept:
            console.message(f"{out}: {num_kept} of {num_draws} draws are kept")
        with console.progress("fixed inputs", unit="episodes") as bar:
            evaluator.collect_inputs(versions, bar.played, kept)
        with console.progress("evaluation", unit="episodes") as bar:
            start = time.monotonic()
            found = evaluator.evaluate(versions, bar.played, kept)
        seconds = time.monotonic() - start
    result = found.model_dump(mode="json")
    print(json.dumps(result, indent=1), flush=True)  # before the table, which should be last in a terminal
    if out is not None:
        write_json(out / EVALUATION, result)
    console.team(config_file or "evaluation", found, seconds)
    if out is not None:
        console.message(f"kept in {out / EVALUATION}")
