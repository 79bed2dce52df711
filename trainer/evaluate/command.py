"""`marsrl evaluate`: a team on held-out problems, without a trainer."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from marsrl.trainer.build import make_evaluator, open_team
from marsrl.trainer.checks.preflight import preflight
from marsrl.trainer.config import RunConfig
from marsrl.trainer.config.read import models_given, read_config
from marsrl.trainer.evaluate.draws import EVALUATION, Kept
from marsrl.trainer.models.export import exported
from marsrl.trainer.report.console import RunConsole
from marsrl.trainer.report.summary import Evaluation
from marsrl.trainer.runs.directory import RunDirectory, write_json
from marsrl.trainer.runs.kept_prompts import keep_prompts, with_kept_prompts
from marsrl.trainer.runs.lock import RunLock


def settings_of_run(run: Path) -> tuple[str, list[str]]:
    """(the config file, words) with which the run's team is evaluated, as its latest checkpoint has it.

    Raises:
        ValueError: it is no run, or has no whole checkpoint.
    """
    config = RunDirectory(run).config
    if not config.is_file():
        raise ValueError(f"{run} is neither a setting (key.sub=value) nor a run directory: it has no config.yaml")
    models = exported(run)
    return str(config), [f"policies.{name}.model={path.resolve()}" for name, path in models.items()]


def evaluate_alone(
    config_file: str | None,
    settings: Sequence[str],
    json_file: str | None,
    compare: Sequence[str] = (),
    out: Path | None = None,
) -> None:
    """Print the evaluation as JSON, write it to json_file, and then to stderr a table of accuracy, tokens, seconds and cost, and
    where the files are.

    The fixed inputs are collected from the team itself. compare: further config files or presets, evaluated with the same
    settings one after the other; the JSON then has an entry for each. out: a folder that keeps the evaluation and every draw that
    has ended; where it has begun, it goes on. With `compare` each has a folder in it, by the file's name.

    Raises:
        ValueError: the settings, the data or the model cannot be used.
    """
    console = RunConsole()
    configs = [config_file, *compare]
    names = [file or "evaluation" for file in configs]
    folders = _folders(names, out)
    found = [_evaluated(file, settings, console, folder) for file, folder in zip(configs, folders, strict=True)]
    results = [evaluation.model_dump(mode="json") for evaluation, _ in found]
    result = dict(zip(names, results, strict=True)) if compare else results[0]
    print(json.dumps(result, indent=1), flush=True)  # before the table, which a terminal is to show at its end
    if json_file is not None:
        write_json(Path(json_file), result)
    console.teams([(name, *each) for name, each in zip(names, found, strict=True)])
    files = [str(folder / EVALUATION) for folder in folders if folder is not None]
    if places := [*files, *([json_file] if json_file is not None else [])]:
        console.message(f"kept in {', '.join(places)}")


def _folders(names: Sequence[str], out: Path | None) -> list[Path | None]:
    """Where each evaluation is kept."""
    if out is None or len(names) == 1:
        return [out] * len(names)
    stems = [Path(name).stem for name in names]
    if len(set(stems)) < len(stems):
        raise ValueError(f"--out keeps each config by its name, and two of {', '.join(names)} have one; rename a file")
    return [out / stem for stem in stems]


def _evaluated(
    config_file: str | None, settings: Sequence[str], console: RunConsole, folder: Path | None
) -> tuple[Evaluation, float]:
    """The evaluation of these settings, and its seconds without the start of the engines."""
    config, origin = read_config(config_file, settings, trains=False)
    with origin.places_in_errors():
        checked = preflight(config, world_size=1, trains=False)
        config = checked.config
        models = models_given(config)
    console.message(f"# settings: {origin}")
    for warning in checked.warnings:
        console.warning(warning)
    with ExitStack() as stack:
        kept = None if folder is None else _kept(stack, folder, config, str(origin))
        team = stack.enter_context(open_team(checked, models))
        evaluator = make_evaluator(checked, team)
        versions = dict.fromkeys(config.policies, 0)
        if kept is not None:
            num_kept, num_draws = evaluator.num_kept(versions, kept)
            if num_kept:
                console.message(f"{folder}: {num_kept} of {num_draws} draws are kept")
        with console.progress("fixed inputs", unit="episodes") as bar:
            evaluator.collect_inputs(versions, bar.played, kept)
        with console.progress("evaluation", unit="episodes") as bar:
            start = time.monotonic()
            found = evaluator.evaluate(versions, bar.played, kept)
        if folder is not None:
            write_json(folder / EVALUATION, found.model_dump(mode="json"))
        return found, time.monotonic() - start


def _kept(stack: ExitStack, folder: Path, config: RunConfig, made_of: str) -> Kept:
    """What is kept in the folder, which is this process's as long as the stack is open."""
    directory = RunDirectory(folder)
    if directory.has_begun:
        raise ValueError(f"--out {folder} is the directory of a training run; name another folder")
    folder.mkdir(parents=True, exist_ok=True)
    lock = RunLock(directory)
    stack.callback(lock.release)
    keep_prompts(directory, config)
    directory.write_config(with_kept_prompts(config).model_dump(mode="json"), made_of)
    return stack.enter_context(Kept(folder))
